"""ONNX models in less than 32 bits.

Quantizers destroy a converted network by default, without a word: they also put group normalization
and the power transform, whose channels differ in range a thousandfold, on one 8-bit grid. Here
convolutions, matrix products and what runtimes fuse with them are quantized. Elementwise operations
with constants stay in float32, except for the steps of polynomials: their channels share their
limits, and the runtime has integer kernels for them.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from retrofit.compare import Reference
from retrofit.comparison import ComparisonError
from retrofit.export.checked_fold import ACCEPT
from retrofit.export.onnx_file import Check, reported
from retrofit.export.request import Request
from retrofit.utils.files import termination_unwinds, writing

TOLERANCES = {"float16": 0.02, "int8": 0.3}
# Images: ONNX Runtime holds every value of the network in memory to take its range
CALIBRATED_AT_ONCE = 4

_QUANTIZED = ["Conv", "Gemm", "MatMul", "Mul", "Relu", "Clip", "Add", "Concat"]
_QUANTIZED += ["MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean"]
_ARITHMETIC = {"Sub", "Add", "Mul"}


def narrowed(
    request: Request, model: onnx.ModelProto, exported: torch.export.ExportedProgram
) -> tuple[onnx.ModelProto, Check]:
    """Return a model in the requested precision, and the check that it has to pass.

    Raises:
        RetrofitError: If ONNX Runtime cannot convert the model, or values overflow float16.
    """
    precision = request.precision
    tolerance = request.tolerance or TOLERANCES[precision]
    reference = Reference(request.network, request.unseen, tolerance=tolerance)
    is_int8 = precision == "int8"
    if is_int8:
        size = request.batch or CALIBRATED_AT_ONCE
        batches: list[Tensor] = []
        for call in request.fitted:
            images = call.args[0]
            batches += images.split(size)
        narrow = to_int8(model, batches)
        advice = f"bake the network first, give other images, {ACCEPT}"
    else:
        advice = f"use `fold='exact'`, keep float32, {ACCEPT}"
        half_run = HalfRun(exported.module())
        rounded = reference.compare(half_run)
        if rounded.differs:
            claim = "float16, which ends at 65504, differs from PyTorch"
            raise ComparisonError(rounded, claim, advice)
        narrow = to_float16(model)
    narrow.producer_name = model.producer_name
    narrow.producer_version = model.producer_version
    return narrow, Check(reference, advice)


def to_int8(model: onnx.ModelProto, batches: Sequence[Tensor]) -> onnx.ModelProto:
    """Quantize weights per channel and activations by their range over images, as QuantizeLinear
    and DequantizeLinear. Weights take 7 bits of the 8: processors without VNNI add products of 8
    and 8 bits in 16, and saturate.

    Raises:
        RetrofitError: If ONNX Runtime cannot quantize the model, or the temporary folder is full.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    with (
        reported("ONNX Runtime cannot quantize the model"),
        writing(f"the temporary folder {tempfile.gettempdir()}, which TMPDIR names"),
        termination_unwinds(),
        tempfile.TemporaryDirectory(prefix="retrofit-") as folder,
    ):
        exact = Path(folder) / "model.onnx"
        quantized = Path(folder) / "int8.onnx"
        feeds = iter([{"input": batch.float().cpu().numpy()} for batch in batches])
        onnx.save_model(model, exact)
        quantize_static(
            exact,
            quantized,
            SimpleNamespace(get_next=lambda: next(feeds, None)),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QUANTIZED,
            nodes_to_exclude=_nodes_in_float(model),
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(quantized)


def _nodes_in_float(model: onnx.ModelProto) -> list[str]:
    """Name the nodes that stay in float32: additions of constants, means that belong to a
    normalization, and products but those with a depthwise convolution of size 1, which
    `Polynomial.to_convolutions` makes.
    """
    graph = onnx_ir.from_proto(model).graph
    return [str(node.name) for node in graph if _stays_in_float(node)]


def _stays_in_float(node: onnx_ir.Node) -> bool:
    match node.op_type:
        case "Add":
            return any(map(_is_constant, node.inputs))
        case "Mul":
            return not any(map(_is_polynomial_step, node.inputs))
        case "ReduceMean":
            users = {use.node.op_type for use in node.outputs[0].uses()}
            return not _ARITHMETIC.isdisjoint(users)
    return False


def _is_constant(value: Any) -> bool:
    producer = value.producer()
    return value.is_initializer() or (producer is not None and producer.op_type == "Constant")


def _is_polynomial_step(value: Any) -> bool:
    """Whether a depthwise convolution of size 1 gives it."""
    producer = value.producer()
    if producer is None or producer.op_type != "Conv":
        return False
    weight = producer.inputs[1].const_value
    return weight is not None and set(weight.shape[1:]) == {1}


def to_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert weights and arithmetic to float16 by ONNX Runtime's converter; input and output stay
    float32. Two errors that it makes beside operations that stay in float32 (Max, TopK) are mended.

    Raises:
        RetrofitError: If the converter cannot convert the model.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    # By what it says of constants, the converter would take them for some in float16
    del model.graph.value_info[:]
    with reported("the model cannot be converted to float16"):
        half = convert_float_to_float16(model, keep_io_types=True)
        nodes = half.graph.node
        outputs: set[str] = set()
        for node in list(nodes):
            output = node.output[0]
            # It casts a value for each node that reads it, under one name
            if output in outputs:
                nodes.remove(node)
            outputs.add(output)
        ordered = onnx_ir.from_proto(half)
        # It appends its casts
        ordered.graph.sort()
        return onnx_ir.to_proto(ordered)


class HalfRun(fx.Interpreter):
    """A run of an exported program in which each operation takes and gives float16.

    ONNX Runtime's CPU provider computes most nodes in float32, so values that overflow on a GPU do
    not overflow there. Here the result of each operation is rounded, as by hardware that
    accumulates in float32.
    """

    def run_node(self, n: fx.Node) -> Any:
        """Compute the value of a node, and round it."""
        return tree_map_only(Tensor, _rounded_to_half, super().run_node(n))

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return self.run(*tree_leaves((args, kwargs)))


def _rounded_to_half(value: Tensor) -> Tensor:
    if value.dtype == torch.float32:
        return value.half().float()
    return value
