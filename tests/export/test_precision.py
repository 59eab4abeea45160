"""Files in float16 and INT8: what is quantized, what stays, and how they are judged."""

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
from retrofit.export import precision as narrow
from retrofit.export.power_operator import Polynomial
from retrofit.utils.onnx_runtimes import open_onnx
from tests.export.networks import converted, images, norm, slow


def export(
    model: nn.Module, path: Path, **options: Any
) -> tuple[retrofit.export.ExportReport, onnx.ModelProto]:
    report = retrofit.export_onnx(
        model, path, input_size=(3, 32, 32), calibrate=images(24), **options
    )
    return report, onnx.load(path)


def inputs_of(
    model: onnx.ModelProto, node: onnx.NodeProto
) -> set[str]:  # what makes the inputs of a node
    return {other.op_type for other in model.graph.node if set(other.output) & set(node.input)}


@pytest.mark.slow
def test_convolutions_are_quantized_and_judged_on_other_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes, real = converted("bnn"), [], narrow.to_int8
    monkeypatch.setattr(
        narrow,
        "to_int8",
        lambda proto, batches: sizes.extend(map(len, batches)) or real(proto, batches),
    )
    report, proto = export(model, tmp_path / "a.onnx", precision="int8")
    # ONNX Runtime holds every value of the network in memory at once
    assert sizes == [1, 3, 4, 4]
    for node in proto.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            assert inputs_of(proto, node) == {"DequantizeLinear"}
        if node.op_type in ("Log", "Exp", "Mul"):  # constants stay in float
            assert "QuantizeLinear" not in inputs_of(proto, node)
    stored = [numpy_helper.to_array(tensor) for tensor in proto.graph.initializer]
    weights = [
        abs(values.astype(int)).max()
        for values in stored
        if values.dtype == np.int8 and values.ndim > 1
    ]
    assert len(weights) == report.nodes["Conv"] + report.nodes["Gemm"]
    assert max(weights) <= 64  # 7 bits: no saturation without VNNI
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    judged = torch.cat(images(24))[1::2]
    found = np.concatenate(
        [session.run(None, {"input": image[None].numpy()})[0] for image in judged]
    )
    gap = float((torch.from_numpy(found) - model(judged).detach()).abs().max())
    assert report.parity.max_abs_diff == pytest.approx(gap, rel=0.1)
    assert (report.precision, report.parity.tolerance) == ("int8", 0.3)
    assert report.bytes < 0.6 * sum(4 * parameter.numel() for parameter in model.parameters())


def test_a_network_that_costs_what_its_source_costs_has_no_float_between_convolutions(
    tmp_path: Path,
) -> None:
    model = converted("ln")
    retrofit.bake(model, images(24), tolerance=10.0)
    report, proto = export(model, tmp_path / "a.onnx", precision="int8")
    assert not [
        kind
        for kind in report.nodes
        if "Norm" in kind or kind in ("Mul", "Sub", "Sqrt", "Div", "Pow")
    ]
    for node in proto.graph.node:
        if node.op_type in ("Add", "Relu", "Clip", "MaxPool"):
            assert inputs_of(proto, node) == {"DequantizeLinear"}, node.name


@pytest.mark.parametrize("degree", slow(3, 4))
def test_low_polynomials_are_quantized_where_there_are_kernels(tmp_path: Path, degree: int) -> None:
    integers = degree == 3
    options: Any = {"fold": "poly", "degree": degree, "tolerance": 1.0}
    report, proto = export(converted("bnn"), tmp_path / "a.onnx", precision="int8", **options)
    polynomials = [layer for layer in report.layers if layer.form == "polynomial"]
    assert polynomials
    users = {name: node for node in proto.graph.node for name in node.input}
    products = [node for node in proto.graph.node if node.op_type == "Mul"]
    assert len(products) == (degree - 1) * len(polynomials)
    for node in products:
        assert (inputs_of(proto, node) == {"DequantizeLinear"}) == integers
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


@pytest.mark.slow
def test_an_exact_transform_behind_an_int8_convolution_in_openvino(tmp_path: Path) -> None:
    """OpenVINO moves the steps of 8 bits past multiplications and limits by constants."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 4, 3)).eval()
    path = tmp_path / "a.onnx"
    batch = torch.randn(8, 3, 8, 8)
    retrofit.export_onnx(
        model, path, input_size=(3, 8, 8), calibrate=[batch], precision="int8", tolerance=1.0
    )
    (found,) = open_onnx(path, "openvino")(batch.numpy())
    (expected,) = open_onnx(path)(batch.numpy())
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_float16_keeps_input_and_output(tmp_path: Path) -> None:
    model = converted("ln")
    report, proto = export(model, tmp_path / "a.onnx", precision="float16")
    for value in (*proto.graph.input, *proto.graph.output):
        assert value.type.tensor_type.elem_type == TensorProto.FLOAT
    assert TensorProto.FLOAT not in {
        tensor.data_type for tensor in proto.graph.initializer if tensor.dims
    }
    assert report.parity.share < 0.02
    assert {("precision", "float16"), ("target", "ln")} <= {
        (entry.key, entry.value) for entry in proto.metadata_props
    }


def test_float16_of_a_value_that_several_operations_without_float16_read(tmp_path: Path) -> None:
    class Thresholds(nn.Sequential):
        """Ends in maxima, for which the converter has no float16: two of one value, and with one
        threshold.
        """

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return torch.cat(
                [torch.maximum(x, self.threshold), torch.maximum(x, -2 * self.threshold)], 1
            ).mean((2, 3))

    model = Thresholds(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model.register_buffer("threshold", torch.linspace(-1, 1, 4).view(4, 1, 1))
    report, proto = export(model, tmp_path / "a.onnx", precision="float16")
    assert [node.op_type for node in proto.graph.node].count("Max") == 2
    assert report.parity.max_abs_diff < 1e-2


class Scores(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = 2000 * super().forward(x)
        return torch.softmax((x @ x.transpose(-1, -2)) / 1e4, -1) @ x


def test_what_overflows_half_precision_is_refused(tmp_path: Path) -> None:
    model = Scores(16, 16).eval()
    with pytest.raises(
        RetrofitError, match="float16, which ends at 65504, differs from PyTorch by inf"
    ):
        retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(4, 16), precision="float16")
    assert not list(tmp_path.iterdir())


def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        onnx, "save_model", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(
        RetrofitError, match=r"cannot write the temporary folder /.*TMPDIR.*No space left"
    ):
        narrow.to_int8(onnx.ModelProto(), [])


def test_a_rough_approximation_passes_where_the_tolerance_is_raised(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8, running_lambda=torch.linspace(0.0, 2.0, 8))
    ).eval()
    options: Any = {"precision": "int8", "fold": "poly", "degree": 2}
    with pytest.raises(
        RetrofitError,
        match=r"approximation differs .* more than 0.05; .* raise or leave out `degree`",
    ):
        export(model, tmp_path / "a.onnx", **options)
    report, _ = export(model, tmp_path / "a.onnx", tolerance=10.0, **options)
    assert 0.05 < report.parity.share < 10


def test_a_file_that_differs_is_not_written(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(3600, 5)
    ).eval()
    for precision in ("float16", "int8"):
        with pytest.raises(
            RetrofitError, match=r"differs from PyTorch by .* more than 1e-06; .*raise `tolerance`"
        ):
            export(model, tmp_path / "a.onnx", precision=precision, tolerance=1e-6)
    assert list(tmp_path.iterdir()) == []
