"""An exported model in less than 32 bits: INT8 by ONNX Runtime's static quantization, or float16.

What quantizers do by default destroys a converted network without a word: they put the power transform, whose channels
differ in range a thousandfold, and group normalization on one 8-bit grid as well. Here convolutions, matrix products
and what runtimes fuse with them are quantized, and elementwise operations with constants stay in float32; but for the
steps of polynomials, whose channels share their limits, where the runtime has integer kernels for them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from retrofit.errors import RetrofitError
from retrofit.utils.files import termination_unwinds
from retrofit.utils.running import silence
from retrofit.utils.text import one_line

_QUANTIZED = ["Conv", "Gemm", "MatMul", "Mul", "Relu", "Clip", "Add", "Concat"]
_QUANTIZED += ["MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean"]


def to_int8(model: onnx.ModelProto, batches: Sequence[Tensor]) -> onnx.ModelProto:
    """Quantize weights per channel and activations by their range over images, as QuantizeLinear and DequantizeLinear,
    or say in a RetrofitError why not. Weights take 7 bits of the 8: processors without VNNI add products of 8 and 8
    bits in 16, and saturate.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    with termination_unwinds(), tempfile.TemporaryDirectory(prefix="retrofit-") as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        try:
            with silence():
                feeds = iter([{"input": batch.float().cpu().numpy()} for batch in batches])
                onnx.save_model(model, source)
                quantize_static(
                    source,
                    target,
                    SimpleNamespace(get_next=lambda: next(feeds, None)),
                    quant_format=QuantFormat.QDQ,
                    op_types_to_quantize=_QUANTIZED,
                    nodes_to_exclude=_in_float(model),
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
    """Convert weights and arithmetic to float16 by ONNX Runtime's converter, or say in a RetrofitError why not; input
    and output stay float32. Two errors that it makes beside operations that stay in float32 (Max, TopK) are mended.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in [value for value in wide.graph.value_info if value.name in constants]:
        wide.graph.value_info.remove(value)  # it would take the constant for one in float16
    try:
        with silence():
            half, outputs = convert_float_to_float16(wide, keep_io_types=True), set()
            for node in list(half.graph.node):
                if node.output[0] in outputs:
                    half.graph.node.remove(node)  # it casts a value for each node that reads it, under one name
                outputs.add(node.output[0])
            ordered = onnx_ir.from_proto(half)
            ordered.graph.sort()  # it appends its casts
            return _tidied(onnx_ir.to_proto(ordered), model)
    except Exception as error:
        raise RetrofitError(
            f"the model cannot be converted to float16 ({one_line(error)}); please report it"
        ) from error


class HalfRun(fx.Interpreter):
    """A run of an exported program in which each operation takes and gives float16.

    ONNX Runtime's CPU provider has no float16 and computes in float32 between most nodes, where nothing overflows that
    does on a GPU. Here the result of each operation is rounded, as of hardware that accumulates in float32.
    """

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Return the arguments of a node, numbers as ONNX Runtime's converter writes them."""
        return tree_map_only(float, _as_written, super().fetch_args_kwargs_from_env(n))

    def run_node(self, n: fx.Node) -> Any:
        """Compute the value of a node, and round it."""
        return tree_map_only(Tensor, lambda x: x.half().float() if x.dtype == torch.float32 else x, super().run_node(n))

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return self.run(*tree_leaves((args, kwargs)))


def _as_written(value: float) -> float:
    largest = np.finfo(np.float16).max
    return float(np.float16(np.clip(value, -largest, largest))) if math.isfinite(value) else value


def _in_float(model: onnx.ModelProto) -> list[str]:
    """Name the nodes that stay in float32: additions of constants, means that belong to a normalization, and products
    but those with a depthwise convolution of size 1, which `Polynomial.to_convolutions` makes.
    """
    tensors = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    constants = {*tensors, *(node.output[0] for node in model.graph.node if node.op_type == "Constant")}
    users: dict[str, list[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node.op_type)
    names, steps = [], set()
    for node in model.graph.node:
        takes = set(node.input)
        groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        if node.op_type == "Conv" and 1 < groups == math.prod(tensors.get(node.input[1], [])):
            steps.add(node.output[0])
        adds_constant = node.op_type == "Add" and takes & constants
        centres = node.op_type == "ReduceMean" and {"Sub", "Add", "Mul"} & set(users.get(node.output[0], []))
        if adds_constant or centres or (node.op_type == "Mul" and not takes & steps):
            names.append(node.name)
    return names


def _tidied(model: onnx.ModelProto, original: onnx.ModelProto) -> onnx.ModelProto:
    """Take the metadata over, and leave out who made the model."""
    del model.metadata_props[:]
    model.metadata_props.extend(original.metadata_props)
    model.producer_name, model.producer_version = original.producer_name, original.producer_version
    return model
