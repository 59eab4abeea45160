"""From a captured program to an ONNX file in 32 bits, float16 or INT8: the same bytes every time,
checked, whole.

What quantizers do by default destroys a converted network without a word: they put the power
transform, whose channels differ in range a thousandfold, and group normalization on one 8-bit grid
as well. Here convolutions, matrix products and what runtimes fuse with them are quantized, and
elementwise operations with constants stay in float32; but for the steps of polynomials, whose
channels share their limits, where the runtime has integer kernels for them.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from onnx.external_data_helper import set_external_data
from torch import Tensor, fx
from torch.export.graph_signature import TensorArgument
from torch.utils._pytree import tree_leaves, tree_map_only

from retrofit.compare import Comparison, ComparisonError, Reference
from retrofit.errors import RetrofitError
from retrofit.export.capture import Program
from retrofit.utils.files import (
    OLD,
    atomic_write,
    ensure_writable,
    temporary_folder,
    termination_unwinds,
    writing,
)
from retrofit.utils.onnx_runtimes import open_onnx
from retrofit.utils.running import silence
from retrofit.utils.text import cause_of

# those that this is tested with
OPSETS = range(18, 23)
# bytes that one protobuf file can hold, and some for its own words
LARGEST = 2**31 - 2**20
# bytes of a tensor that stays in it
SMALL = 1024

_QUANTIZED = ["Conv", "Gemm", "MatMul", "Mul", "Relu", "Clip", "Add", "Concat"]
_QUANTIZED += ["MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean"]


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Silence a library, and make a RetrofitError of its exceptions, which have no common class."""
    try:
        with silence():
            yield
    except RetrofitError:
        raise
    except Exception as error:
        raise RetrofitError(f"{what} ({cause_of(error)}); please report it") from error


def to_onnx(program: Program, opset: int) -> tuple[onnx.ModelProto, torch.export.ExportedProgram]:
    """Convert a captured program to ONNX; return the model, and the program of the operations that
    became its nodes.

    The input is named `input` if it is the only one, else as the argument. Nothing in the model
    depends on where or when it was made. A RetrofitError says why the exporter cannot convert the
    program.
    """
    exported = program.exported()
    specs = [*exported.graph_signature.input_specs, *exported.graph_signature.output_specs]
    tensors = [
        (spec.kind.name, spec.arg.name) for spec in specs if isinstance(spec.arg, TensorArgument)
    ]
    inputs = [name for kind, name in tensors if kind == "USER_INPUT"]
    outputs = [f"output{i}" for i in range(sum(kind == "USER_OUTPUT" for kind, _ in tensors))]
    with _reported("torch.onnx cannot export the network"), torch.no_grad():
        written: Any = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=opset,
            input_names=["input"] if len(inputs) == 1 else inputs,
            output_names=["output"] if len(outputs) == 1 else outputs,
            verbose=False,
        )
    model = written.model_proto
    version = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if version != opset:
        raise RetrofitError(
            f"the exporter cannot write this network for opset {opset}; use `opset={version}`"
        )
    _anonymize(model)
    return model, written.exported_program


def _anonymize(model: onnx.ModelProto) -> None:
    """Take out what the exporter notes about the source code, and give the dynamic dimensions plain
    names.
    """
    graph = model.graph
    model.producer_name, graph.name = "retrofit", "network"
    for part in (
        model,
        graph,
        *graph.node,
        *graph.value_info,
        *graph.input,
        *graph.output,
        *graph.initializer,
    ):
        part.doc_string = ""
        del part.metadata_props[:]
    dims, axes = (
        graph.input[0].type.tensor_type.shape.dim,
        ("batch", "channels", "height", "width", "depth"),
    )
    names = {dim.dim_param: axis for dim, axis in zip(dims, axes, strict=False) if dim.dim_param}
    for value in (*graph.value_info, *graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def to_int8(model: onnx.ModelProto, batches: Sequence[Tensor]) -> onnx.ModelProto:
    """Quantize weights per channel and activations by their range over images, as QuantizeLinear
    and DequantizeLinear, or say in a RetrofitError why not. Weights take 7 bits of the 8:
    processors without VNNI add products of 8 and 8 bits in 16, and saturate.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    with (
        _reported("ONNX Runtime cannot quantize the model"),
        writing(f"the temporary folder {tempfile.gettempdir()}, which TMPDIR names"),
        termination_unwinds(),
        tempfile.TemporaryDirectory(prefix="retrofit-") as folder,
    ):
        source, target = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
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
        return onnx.load(target)


def _in_float(model: onnx.ModelProto) -> list[str]:
    """Name the nodes that stay in float32: additions of constants, means that belong to a
    normalization, and products but those with a depthwise convolution of size 1, which
    `Polynomial.to_convolutions` makes.
    """
    tensors = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    constants = {
        *tensors,
        *(node.output[0] for node in model.graph.node if node.op_type == "Constant"),
    }
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
        centres = node.op_type == "ReduceMean" and {"Sub", "Add", "Mul"} & set(
            users.get(node.output[0], [])
        )
        if adds_constant or centres or (node.op_type == "Mul" and not takes & steps):
            names.append(node.name)
    return names


def to_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert weights and arithmetic to float16 by ONNX Runtime's converter, or say in a
    RetrofitError why not; input and output stay float32. Two errors that it makes beside operations
    that stay in float32 (Max, TopK) are mended.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    constants = {tensor.name for tensor in model.graph.initializer}
    for value in [value for value in model.graph.value_info if value.name in constants]:
        # it would take the constant for one in float16
        model.graph.value_info.remove(value)
    with _reported("the model cannot be converted to float16"):
        half, outputs = convert_float_to_float16(model, keep_io_types=True), set()
        for node in list(half.graph.node):
            if node.output[0] in outputs:
                half.graph.node.remove(
                    node
                )  # it casts a value for each node that reads it, under one name
            outputs.add(node.output[0])
        ordered = onnx_ir.from_proto(half)
        # it appends its casts
        ordered.graph.sort()
        return onnx_ir.to_proto(ordered)


class HalfRun(fx.Interpreter):
    """A run of an exported program in which each operation takes and gives float16.

    ONNX Runtime's CPU provider has no float16 and computes in float32 between most nodes, where
    nothing overflows that does on a GPU. Here the result of each operation is rounded, as of
    hardware that accumulates in float32.
    """

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Return the arguments of a node, numbers as ONNX Runtime's converter writes them."""

        def written(value: float) -> float:
            return (
                float(np.float16(np.clip(value, -65504.0, 65504.0)))
                if math.isfinite(value)
                else value
            )

        return tree_map_only(float, written, super().fetch_args_kwargs_from_env(n))

    def run_node(self, n: fx.Node) -> Any:
        """Compute the value of a node, and round it."""
        return tree_map_only(
            Tensor,
            lambda x: x.half().float() if x.dtype == torch.float32 else x,
            super().run_node(n),
        )

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return self.run(*tree_leaves((args, kwargs)))


@contextmanager
def written(
    model: onnx.ModelProto, path: Path, force: bool, checks: Sequence[tuple[Reference, str]]
) -> Iterator[tuple[Comparison, int]]:
    """Check a model and write it aside; it gets its name when the body ends. If anything fails,
    there is no file.

    Beyond 2 GB, where protobuf ends, the weights go to `path` with `.data` added. `checks` are what
    the file has to answer, and what to do where it does not. Yields the last comparison, and how
    many bytes were written; a RetrofitError says that the model is not valid, differs, or cannot be
    written.
    """
    data = path.with_name(path.name + ".data")
    if model.ByteSize() > LARGEST:
        ensure_writable(data, force)
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= SMALL:
                set_external_data(tensor, data.name)
    with writing(path), temporary_folder(data) as folder:
        draft, weights, replaces = folder / "model.onnx", folder / data.name, False
        onnx.save_model(model, draft)
        with _reported("the exported model is not valid ONNX"):
            onnx.checker.check_model(str(draft), full_check=True)
        run = open_onnx(draft)

        def answers(*args: Any, **kwargs: Any) -> list[Tensor]:
            arrays = [
                leaf.cpu().numpy()
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor)
            ]
            return [torch.from_numpy(values) for values in run(*arrays)]

        for reference, advice in checks:
            comparison = reference.compare(answers)
            if not comparison.passed:
                raise ComparisonError(comparison, "ONNX Runtime differs from PyTorch", advice)
        try:
            with atomic_write(path, force) as temporary:
                draft.rename(temporary)
                yield (
                    comparison,
                    sum(file.stat().st_size for file in (temporary, weights) if file.exists()),
                )
                if weights.exists():
                    if data.exists():
                        os.replace(data, folder / OLD)
                    replaces = True
                    os.replace(weights, data)
        except BaseException:
            if replaces:
                # `temporary_folder` then puts the old ones back
                data.unlink(missing_ok=True)
            raise
