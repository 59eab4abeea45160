"""BatchNorm to the constant affine of its running statistics, and frozen BatchNorm as a source of other targets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, freeze_batch_norm_2d
from timm.layers.norm_act import FrozenBatchNormAct2d
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

import retrofit
from retrofit import RetrofitError, UsageError
from retrofit.diagnose.probe import probes
from retrofit.finetune.optim import freeze_all_but_norm
from retrofit.layers import FrozenBatchNorm
from retrofit.surgery import apply, plan, strength_of
from retrofit.surgery.identity_check import IdentityCheck
from tests.surgery.test_contract import MAPS, SEQUENCE, VOLUMES, norm_act, reference, sync_norm_act
from tests.surgery.test_contract import trained as trained_layer

SOURCES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "1d": (lambda: nn.BatchNorm1d(8, eps=1e-3), SEQUENCE, "FrozenBatchNorm"),
    "1d rows": (lambda: nn.BatchNorm1d(8), (5, 8), "FrozenBatchNorm"),
    "2d": (lambda: nn.BatchNorm2d(8, momentum=None), MAPS, "FrozenBatchNorm"),
    "2d plain": (lambda: nn.BatchNorm2d(8, affine=False), MAPS, "FrozenBatchNorm"),
    "2d no bias": (lambda: nn.BatchNorm2d(8, bias=False), MAPS, "FrozenBatchNorm"),
    "3d": (lambda: nn.BatchNorm3d(8), VOLUMES, "FrozenBatchNorm"),
    "sync": (lambda: nn.SyncBatchNorm(8), MAPS, "FrozenBatchNorm"),
    "act": (lambda: norm_act(BatchNormAct2d, 8), MAPS, "FrozenBatchNormAct"),
    "sync act": (sync_norm_act, MAPS, "FrozenBatchNormAct"),
    "torchvision frozen": (lambda: FrozenBatchNorm2d(8, eps=1e-3), MAPS, "FrozenBatchNorm"),
    "timm frozen": (lambda: norm_act(FrozenBatchNormAct2d, 8), MAPS, "FrozenBatchNormAct"),
}
EVERY = pytest.mark.parametrize(("build", "shape", "target"), SOURCES.values(), ids=SOURCES.keys())
FROM_FROZEN = ["gn", "ln", "gn-pn", "ln-pn", "frozen"]


def trained(model: nn.Module) -> nn.Module:
    """Give norms values that training could have left there, as parameters or buffers."""
    for module in model.modules():
        if hasattr(module, "running_var"):
            for name, low in (("running_mean", -0.2), ("running_var", 0.5), ("weight", 0.5), ("bias", -0.2)):
                value = getattr(module, name)
                value.data.copy_(torch.rand_like(value) * 0.5 + low)
    return model.eval()


@EVERY
def test_each_layer_is_its_source_in_evaluation(
    build: Callable[[], nn.Module], shape: tuple[int, ...], target: str
) -> None:
    source = trained_layer(build).train()
    expected = reference(source).eval()
    held = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    model, report = retrofit.convert(nn.Sequential(source), "frozen")
    (new,), x = model, torch.randn(shape)
    assert type(new).__name__ == target
    assert report.strength is None
    assert new.training
    kept = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    assert all(kept[name].data_ptr() == tensor.data_ptr() for name, tensor in held.items())
    assert all(parameter.requires_grad for parameter in new.parameters())
    for mode in (True, False):
        for module in new.children():
            module.eval()  # the dropout
        new.training = mode
        torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-6)
    assert new.num_batches_tracked == getattr(source, "num_batches_tracked", 0)
    model(x.requires_grad_()).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in new.parameters())
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))

    fresh, _ = retrofit.convert(build(), "frozen")
    fresh.load_state_dict(source.state_dict())
    torch.testing.assert_close(fresh.eval()(x), expected(x), rtol=1e-5, atol=1e-6)
    with torch.device("meta"):
        meta = build()
    meta = retrofit.convert(nn.Sequential(meta), "frozen")[0]
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_and_flags_are_carried(dtype: torch.dtype) -> None:
    source = nn.BatchNorm2d(8).to(dtype).eval()
    source.weight.requires_grad_(False)
    new = retrofit.convert(nn.Sequential(source), "frozen")[0][0]
    assert not new.training
    assert not new.weight.requires_grad
    assert new.bias.requires_grad
    assert new(torch.randn(MAPS, dtype=dtype)).dtype == dtype


class Net(nn.Module):
    """A backbone with frozen norms of torchvision's and timm's, and an activation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act = nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8, eps=1e-3), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3), FrozenBatchNormAct2d(16, act_layer=nn.SiLU)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))).mean((2, 3)))


@pytest.mark.parametrize("to", FROM_FROZEN)
def test_frozen_layers_are_a_source(to: str, tmp_path: Path) -> None:
    model = trained(Net())
    x = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = model(x)
    model, report = retrofit.convert(model, to)
    assert report.plan.counts == {"converted": 2, "kept": 0, "unsupported": 0}
    assert any("2 frozen layers were constants and are parameters now" in note for note in report.notes)
    assert sum(row.status == "converted" for row in report.plan.edits) == (2 if "pn" in to else 0)
    assert {"bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"} <= dict(model.named_parameters()).keys()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    if to != "frozen":
        assert retrofit.set_strength(model, 1.0) == (4 if "pn" in to else 2)
    expected = model(x).detach()
    other, _ = retrofit.convert(Net(), to)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(retrofit.fold(model, input_size=(3, 24, 24))(x), expected, rtol=1e-4, atol=1e-5)
    report = retrofit.export_onnx(model, tmp_path / "out.onnx", input_size=(3, 24, 24))
    assert report.parity.passed


@pytest.mark.parametrize("build", [Net, lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())])
def test_it_folds_to_nothing(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, _ = retrofit.convert(trained(build()), "frozen")
    retrofit.export_onnx(model, tmp_path / "out.onnx", input_size=(3, 24, 24))
    used = {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}
    assert "Conv" in used
    assert not used & {"BatchNormalization", "Mul", "Add", "Sub"} - ({"Mul"} if build is Net else set())


def test_a_frozen_network_of_the_library_through_everything(tmp_path: Path) -> None:
    model = freeze_batch_norm_2d(trained(timm.create_model("test_resnet")))
    with pytest.raises(RetrofitError, match=r"15 FrozenBatchNorm2d.*`to='frozen'`"):
        plan(model, "bnn")
    source = trained(timm.create_model("test_resnet"))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = source(x)
    model, _ = retrofit.convert(source, "frozen")
    retrofit.save(model, tmp_path / "a.safetensors")
    loaded = retrofit.load(tmp_path / "a.safetensors")
    torch.testing.assert_close(loaded.train()(x), expected, rtol=1e-4, atol=1e-5)
    assert strength_of(loaded) is None
    with pytest.raises(RetrofitError, match="no converted layer that has a strength"):
        retrofit.set_strength(loaded, 1.0)
    with pytest.raises(RetrofitError, match="already converted"):
        retrofit.convert(loaded, "frozen")
    norms = sum(isinstance(module, FrozenBatchNorm) for module in loaded.modules())
    assert len(probes(loaded)) == norms
    layers = [module for module in loaded.modules() if isinstance(module, FrozenBatchNorm)]
    assert freeze_all_but_norm(loaded) == sum(p.numel() for layer in layers for p in layer.parameters())
    again, report = retrofit.convert(loaded, "ln")  # what is frozen holds all that ln migrates
    assert report.plan.counts["converted"] == norms
    torch.testing.assert_close(again.eval()(x), expected, rtol=1e-4, atol=1e-5)


def test_a_probe_standardises_by_the_running_statistics() -> None:
    model, _ = retrofit.convert(trained(nn.Sequential(nn.Conv2d(3, 8, 1), BatchNormAct2d(8))), "frozen")
    (probe,), x = probes(model), torch.randn(MAPS)
    layer: Any = model[1]
    view = (1, -1, 1, 1)
    expected = (x - layer.running_mean.view(view)) / (layer.running_var.view(view) + layer.eps).sqrt()
    torch.testing.assert_close(probe.standardised(x), expected.flatten(2))
    torch.testing.assert_close(probe.output(x), expected * layer.weight.view(view) + layer.bias.view(view))


@pytest.mark.parametrize("to", ["ln-pn", pytest.param("frozen", marks=pytest.mark.slow)])
def test_a_detector_with_a_frozen_backbone(to: str) -> None:
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=3
    )
    anchors = AnchorGenerator(((8,), (16,), (32,), (64,), (128,)), ((0.5, 1.0, 2.0),) * 5)
    model = trained(FasterRCNN(backbone, 5, rpn_anchor_generator=anchors, min_size=64, max_size=64))
    check = IdentityCheck(model, (3, 64, 64))
    model, report = apply(plan(model, to), model)
    assert report.plan.counts["converted"] == 20
    assert check.compare(model).passed
    frozen = [name for name, p in model.backbone.body.layer1.named_parameters() if not p.requires_grad]
    assert all("bn" not in name for name in frozen)


def test_options_mean_nothing_and_untracked_layers_are_left() -> None:
    with pytest.raises(UsageError, match="`groups` means nothing"):
        plan(nn.Sequential(nn.BatchNorm2d(8)), "frozen", groups=2)
    with pytest.raises(RetrofitError, match="tracks no running statistics"):
        plan(nn.Sequential(nn.BatchNorm2d(8, track_running_stats=False)), "frozen")
    rows = plan(nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8)), "frozen", source=["bn", "gn"]).layers
    assert [row.status for row in rows] == ["converted", "unsupported"]
