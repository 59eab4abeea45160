"""What every converter owes the layer it replaces, whatever its class, and that the state dict
holds the function.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.layers import norm as plain
from timm.layers import norm_act as fused
from timm.models.metaformer import GroupNorm1NoBias, LayerNorm2dNoBias, LayerNormNoBias
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d as TorchvisionLayerNorm2d
from torchvision.ops import FrozenBatchNorm2d

import retrofit
from retrofit.surgery import TARGETS, converter_for
from retrofit.surgery.norm_layers import KNOWN
from tests.layers.cases import assert_same_gradient
from tests.surgery.networks import trained

MAPS, ROWS, VOLUMES, SEQUENCE = (3, 8, 5, 4), (3, 5, 8), (2, 8, 3, 4, 2), (3, 8, 5)


def norm_act(cls: Callable[..., nn.Module], *args: Any) -> nn.Module:
    return cls(*args, act_layer=nn.SiLU, drop_layer=nn.Dropout2d, inplace=False)


def sync_norm_act() -> nn.Module:
    module = fused.SyncBatchNormAct(8)
    module.act, module.drop = nn.SiLU(), nn.Dropout2d(0.3)
    return module


SOURCES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "BatchNorm1d": (
        lambda: nn.BatchNorm1d(8, eps=1e-3, momentum=0.3),
        SEQUENCE,
        "BatchNormalNorm1d",
    ),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8, eps=1e-3, momentum=0.3), MAPS, "BatchNormalNorm2d"),
    "BatchNorm2d cumulative": (lambda: nn.BatchNorm2d(8, momentum=None), MAPS, "BatchNormalNorm2d"),
    "BatchNorm2d untracked": (
        lambda: nn.BatchNorm2d(8, track_running_stats=False),
        MAPS,
        "BatchNormalNorm2d",
    ),
    "BatchNorm2d plain": (lambda: nn.BatchNorm2d(8, affine=False), MAPS, "BatchNormalNorm2d"),
    "BatchNorm2d no bias": (lambda: nn.BatchNorm2d(8, bias=False), MAPS, "BatchNormalNorm2d"),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(8), VOLUMES, "BatchNormalNorm3d"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(8), MAPS, "SyncBatchNormalNorm"),
    "BatchNormAct2d": (lambda: norm_act(fused.BatchNormAct2d, 8), MAPS, "BatchNormalNormAct2d"),
    "BatchNormAct2d no act": (
        lambda: fused.BatchNormAct2d(8, apply_act=False),
        MAPS,
        "BatchNormalNormAct2d",
    ),
    "SyncBatchNormAct": (sync_norm_act, MAPS, "SyncBatchNormalNormAct"),
    "LayerNorm": (lambda: nn.LayerNorm(8, eps=1e-3), ROWS, "LayerNormalNorm"),
    "LayerNorm two dims": (lambda: nn.LayerNorm((5, 8)), ROWS, "LayerNormalNorm"),
    "LayerNorm plain": (lambda: nn.LayerNorm(8, elementwise_affine=False), ROWS, "LayerNormalNorm"),
    "timm LayerNorm": (lambda: plain.LayerNorm(8), ROWS, "LayerNormalNorm"),
    "LayerNormFp32": (lambda: plain.LayerNormFp32(8), ROWS, "LayerNormalNorm"),
    "LayerNormNoBias": (lambda: LayerNormNoBias(8), ROWS, "LayerNormalNorm"),
    "LayerNorm2d": (lambda: plain.LayerNorm2d(8), MAPS, "LayerNormalNorm2d"),
    "LayerNorm2dFp32": (lambda: plain.LayerNorm2dFp32(8), MAPS, "LayerNormalNorm2d"),
    "LayerNormExp2d": (lambda: plain.LayerNormExp2d(8), MAPS, "LayerNormalNorm2d"),
    "LayerNorm2dNoBias": (lambda: LayerNorm2dNoBias(8), MAPS, "LayerNormalNorm2d"),
    "torchvision LayerNorm2d": (lambda: TorchvisionLayerNorm2d(8), MAPS, "LayerNormalNorm2d"),
    "LayerNormAct": (
        lambda: fused.LayerNormAct(8, drop_layer=nn.Dropout),
        ROWS,
        "LayerNormalNormAct",
    ),
    "LayerNormActFp32": (
        lambda: fused.LayerNormActFp32(8, act_layer=nn.GELU),
        ROWS,
        "LayerNormalNormAct",
    ),
    "LayerNormAct2d": (lambda: norm_act(fused.LayerNormAct2d, 8), MAPS, "LayerNormalNormAct2d"),
    "LayerNormAct2dFp32": (
        lambda: norm_act(fused.LayerNormAct2dFp32, 8),
        MAPS,
        "LayerNormalNormAct2d",
    ),
    "GroupNorm": (lambda: nn.GroupNorm(4, 8, eps=1e-3), MAPS, "GroupNormalNorm"),
    "timm GroupNorm": (lambda: plain.GroupNorm(8, num_groups=2), MAPS, "GroupNormalNorm"),
    "GroupNorm1": (lambda: plain.GroupNorm1(8), MAPS, "GroupNormalNorm"),
    "GroupNorm1NoBias": (lambda: GroupNorm1NoBias(8), MAPS, "GroupNormalNorm"),
    "GroupNormAct": (lambda: norm_act(fused.GroupNormAct, 8, 4), MAPS, "GroupNormalNormAct"),
    "GroupNorm1Act": (lambda: norm_act(fused.GroupNorm1Act, 8), MAPS, "GroupNormalNormAct"),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(8, affine=True), SEQUENCE, "InstanceNormalNorm1d"),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8), MAPS, "InstanceNormalNorm2d"),
    "InstanceNorm2d tracked": (
        lambda: nn.InstanceNorm2d(8, track_running_stats=True),
        MAPS,
        "InstanceNormalNorm2d",
    ),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(8, affine=True), VOLUMES, "InstanceNormalNorm3d"),
}
FROZEN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "torchvision frozen": (lambda: FrozenBatchNorm2d(8, eps=1e-3), MAPS, ""),
    "timm frozen Act": (lambda: norm_act(fused.FrozenBatchNormAct2d, 8), MAPS, ""),
}


def cases() -> dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...], str]]:
    """Return, by a name, the target, how to build a source, the shape of its input, and the class
    that it becomes.

    Every source is tried to its normality counterpart, and every BatchNorm with statistics to the
    targets beside.
    """
    every = {f"{name} to normal": ("normal", *source) for name, source in SOURCES.items()}
    batch = {
        name: source
        for name, source in SOURCES.items()
        if "BatchNorm" in name and "untracked" not in name
    }
    for name, (build, shape, normal) in {**batch, **FROZEN}.items():
        act = "Act" if "Act" in name else ""
        every[f"{name} to frozen"] = "frozen", build, shape, f"FrozenBatchNorm{act}"
        every[f"{name} to ln"] = "ln", build, shape, f"MigratedGroupNorm{act}"
        if "BatchNorm" in name and not name.startswith("Sync"):
            every[f"{name} to dbn"] = (
                "dbn",
                build,
                shape,
                "Decorrelated" + normal.replace("Normal", ""),
            )
    for to, cls in (("gn", "MigratedGroupNorm"), ("dbnn", "DecorrelatedBatchNormalNorm2d")):
        every[f"BatchNorm2d to {to}"] = to, *SOURCES["BatchNorm2d"][:2], cls
    return every


EVERY = pytest.mark.parametrize(
    ("to", "build", "shape", "target"), cases().values(), ids=cases().keys()
)
FEW = (
    *(
        f"{name} to normal"
        for name in ("BatchNormAct2d", "LayerNorm", "GroupNorm", "InstanceNorm2d tracked")
    ),
    *(
        "SyncBatchNorm to frozen",
        "timm frozen Act to ln",
        "BatchNorm2d plain to dbn",
        "BatchNorm2d to dbnn",
    ),
)
"""A source of each family, and each converter."""
CONSTANT = ("frozen", "gn", "ln")
"""Targets whose layers are the source in evaluation, in training too."""
ADDED = {"strength", "gain", "eps", "group_eps", "num_batches_tracked", "running_lambda"}
ADDED |= {"running_covariance", "running_whitening"}


def reference(module: nn.Module) -> nn.Module:
    """A copy to compare with; SyncBatchNorm runs on the CPU only in eval, so its plain twin stands
    in for it.
    """
    clone: Any = copy.deepcopy(module)
    if not isinstance(clone, nn.SyncBatchNorm):
        return clone
    twin = nn.BatchNorm2d(8)
    twin.load_state_dict(clone.state_dict())
    return nn.Sequential(twin, *([clone.drop, clone.act] if hasattr(clone, "act") else []))


def test_every_known_class_and_target_is_tried() -> None:
    assert set(OPTIONS) == set(TARGETS)
    tried = {f"{type(b()).__module__}.{type(b()).__qualname__}" for b, _, _ in SOURCES.values()}
    assert tried == {kind for kind, family in KNOWN.items() if family != "frozen-bn"} | {
        "timm.layers.norm_act.SyncBatchNormAct"
    }


@EVERY
def test_same_function_in_eval_and_training_and_full_strength_trains(
    to: str, build: Callable[[], nn.Module], shape: tuple[int, ...], target: str
) -> None:
    source = trained(build())
    expected = reference(source)
    model, report = retrofit.convert(nn.Sequential(source), to)
    assert type(model[0]).__name__ == target
    assert report.plan.counts == {"converted": 1, "kept": 0, "unsupported": 0}
    for training in (False, True):
        model.train(training)
        expected.train(training and to not in CONSTANT)
        for child in model[0].children() if to in CONSTANT else ():
            child.eval()  # the dropout
        x, y = (
            torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
            for _ in range(2)
        )
        torch.manual_seed(2)
        out = model(x)
        torch.manual_seed(2)
        reference_out = expected(y)
        torch.testing.assert_close(out, reference_out, rtol=1e-5, atol=5e-6)
        assert_same_gradient(out, x, reference_out, y, 1e-4, 1e-5)
    ours, theirs = model[0].state_dict(), expected.state_dict()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key.removeprefix("0.")], value, rtol=1e-5, atol=1e-5)
    if to != "frozen":
        assert retrofit.set_strength(model, 1.0) == 1
    x = torch.randn(shape).exp().requires_grad_()
    model.train()(x).square().mean().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (x, *model.parameters()))  # type: ignore[union-attr]


@EVERY
def test_tensors_are_moved_and_settings_carried(
    to: str, build: Callable[[], nn.Module], shape: tuple[int, ...], target: str
) -> None:
    source = trained(build()).to(torch.bfloat16)
    for parameter in source.parameters():
        parameter.requires_grad_(False)
    tensors = (*source.named_parameters(), *source.named_buffers())
    places, parameters = (
        {name: tensor.data_ptr() for name, tensor in tensors},
        set(source.parameters()),
    )
    calls: list[str] = []
    source.register_forward_hook(lambda *_: calls.append("hook"))
    source.mark = "kept"  # type: ignore[assignment]
    model, _ = retrofit.convert(nn.Sequential(source), to, check=False)
    new = model[0]
    now = dict((*new.named_parameters(), *new.named_buffers()))
    assert {name: now[name].data_ptr() for name in places} == places
    assert parameters <= set(new.parameters())
    assert not any(parameter.requires_grad for parameter in parameters)
    assert all(parameter.dtype == torch.bfloat16 for parameter in new.parameters())
    assert to == "frozen" or new.strength.dtype == torch.float32
    assert not new.training
    assert float(new.eps) == pytest.approx(source.eps)
    assert new.mark == "kept"
    added = set(new.state_dict()) - set(source.state_dict())
    assert set(source.state_dict()) <= set(new.state_dict())
    assert {name for name in added if not name.startswith("setting_")} <= ADDED
    for attribute in (
        "momentum",
        "track_running_stats",
        "normalized_shape",
        "affine",
        "act",
        "drop",
    ):
        if hasattr(source, attribute):
            assert getattr(new, attribute) == getattr(source, attribute), attribute
    calls.clear()  # the conversion may run the network
    assert model(torch.randn(shape, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert calls == ["hook"]


@pytest.mark.parametrize("name", FEW)
def test_aliases_root_deepcopy_and_meta(name: str) -> None:
    to, build, shape, target = cases()[name]
    shared = trained(build())
    model = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared)})
    model, report = retrofit.convert(model, to)
    assert model["first"] is model["second"][0]
    assert [row.name for row in report.plan.layers] == ["first", "second.0"]

    root, _ = retrofit.convert(trained(build()), to)
    assert type(root).__name__ == target
    x = torch.randn(shape)
    assert torch.equal(copy.deepcopy(root)(x), root(x))

    with torch.device("meta"):
        meta = nn.Sequential(build())
    retrofit.convert(meta, to)
    if build().state_dict():  # a layer without tensors does not say where it lives
        assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))


def test_the_whitening_starts_as_the_scaling_of_batch_norm() -> None:
    source, x = trained(timm.create_model("test_resnet")), torch.randn(2, 3, 64, 64)
    expected = source(x)
    model, report = retrofit.convert(source, "dbnn")
    assert report.params_after == report.params_before
    retrofit.set_strength(model, 1.0)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.train()(torch.randn(16, 3, 64, 64))
        whitened = model.eval()(x)
        retrofit.set_strength(model, 0.0)
        assert (model(x) - whitened).abs().max() > 0.01 * whitened.abs().max()


OPTIONS: dict[str, dict[str, Any]] = {
    **{to: {"alpha": 0.3} for to in ("bnn", "lnn", "gnn", "inn", "normal", "dbnn")},
    **{to: {"groups": 2, "ws": True} for to in ("gn", "gn-pn")},
    **{to: {"ws": True} for to in ("ln", "ln-pn")},
    **{to: {} for to in ("dbn", "frn-tlu", "frozen")},
    "evonorm-s0": {"groups": 2},
}
"""Options unlike the defaults; those that change which tensors there are (`ws`) are given to both
networks.
"""


class Net(nn.Module):
    """All families of normalization, small; at other sizes than the tests' it amplifies rounding
    errors: no checks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3), fused.BatchNormAct2d(8, act_layer=nn.SiLU)
        self.conv3, self.bn3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.gn, self.inorm, self.ln = (
            nn.GroupNorm(2, 8),
            nn.InstanceNorm2d(8, affine=True),
            nn.LayerNorm(8),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        x = self.inorm(self.gn(torch.tanh(self.bn3(self.conv3(x)))))
        return self.ln(x.amax((2, 3)))  # the mean of what InstanceNorm leaves is its beta


def dying() -> nn.Module:  # a trained network, some channels of which are nearly dead
    net: Any = trained(Net())
    for norm in (net.bn1, net.bn2, net.bn3):
        norm.running_var[:5] *= 1e-4
    return net


@pytest.mark.parametrize("to", OPTIONS)
def test_a_fresh_network_becomes_the_trained_one(to: str) -> None:
    shared = {key: value for key, value in OPTIONS[to].items() if key == "ws"}
    strengths = (1.0, 0.0, 0.5, 1.0) if converter_for(to).has_strength else (None, None)
    model, _ = retrofit.convert(dying(), to, **OPTIONS[to], check=False, strength=strengths[0])
    other, _ = retrofit.convert(Net(), to, **shared, check=False)
    x = torch.randn(4, 3, 12, 12)
    model.train()(x)
    for t in strengths[1:]:
        if t is not None:
            retrofit.set_strength(model, t)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        for training in (False, True):
            torch.testing.assert_close(
                other.train(training)(x), model.train(training)(x), rtol=1e-5, atol=1e-6
            )
            other.load_state_dict(copy.deepcopy(model.state_dict()))
    again, _ = retrofit.convert(Net(), to, **shared, check=False)
    again.load_state_dict(
        copy.deepcopy(other).state_dict()
    )  # what was loaded is handed on, by a copy too
    torch.testing.assert_close(again.eval()(x), model.eval()(x), rtol=1e-5, atol=1e-6)


def test_a_state_dict_holds_parameters_and_buffers_alone_that_may_be_swapped() -> None:
    model, x = retrofit.convert(Net(), "ln-pn", check=False)[0].eval(), torch.randn(2, 3, 12, 12)
    other, _ = retrofit.convert(dying(), "ln-pn", check=False, strength=1.0)
    assert set(model.state_dict()) == {
        name for name, _ in (*model.named_parameters(), *model.named_buffers())
    }
    swapped = torch.func.functional_call(model, other.state_dict(), x)
    torch.testing.assert_close(swapped, other.eval()(x), rtol=1e-5, atol=1e-6)


def test_casting_rounds_no_setting() -> None:
    model, _ = retrofit.convert(dying(), "gn", check=False)
    eps = [model.bn1.eps.item(), model.bn1.group_eps.item()]
    model.bfloat16()
    assert [model.bn1.eps.item(), model.bn1.group_eps.item()] == eps
    other, _ = retrofit.convert(Net(), "bnn", alpha=0.3, check=False)
    fresh, _ = retrofit.convert(Net(), "bnn", check=False)
    fresh.load_state_dict(other.bfloat16().state_dict())
    assert fresh.bn1.alpha == pytest.approx(0.3, abs=1e-3)
    other.load_state_dict(other.state_dict())
    assert other.bn1.alpha == 0.3


def test_a_setting_out_of_range_is_refused() -> None:
    for to, entry, value, message in (
        ("gn", "bn1.setting_num_groups", 3.0, "3 groups do not divide 8 channels"),
        ("bnn", "bn1.setting_alpha", 2.0, "alpha must lie"),
        ("bnn", "bn1.setting_alpha", float("nan"), "alpha must lie"),
        ("evonorm-s0", "bn1.setting_groups", 5.0, "5 groups do not divide"),
    ):
        model, _ = retrofit.convert(Net(), to, check=False)
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict({**model.state_dict(), entry: torch.tensor(value)})
