"""From a captured program to an ONNX file, the same bytes every time: checked first, then written whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx.external_data_helper import set_external_data
from torch import Tensor
from torch.export.graph_signature import TensorArgument
from torch.utils._pytree import tree_leaves

from retrofit.compare import Comparison, ComparisonError, Reference
from retrofit.errors import RetrofitError
from retrofit.export.capture import Program
from retrofit.utils.files import OLD, atomic_write, ensure_writable, temporary_folder, writing
from retrofit.utils.onnx_runtimes import open_onnx
from retrofit.utils.running import silence
from retrofit.utils.text import cause_of, one_line

OPSETS = range(18, 23)  # those that this is tested with
Check = tuple[Reference, str]  # what a file has to answer, and what to do where it does not

LARGEST = 2**31 - 2**20  # bytes that one protobuf file can hold, and some for its own words
SMALL = 1024  # bytes of a tensor that stays in it


def to_onnx(program: Program, opset: int) -> tuple[onnx.ModelProto, torch.export.ExportedProgram]:
    """Convert a captured program to ONNX; return the model, and the program of the operations that became its nodes.

    The input is named `input` if it is the only one, else as the argument. Nothing in the model depends on where or
    when it was made. A RetrofitError says why the exporter cannot convert the program.
    """
    exported = program.exported()
    signature = exported.graph_signature
    inputs, outputs = _tensors(signature.input_specs, "USER_INPUT"), _tensors(signature.output_specs, "USER_OUTPUT")
    try:
        with silence(), torch.no_grad():
            written = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=opset,
                input_names=["input"] if len(inputs) == 1 else inputs,
                output_names=["output"] if len(outputs) == 1 else [f"output{i}" for i in range(len(outputs))],
                verbose=False,
            )
    except Exception as error:  # the exporter's exceptions have no common class
        raise RetrofitError(f"torch.onnx cannot export the network ({cause_of(error)})") from error
    assert written is not None
    assert written.exported_program is not None
    model = written.model_proto
    version = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if version != opset:
        raise RetrofitError(f"the exporter cannot write this network for opset {opset}; use `opset={version}`")
    _anonymize(model)
    return model, written.exported_program


def _tensors(specs: Sequence[Any], kind: str) -> list[str]:
    return [spec.arg.name for spec in specs if spec.kind.name == kind and isinstance(spec.arg, TensorArgument)]


def node_counts(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many nodes of each operator a model has, the most frequent first."""
    return dict(Counter(sorted(node.op_type for node in model.graph.node)).most_common())


def _anonymize(model: onnx.ModelProto) -> None:
    """Take out what the exporter notes about the source code, and give the dynamic dimensions plain names."""
    graph = model.graph
    model.producer_name, graph.name = "retrofit", "network"
    for part in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    names: dict[str, str] = {}
    for axis, dim in enumerate(graph.input[0].type.tensor_type.shape.dim):
        if dim.dim_param:
            names[dim.dim_param] = ("batch", "channels", "height", "width", "depth")[axis]
    for value in (*graph.value_info, *graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


@contextmanager
def written(
    model: onnx.ModelProto, path: Path, force: bool, checks: Sequence[Check]
) -> Iterator[tuple[Comparison, int]]:
    """Check a model and write it aside; it gets its name when the body ends. If anything fails, there is no file.

    Beyond 2 GB, where protobuf ends, the weights go to `path` with `.data` added. Yields the last comparison, and how
    many bytes were written; a RetrofitError says that the model is not valid, differs, or cannot be written.
    """
    if model.ByteSize() <= LARGEST:
        check_model(model)
        content = model.SerializeToString(deterministic=True)
        comparison = _compared(content, checks)
        with atomic_write(path, force) as temporary:
            temporary.write_bytes(content)
            yield comparison, len(content)
        return
    data = ensure_writable(path.with_name(path.name + ".data"), force)
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= SMALL:
            set_external_data(tensor, data.name)
    with writing(path), temporary_folder(data) as folder:
        draft, weights, replaces = folder / "model.onnx", folder / data.name, False
        onnx.save_model(model, draft)  # its own way of naming the weights refuses a name that the working folder holds
        check_model(draft)
        comparison = _compared(draft, checks)
        try:
            with atomic_write(path, force) as temporary:
                temporary.write_bytes(draft.read_bytes())
                yield comparison, temporary.stat().st_size + weights.stat().st_size
                if data.exists():
                    os.replace(data, folder / OLD)
                replaces = True
                os.replace(weights, data)
        except BaseException:
            if replaces:
                data.unlink(missing_ok=True)  # `temporary_folder` then puts the old ones back
            raise


def check_model(model: onnx.ModelProto | Path) -> None:
    """Run ONNX's own checker, with shape inference; a RetrofitError says what it complains of."""
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except Exception as error:
        raise RetrofitError(f"the exported model is not valid ONNX ({one_line(error)}); please report it") from error


def _compared(model: bytes | Path, checks: Sequence[Check]) -> Comparison:
    run = open_onnx(model)

    def answers(*args: Any, **kwargs: Any) -> list[Tensor]:
        arrays = [leaf.cpu().numpy() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return [torch.from_numpy(values) for values in run(*arrays)]

    for reference, advice in checks:
        comparison = reference.compare(answers)
        if not comparison.passed:
            raise ComparisonError(comparison, "ONNX Runtime differs from PyTorch", advice)
    return comparison
