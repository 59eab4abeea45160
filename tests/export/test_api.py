"""ONNX files: right against PyTorch for every target, deterministic, whole or absent; failures in a few lines."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import onnxruntime
import pytest
import torch
import torchvision
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export import api
from retrofit.export.onnx import write
from retrofit.utils.running import silence
from tests.export.networks import norm


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)).eval()


def export(model: nn.Module, path: Path, **options: Any) -> Any:
    return retrofit.export_onnx(model, path, **{"input_size": (3, 6, 6), **options})


def run(path: Path, x: Tensor) -> Tensor:
    return torch.from_numpy(onnxruntime.InferenceSession(str(path)).run(None, {"input": x.numpy()})[0])


@pytest.mark.parametrize("opset", [18, 22])
def test_parity(opset: int, model: nn.Module, tmp_path: Path) -> None:
    report = export(model, tmp_path / "out.onnx", opset=opset)
    assert (report.parity.passed, report.parity.batches, report.parity.tolerance) == (True, (1, 2), 1e-4)
    assert onnx.load(tmp_path / "out.onnx").opset_import[0].version == opset
    x = torch.randn(3, 3, 6, 6)
    expected = model(x).detach()
    torch.testing.assert_close(run(tmp_path / "out.onnx", x), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_strength_0_adds_no_node(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 4), nn.BatchNorm2d(2))
    plain = export(source, tmp_path / "bn.onnx")
    converted = export(retrofit.convert(source, "bnn", input_size=(3, 6, 6))[0], tmp_path / "bnn.onnx")
    assert plain.nodes == converted.nodes == {"Conv": 2, "Relu": 1}


def test_same_bytes_every_time_of_a_network_that_is_not_changed(model: nn.Module, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in model.train().state_dict().items()}
    for name in ("a", "b"):
        export(model, tmp_path / name)
    content = (tmp_path / "a").read_bytes()
    assert content == (tmp_path / "b").read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert b"site-packages" not in content
    found = {entry.key: entry.value for entry in onnx.load(tmp_path / "a").metadata_props}
    assert (found["schema"], found["retrofit"]) == ("1", retrofit.__version__)
    assert json.loads(found["input_size"]) == [3, 6, 6]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_dynamic_batch_and_size(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    export(model, tmp_path / "out.onnx", dynamic_size=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"))
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    x = torch.randn(5, 3, 11, 8)
    torch.testing.assert_close(run(tmp_path / "out.onnx", x), model(x).detach(), atol=1e-5, rtol=1e-5)


def test_polynomials(model: nn.Module, tmp_path: Path) -> None:
    images = list(torch.randn(4, 8, 3, 6, 6))
    report = export(model, tmp_path / "out.onnx", fold="poly", calibrate=images, degree=2, tolerance=0.5)
    assert report.parity.batches == (1, 3, 12)  # every second image
    assert [(layer.form, layer.degree) for layer in report.layers] == [("polynomial", 2)]
    extra = ("Shape", "Concat")  # of older exporters
    nodes = {kind: number for kind, number in report.nodes.items() if kind not in extra}
    assert nodes == {"BatchNormalization": 1, "Clip": 1, "Conv": 1, "Gemm": 1, "Mul": 1, "Reshape": 1}
    x = torch.cat(images)
    with torch.no_grad():
        assert (run(tmp_path / "out.onnx", x) - model(x)).abs().max() < 0.2 * model(x).abs().max()


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let folding go wrong by what `change` does to the folded network."""
    real = api.fold_program

    def wrong(program: Any, fits: Any) -> None:
        real(program, fits)
        with torch.no_grad():
            change(program.module)

    monkeypatch.setattr(api, "fold_program", wrong)


def weight(net: nn.Module) -> Any:
    return net.get_parameter("0.weight")


def test_what_differs_leaves_no_file(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, images = tmp_path / "out.onnx", [torch.randn(8, 3, 6, 6)]
    for opset in (17, 23):
        with pytest.raises(UsageError, match="18 to 22"):
            export(model, path, opset=opset)
    with pytest.raises(RetrofitError, match="did not take a random input of size 3x9x9"):
        export(model, path, input_size=(3, 9, 9))
    for degree, message in ((None, "less than 1e-07"), (2, "raise `tolerance`")):
        with pytest.raises(RetrofitError, match=message):
            export(model, path, fold="poly", calibrate=images, tolerance=1e-7, degree=degree)
    source = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten())
    gnn, _ = retrofit.convert(source, "gnn", check=False)
    retrofit.set_strength(gnn, 1.0)
    with pytest.raises(RetrofitError, match=r"constant lambdas differs .* leave out `freeze_lambda`$"):
        export(gnn, path, freeze_lambda=True, calibrate=images, tolerance=1e-6)
    for error in (0.1, math.nan):
        with monkeypatch.context() as patch:
            broken(patch, lambda net, error=error: weight(net).add_(error))
            with pytest.raises(RetrofitError, match="folded network differs"):
                export(model, path)
    real = api.to_onnx

    def wrong(program: Any, *args: Any) -> Any:
        kept = weight(program.module).clone()
        weight(program.module).add_(0.1)
        written = real(program, *args)
        weight(program.module).copy_(kept)
        return written

    monkeypatch.setattr(api, "to_onnx", wrong)
    with pytest.raises(RetrofitError, match=r"more than 0\.0001"):
        export(model, path, fold="poly", calibrate=images, tolerance=0.5)
    assert not list(tmp_path.iterdir())


def test_what_only_images_show_is_seen(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def far(_net: nn.Module, images: tuple[Tensor], out: Tensor) -> Tensor:
        return 2 * out if images[0].max() > 100 else out

    broken(monkeypatch, lambda net: net.register_forward_hook(far))
    retrofit.fold(model, input_size=(3, 6, 6))
    with pytest.raises(RetrofitError, match="differs"):
        retrofit.fold(model, input_size=(3, 6, 6), calibrate=[200 * torch.rand(2, 3, 6, 6)])


def test_tolerance_of_a_fold(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda net: weight(net).mul_(1.01))
    retrofit.fold(model, input_size=(3, 6, 6), tolerance=0.2)
    with pytest.raises(RetrofitError, match=r"more than 0\.0001; .*raise `tolerance`"):
        retrofit.fold(model, input_size=(3, 6, 6))


def test_other_precisions_are_folded_as_float32(model: nn.Module) -> None:
    model = model.bfloat16()
    folded = retrofit.fold(model, input_size=(3, 6, 6))
    assert {tensor.dtype for tensor in (*folded.parameters(), *folded.buffers())} == {torch.float32}
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(folded(x), model.float()(x), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_detector_gets_forms_and_is_compared_by_its_parts() -> None:
    options: Any = {"weights": None, "weights_backbone": None, "num_classes": 3}
    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(**options).eval()
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


@pytest.mark.slow
def test_weights_beside_the_file_are_replaced_with_it(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pair() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    path = tmp_path / "out.onnx"
    monkeypatch.setattr(write, "LARGEST", 100)
    monkeypatch.chdir(tmp_path)  # where the file lies: onnx looks for names in the working folder
    report = export(model, path)
    before = pair()
    assert set(before) == {"out.onnx", "out.onnx.data"}
    assert report.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    with pytest.raises(RetrofitError, match="`force=True`"):
        export(model, path)
    nn.init.ones_(model[4].weight)  # type: ignore[index,arg-type]
    for calls, error in ((0, KeyboardInterrupt), (1, KeyboardInterrupt), (2, OSError)):
        effects = [mock.DEFAULT] * calls + [error("stop")] + [mock.DEFAULT] * 9
        with mock.patch.object(os, "replace", wraps=os.replace, side_effect=effects), pytest.raises(error):
            export(model, path, force=True)
        assert pair() == before
    export(model, path, force=True)
    assert set(pair()) == set(before)
    assert pair()["out.onnx.data"] != before["out.onnx.data"]
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(run(path, x), model(x).detach(), atol=1e-4, rtol=1e-4)


class Branches(nn.Sequential):
    """Takes one way or the other by what its norm gives."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if x.sum() > 0 else -x


def test_a_failing_export_is_one_line_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*[Branches(norm(3)) for _ in range(20)])
    with pytest.raises(RetrofitError, match=r"^torch.export cannot capture the network \(") as failed:
        export(model, tmp_path / "out.onnx")
    assert len(str(failed.value)) < 400
    assert not list(tmp_path.iterdir())
    with silence():
        print("unheard", file=sys.stderr)
    print("heard")
    assert capfd.readouterr() == ("heard\n", "")


def test_an_invalid_model_is_one_line() -> None:
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", 2]) for n in ("input", "output")]
    node = onnx.helper.make_node("Det", ["input"], ["output"])
    graph = onnx.helper.make_graph([node], "network", values[:1], values[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    with pytest.raises(RetrofitError, match="not valid ONNX"):
        write.check_model(model)
