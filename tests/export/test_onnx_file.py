"""Files in float16 and INT8: what is quantized, what stays, and how they are judged."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.export import api, onnx_file
from retrofit.export.power_forms import Polynomial
from tests.export.networks import converted, images, norm

SIZE = (3, 32, 32)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(3600, 5)).eval()


def export(model: nn.Module, path: Path, **options: Any) -> tuple[retrofit.export.ExportReport, onnx.ModelProto]:
    report = retrofit.export_onnx(model, path, input_size=SIZE, calibrate=images(24), **options)
    return report, onnx.load(path)


def sources(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output}


def weight_bytes(model: nn.Module) -> int:
    return sum(4 * parameter.numel() for parameter in model.parameters())


def test_convolutions_are_quantized_and_judged_on_other_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes, real = converted("bnn"), [], api.to_int8
    monkeypatch.setattr(api, "to_int8", lambda proto, batches: sizes.extend(map(len, batches)) or real(proto, batches))
    report, proto = export(model, tmp_path / "a.onnx", precision="int8")
    # ONNX Runtime holds every value of the network in memory at once
    assert sizes == [1, 3, 4, 4]
    made = sources(proto)
    convolutions = [node for node in proto.graph.node if node.op_type in ("Conv", "Gemm")]
    assert convolutions
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for node in convolutions:
        assert {made[name].op_type for name in node.input} == {"DequantizeLinear"}
        weight = stored[made[node.input[1]].input[0]]
        assert weight.dtype == np.int8
        assert abs(weight.astype(int)).max() <= 64  # 7 bits: no saturation without VNNI
    for node in proto.graph.node:  # constants stay in float
        if node.op_type in ("Log", "Exp", "Mul"):
            assert "QuantizeLinear" not in {made[name].op_type for name in node.input if name in made}
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    judged = torch.cat(images(24))[1::2]
    with torch.no_grad():
        expected = model(judged)
    found = np.concatenate([session.run(None, {"input": image[None].numpy()})[0] for image in judged])
    gap = float((torch.from_numpy(found) - expected).abs().max())
    assert report.parity.max_abs_diff == pytest.approx(gap, rel=0.1)
    assert (report.precision, report.parity.tolerance) == ("int8", 0.3)
    assert report.bytes < 0.6 * weight_bytes(model)


def test_a_network_that_costs_what_its_source_costs_has_no_float_between_convolutions(tmp_path: Path) -> None:
    model = converted("ln")
    retrofit.bake(model, images(24), tolerance=10.0)
    report, proto = export(model, tmp_path / "a.onnx", precision="int8")
    assert not [kind for kind in report.nodes if "Norm" in kind or kind in ("Mul", "Sub", "Sqrt", "Div", "Pow")]
    made = sources(proto)
    for node in proto.graph.node:
        if node.op_type in ("Add", "Relu", "Clip", "MaxPool"):
            assert {made[name].op_type for name in node.input} == {"DequantizeLinear"}, node.name


OTHERS = [pytest.param(*other, marks=pytest.mark.slow) for other in (("onnxruntime", 4), ("openvino", 3))]


@pytest.mark.parametrize(("runtime", "degree"), [("onnxruntime", 3), *OTHERS])
def test_low_polynomials_are_quantized_where_there_are_kernels(tmp_path: Path, runtime: str, degree: int) -> None:
    integers = (runtime, degree) == ("onnxruntime", 3)
    options: Any = {"fold": "poly", "degree": degree, "tolerance": 1.0, "runtime": runtime}
    report, proto = export(converted("bnn"), tmp_path / "a.onnx", precision="int8", **options)
    polynomials = [layer for layer in report.layers if layer.form == "polynomial"]
    assert polynomials
    made, users = sources(proto), {name: node for node in proto.graph.node for name in node.input}
    products = [node for node in proto.graph.node if node.op_type == "Mul"]
    assert len(products) == (degree - 1) * len(polynomials)
    for node in products:
        assert ({made[name].op_type for name in node.input} == {"DequantizeLinear"}) == integers
        assert not integers or users[node.output[0]].op_type == "QuantizeLinear"
    assert report.nodes.get("BatchNormalization", 0) == (0 if integers else len(products))


@pytest.mark.parametrize("ndim", [2, 3, 4, 5])
def test_steps_as_convolutions_are_the_same_function(ndim: int) -> None:
    polynomial = Polynomial(torch.tensor([[1.0, -2.0, 0.5], [3.0, 4.0, 1e-4], [0.1, -0.2, 7.0]]))
    x = torch.randn(2, 3, *range(5, 3 + ndim), generator=torch.Generator().manual_seed(0))
    expected = polynomial(x)
    polynomial.to_convolutions()
    assert "GroupConvolution" in str(polynomial)
    torch.testing.assert_close(polynomial(x), expected)


def test_float16_keeps_input_and_output(tmp_path: Path) -> None:
    model = converted("ln")
    report, proto = export(model, tmp_path / "a.onnx", precision="float16")
    for value in (*proto.graph.input, *proto.graph.output):
        assert value.type.tensor_type.elem_type == TensorProto.FLOAT
    assert TensorProto.FLOAT not in {tensor.data_type for tensor in proto.graph.initializer if tensor.dims}
    assert report.parity.share < 0.02
    assert report.bytes < 0.7 * weight_bytes(model)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert (metadata["precision"], metadata["target"]) == ("float16", "ln")


def test_float16_of_a_value_that_several_operations_without_float16_read(tmp_path: Path) -> None:
    class Thresholds(nn.Sequential):
        """Ends in maxima, for which the converter has no float16: two of one value, and with one threshold."""

        def __init__(self) -> None:
            super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
            self.register_buffer("threshold", torch.linspace(-1, 1, 4).view(4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return torch.cat([torch.maximum(x, self.threshold), torch.maximum(x, -2 * self.threshold)], 1).mean((2, 3))

    report, proto = export(Thresholds().eval(), tmp_path / "a.onnx", precision="float16")
    assert [node.op_type for node in proto.graph.node].count("Max") == 2
    assert report.parity.max_abs_diff < 1e-2


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax((x @ x.transpose(-1, -2)) / 1e4, -1) @ x


def test_what_overflows_half_precision_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Scores()).eval()
    with torch.no_grad():
        model[0].weight.mul_(2000)  # type: ignore[operator]
    with pytest.raises(RetrofitError, match="float16, which ends at 65504, differs from PyTorch by inf"):
        retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(4, 16), precision="float16")
    assert not list(tmp_path.iterdir())


def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "save_model", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RetrofitError, match=r"no space left for the temporary folder /.*TMPDIR"):
        onnx_file.to_int8(onnx.ModelProto(), [])


def test_a_rough_approximation_passes_where_the_tolerance_is_raised(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8, running_lambda=torch.linspace(0.0, 2.0, 8))).eval()
    options: Any = {"precision": "int8", "fold": "poly", "degree": 2}
    with pytest.raises(RetrofitError, match=r"the approximation differs .* more than 0.05; leave out `degree`.*"):
        export(model, tmp_path / "a.onnx", **options)
    report, _ = export(model, tmp_path / "a.onnx", tolerance=10.0, **options)
    assert 0.05 < report.parity.share < 10


def test_a_file_that_differs_is_not_written(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "a.onnx"
    for precision in ("float16", "int8"):
        with pytest.raises(RetrofitError, match=r"differs from PyTorch by .* more than 1e-06; .*raise `tolerance`"):
            export(model, path, precision=precision, tolerance=1e-6)
    assert list(tmp_path.iterdir()) == []
