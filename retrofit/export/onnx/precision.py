"""An exported model in less than 32 bits: INT8 by ONNX Runtime's static quantization, or float16.

What quantizers do by default destroys a converted network without a word: they put the power transform, whose channels
differ in range a thousandfold, and group normalization on one 8-bit grid as well. Here convolutions, matrix products
and what runtimes fuse with them are quantized, and elementwise operations with constants stay in float32; but for the
steps of polynomials, whose channels share their limits, where the runtime has integer kernels for them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir
import torch
from onnx import NodeProto, helper, numpy_helper
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from retrofit.errors import RetrofitError
from retrofit.export.silence import silence
from retrofit.utils.onnx_runtimes import Runtime
from retrofit.utils.text import one_line

Precision = Literal["float32", "float16", "int8"]

_QUANTIZED = [
    *("Conv", "Gemm", "MatMul"),
    *("Relu", "Clip", "Add", "MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean", "Concat"),
]

_STEPS = 2  # of a polynomial in INT8: degree 3


def to_int8(model: onnx.ModelProto, batches: Sequence[Tensor], runtime: Runtime) -> onnx.ModelProto:
    """Quantize weights per channel and activations by their range over images, as QuantizeLinear and DequantizeLinear.

    Weights take 7 bits of the 8: processors without VNNI add products of 8 and 8 bits in 16, and saturate.

    Args:
        model: The exported model.
        batches: Images to take ranges from.
        runtime: What polynomials are for. ONNX Runtime has integer kernels for convolutions and products, and changes
            the memory layout around what is in float32; OpenVINO does a polynomial in float32 in one pass.

    Raises:
        RetrofitError: If ONNX Runtime cannot quantize the model.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    with tempfile.TemporaryDirectory(prefix="retrofit-") as folder:
        written, target = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        try:
            with silence():
                wide = onnx.ModelProto()
                wide.CopyFrom(model)
                products = _steps_to_convolutions(wide) if runtime == "onnxruntime" else []
                onnx.save_model(wide, written)
                quantize_static(
                    written,
                    target,
                    _Images(model.graph.input[0].name, batches),
                    quant_format=QuantFormat.QDQ,
                    op_types_to_quantize=[*_QUANTIZED, "Mul"],
                    nodes_to_exclude=_in_float(wide, products),
                    per_channel=True,
                    reduce_range=True,
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8,
                )
                return _tidied(onnx.load(target), model)
        except OSError as error:
            raise RetrofitError(
                f"cannot write into the temporary folder {tempfile.gettempdir()} ({one_line(error)}); free some space "
                "there, or set TMPDIR to another folder"
            ) from error
        except Exception as error:  # its exceptions have no common class
            raise RetrofitError(
                f"ONNX Runtime cannot quantize the model ({one_line(error)}); please report it"
            ) from error


def to_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert weights and arithmetic to float16; input and output stay float32.

    Raises:
        RetrofitError: If ONNX Runtime's converter cannot.
    """
    try:
        with silence():
            found = onnx_ir.from_proto(_halved(model))
            found.graph.sort()  # the converter appends its casts
            return _tidied(onnx_ir.to_proto(found), model)
    except Exception as error:
        raise RetrofitError(
            f"the model cannot be converted to float16 ({one_line(error)}); please report it"
        ) from error


class HalfRun(fx.Interpreter):
    """A run of an exported program in which each operation takes and gives float16.

    ONNX Runtime's CPU provider has no float16 and computes in float32 between most nodes, where nothing overflows that
    does on a GPU. Here the result of each operation is rounded, as of hardware that accumulates in float32.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__(program.module())

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Return the arguments of a node, numbers as the file holds them."""
        return tree_map_only(float, _held, super().fetch_args_kwargs_from_env(n))

    def run_node(self, n: fx.Node) -> Any:
        """Compute the value of a node, and round it."""
        return tree_map_only(Tensor, _rounded, super().run_node(n))

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return self.run(*tree_leaves((args, kwargs)))


def _held(value: float) -> float:
    """Return a number as ONNX Runtime's converter writes it."""
    largest = float(np.finfo(np.float16).max)
    return float(np.float16(min(max(value, -largest), largest))) if math.isfinite(value) else value


def _rounded(value: Tensor) -> Tensor:
    return value.half().float() if value.dtype == torch.float32 else value


class _Images:
    """What ONNX Runtime's calibration reads."""

    def __init__(self, name: str, batches: Sequence[Tensor]) -> None:
        self._name = name
        self._left: Iterator[Tensor] = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch; None after the last."""
        batch = next(self._left, None)
        return None if batch is None else {self._name: batch.float().numpy()}


def _steps_to_convolutions(model: onnx.ModelProto) -> list[str]:
    """Make the multiply-adds of polynomials depthwise convolutions, in place; name the products that follow them.

    A step is (scale * y + shift) * p, with y = p in the first and the step before in the others: a batch normalization
    by constants, and a product. Polynomials of more steps than `_STEPS` stay: of the 8 bits of each step little is left
    in the end. So do other products with a batch normalization, as in SiLU.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    products = {
        name: node
        for node in graph.node
        if node.op_type == "Mul" and not any(name in constants for name in node.input)
        for name in node.input
    }
    chains: dict[str, tuple[str, list[NodeProto]]] = {}  # by the product that ends it: p, and the normalizations
    for node in graph.node:
        if node.op_type != "BatchNormalization" or node.output[0] not in products:
            continue
        product = products[node.output[0]]
        p, chain = chains.get(node.input[0], (node.input[0], []))
        if set(product.input) == {node.output[0], p}:
            chains.pop(node.input[0], None)
            chains[product.output[0]] = p, [*chain, node]
    found = []
    for node in [node for _, chain in chains.values() if len(chain) <= _STEPS for node in chain]:
        scale, shift, mean, var = (numpy_helper.to_array(constants[name]).astype(float) for name in node.input[1:5])
        scale = scale / np.sqrt(var + next(a.f for a in node.attribute if a.name == "epsilon"))
        shape = (-1, 1, *(1,) * (ranks[node.output[0]] - 2))
        for name, value in (("weight", scale.reshape(shape)), ("bias", shift - mean * scale)):
            graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), f"{node.name}.{name}"))
        names = [node.input[0], *(tensor.name for tensor in graph.initializer[-2:])]
        node.CopyFrom(helper.make_node("Conv", names, node.output[:1], node.name, group=len(scale)))
        found.append(products[node.output[0]].name)
    used = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
    return found


def _in_float(model: onnx.ModelProto, products: Sequence[str]) -> list[str]:
    """Name the nodes that stay in float32.

    These are additions of constants, means that belong to a normalization, and all products but those named.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    users: dict[str, list[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node.op_type)
    found = []
    for node in model.graph.node:
        adds_constant = node.op_type == "Add" and any(name in constants for name in node.input)
        centres = node.op_type == "ReduceMean" and any(
            kind in ("Sub", "Add", "Mul") for name in node.output for kind in users.get(name, [])
        )
        if adds_constant or centres or (node.op_type == "Mul" and node.name not in products):
            found.append(node.name)
    return found


def _halved(model: onnx.ModelProto) -> onnx.ModelProto:
    """Run ONNX Runtime's converter, around what it gets wrong beside operations that stay in float32 (Max, TopK)."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    described = onnx.ModelProto()
    described.CopyFrom(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in [value for value in described.graph.value_info if value.name in constants]:
        described.graph.value_info.remove(value)  # it would take the constant for one in float16
    converted = convert_float_to_float16(described, keep_io_types=True)
    made = set()
    for node in list(converted.graph.node):
        if node.output[0] in made:
            converted.graph.node.remove(node)  # it casts a value for each node that reads it, under one name
        made.add(node.output[0])
    return converted


def _tidied(model: onnx.ModelProto, original: onnx.ModelProto) -> onnx.ModelProto:
    """Take the metadata over, and leave out who made the model."""
    del model.metadata_props[:]
    model.metadata_props.extend(original.metadata_props)
    model.producer_name, model.producer_version = original.producer_name, original.producer_version
    return model
