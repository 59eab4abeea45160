"""ONNX files: right against PyTorch for every target, deterministic, whole or absent."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export import api
from retrofit.export.onnx import write
from tests.export.networks import norm, train_a_little
from tests.half_resnet import HALF


def network(to: str, size: int) -> nn.Module:
    options = {"img_size": size, "depth": 2} if to == "lnn" else HALF
    name = "vit_tiny_patch16_224" if to == "lnn" else "test_resnet"
    model, _ = retrofit.convert(timm.create_model(name, num_classes=50, **options), to, check=False)
    return train_a_little(model, size, 1.0)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval()


@pytest.fixture
def model() -> nn.Module:
    model = small()
    model(torch.zeros(1, 3, 6, 6))
    return model


def export(model: nn.Module, path: Path, **options: Any) -> Any:
    return retrofit.export_onnx(model, path, **{"input_size": (3, 6, 6), **options})


@pytest.mark.parametrize("to", ["bnn", pytest.param("lnn", marks=pytest.mark.slow)])
def test_parity(to: str, tmp_path: Path) -> None:
    model = network(to, 32)
    report = retrofit.export_onnx(model, tmp_path / "out.onnx", input_size=(3, 32, 32))
    assert report.parity.passed
    assert report.parity.batches == (1, 2)
    assert report.parity.tolerance == 1e-4
    session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"))
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
    found = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_strength_0_adds_no_node(tmp_path: Path) -> None:
    source = timm.create_model("test_resnet", **HALF)
    plain = retrofit.export_onnx(source, tmp_path / "bn.onnx", input_size=(3, 32, 32))
    converted = retrofit.export_onnx(retrofit.convert(source, "bnn")[0], tmp_path / "bnn.onnx", input_size=(3, 32, 32))
    assert plain.nodes == converted.nodes
    assert "BatchNormalization" not in plain.nodes


@pytest.mark.parametrize("opset", [18, pytest.param(20, marks=pytest.mark.slow), 22])
def test_opset(opset: int, model: nn.Module, tmp_path: Path) -> None:
    export(model, tmp_path / "out.onnx", opset=opset)
    assert onnx.load(tmp_path / "out.onnx").opset_import[0].version == opset


@pytest.mark.parametrize("opset", [9, 17, 23])
def test_unknown_opset(opset: int, model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="18 to 22"):
        export(model, tmp_path / "out.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


def test_same_bytes_every_time(model: nn.Module, tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(model, tmp_path / name)
    content = (tmp_path / "a").read_bytes()
    assert content == (tmp_path / "b").read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert b"site-packages" not in content


def test_metadata(model: nn.Module, tmp_path: Path) -> None:
    export(model, tmp_path / "out.onnx")
    found = {entry.key: entry.value for entry in onnx.load(tmp_path / "out.onnx").metadata_props}
    assert found["schema"] == "1"
    assert found["retrofit"] == retrofit.__version__
    assert json.loads(found["input_size"]) == [3, 6, 6]


def test_dynamic_batch_and_size(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    export(model, tmp_path / "out.onnx", dynamic_size=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"))
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    x = torch.randn(5, 3, 11, 8)
    found = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    torch.testing.assert_close(found, model(x).detach(), atol=1e-5, rtol=1e-5)


def test_polynomials(model: nn.Module, tmp_path: Path) -> None:
    images = list(torch.randn(4, 8, 3, 6, 6))
    report = export(model, tmp_path / "out.onnx", fold="poly", calibrate=images, degree=2, tolerance=0.5)
    assert report.parity.batches == (1, 3, 12)  # every second image
    (layer,) = report.layers
    assert (layer.form, layer.degree) == ("polynomial", 2)
    extra = ("Shape", "Concat")  # of older exporters
    nodes = {kind: number for kind, number in report.nodes.items() if kind not in extra}
    assert nodes == {"BatchNormalization": 1, "Clip": 1, "Conv": 1, "Gemm": 1, "Mul": 1, "Reshape": 1}
    x = torch.cat(images)
    session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"))
    found = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    with torch.no_grad():
        assert (found - model(x)).abs().max() < 0.2 * model(x).abs().max()


def test_polynomials_beyond_the_tolerance_leave_no_file(model: nn.Module, tmp_path: Path) -> None:
    images = [torch.randn(8, 3, 6, 6)]
    with pytest.raises(RetrofitError, match="less than 1e-07"):
        export(model, tmp_path / "out.onnx", fold="poly", calibrate=images, tolerance=1e-7)
    with pytest.raises(RetrofitError, match="raise `tolerance`"):
        export(model, tmp_path / "out.onnx", fold="poly", calibrate=images, tolerance=1e-7, degree=2)
    assert not list(tmp_path.iterdir())


def test_constant_lambdas_beyond_the_tolerance_leave_no_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, _ = retrofit.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten()), "gnn", check=False)
    retrofit.set_strength(model, 1.0)
    images = [torch.randn(8, 3, 6, 6)]
    with pytest.raises(RetrofitError, match=r"constant lambdas differs .* leave out `freeze_lambda`$"):
        export(model, tmp_path / "out.onnx", freeze_lambda=True, calibrate=images, tolerance=1e-6)
    assert not list(tmp_path.iterdir())


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let folding go wrong by what `change` does to the folded network."""
    real = api.fold_program

    def wrong(program: Any, fits: Any) -> None:
        real(program, fits)
        with torch.no_grad():
            change(program.module)

    monkeypatch.setattr(api, "fold_program", wrong)


def weight(net: nn.Module) -> Any:
    return next(p for name, p in net.named_parameters() if name == "0.weight")


def test_wrong_export_of_polynomials_leaves_no_file(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = api.to_onnx

    def wrong(program: Any, *args: Any) -> Any:
        kept = weight(program.module).clone()
        weight(program.module).add_(0.1)
        written = real(program, *args)
        weight(program.module).copy_(kept)
        return written

    monkeypatch.setattr(api, "to_onnx", wrong)
    with pytest.raises(RetrofitError, match=r"more than 0\.0001"):
        export(model, tmp_path / "out.onnx", fold="poly", calibrate=[torch.randn(8, 3, 6, 6)], tolerance=0.5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [0.1, math.nan])
def test_wrong_fold_leaves_no_file(
    error: float, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, lambda net: weight(net).add_(error))
    with pytest.raises(RetrofitError, match="folded network differs"):
        export(model, tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


def test_what_only_images_show_is_seen(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    class Far(nn.Module):
        """Differs from the identity beyond 100 only."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 100, 2 * x, x)

    def change(net: Any) -> None:
        net.add_module("far", Far())
        x = next(iter(net.graph.find_nodes(op="placeholder")))
        with net.graph.inserting_after(next(iter(net.graph.find_nodes(op="call_module", target="_guards_fn")))):
            far = net.graph.call_module("far", (x,))
        x.replace_all_uses_with(far, lambda user: user is not far and user.target != "_guards_fn")
        net.recompile()

    broken(monkeypatch, change)
    retrofit.fold(model, input_size=(3, 6, 6))
    with pytest.raises(RetrofitError, match="differs"):
        retrofit.fold(model, input_size=(3, 6, 6), calibrate=[200 * torch.rand(2, 3, 6, 6)])


def test_tolerance_of_a_fold(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda net: weight(net).mul_(1.01))
    retrofit.fold(model, input_size=(3, 6, 6), tolerance=0.2)
    with pytest.raises(RetrofitError, match=r"more than 0\.0001; .*raise `tolerance`"):
        retrofit.fold(model, input_size=(3, 6, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_folded_as_float32(dtype: torch.dtype, model: nn.Module) -> None:
    model = model.to(dtype)
    folded = retrofit.fold(model, input_size=(3, 6, 6))
    assert {p.dtype for p in folded.parameters()} == {torch.float32}
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(folded(x), model.float()(x), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_detector_gets_forms_and_is_compared_by_its_parts() -> None:
    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    ).eval()
    model, _ = retrofit.convert(model, "frozen", input_size=(3, 64, 64))
    with pytest.warns(UserWarning, match="^nothing is fused: detectors"):
        folded = retrofit.fold(model, input_size=(3, 64, 64))
    image = torch.rand(3, 64, 64)
    torch.testing.assert_close(folded([image])[0]["boxes"], model([image])[0]["boxes"])


def test_a_folded_network_compiles_copies_and_is_captured_again(model: nn.Module) -> None:
    folded, x = retrofit.fold(model, input_size=(3, 6, 6)), torch.randn(4, 3, 6, 6)
    expected = model(x).detach()
    again = torch.export.export(folded, (x,)).module()
    for net in (folded.train().eval(), copy.deepcopy(folded), again, torch.compile(folded, backend="eager")):
        torch.testing.assert_close(net(x), expected, atol=1e-5, rtol=1e-4)


def test_unreachable_tolerance(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more than 0"):
        export(model, tmp_path / "out.onnx", tolerance=0)
    assert not list(tmp_path.iterdir())


def test_existing_file_is_kept(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "out.onnx").write_text("mine")
    with pytest.raises(RetrofitError, match="`force=True`"):
        export(model, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_text() == "mine"
    export(model, tmp_path / "out.onnx", force=True)
    onnx.checker.check_model(str(tmp_path / "out.onnx"))


def test_large_weights_go_beside(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "LARGEST", 100)
    report = export(model, tmp_path / "out.onnx")
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(files) == {"out.onnx", "out.onnx.data"}
    assert report.bytes == sum(files.values())
    onnxruntime.InferenceSession(str(tmp_path / "out.onnx"))


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        pytest.param(0, KeyboardInterrupt, marks=pytest.mark.slow),
        pytest.param(1, KeyboardInterrupt, marks=pytest.mark.slow),
        (2, OSError),
    ],
)
def test_a_pair_of_files_is_replaced_together(
    calls: int, error: type[BaseException], model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pair() -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}

    def replace(source: Any, target: Any) -> None:
        if next(left):
            raise error("stop")
        real(source, target)

    monkeypatch.setattr(write, "LARGEST", 100)
    monkeypatch.chdir(tmp_path)  # where the file lies: onnx looks for names in the working folder
    export(model, tmp_path / "out.onnx")
    before = pair()
    nn.init.ones_(model[4].weight)  # type: ignore[index,arg-type]
    real, left = os.replace, iter([False] * calls + [True] + [False] * 9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(error):
            export(model, tmp_path / "out.onnx", force=True)
    assert pair() == before
    export(model, tmp_path / "out.onnx", force=True)
    assert set(pair()) == set(before)
    assert pair()["out.onnx.data"] != before["out.onnx.data"]


def test_wrong_input_size(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="did not take a random input of size 3x9x9"):
        export(model, tmp_path / "out.onnx", input_size=(3, 9, 9))


def test_given_network_is_not_changed(model: nn.Module, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export(model.train(), tmp_path / "out.onnx")
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
