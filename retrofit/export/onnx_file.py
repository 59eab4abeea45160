"""Write a captured program as an ONNX file: the same bytes every time, checked, whole."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import torch
from onnx.external_data_helper import set_external_data
from torch import Tensor
from torch.utils._pytree import tree_leaves

from retrofit.compare import Reference
from retrofit.comparison import Comparison, ComparisonError
from retrofit.errors import RetrofitError
from retrofit.export.capture import Program
from retrofit.utils.files import OLD, atomic_write, ensure_writable, temporary_folder, writing
from retrofit.utils.forward_pass import silence
from retrofit.utils.onnx_runtimes import open_onnx
from retrofit.utils.progress import announced_if_slow
from retrofit.utils.text import cause_of

# Those that this is tested with
OPSETS = range(18, 23)
# Bytes that one protobuf file can hold, and some for its own words
LARGEST = 2**31 - 2**20
# Bytes of a tensor that stays in it
SMALL = 1024
_AXES = ("batch", "channels", "height", "width", "depth")


class Check(NamedTuple):
    """The outputs that a file has to give, and what to do if it does not."""

    reference: Reference
    advice: str


@contextmanager
def reported(problem: str) -> Iterator[None]:
    """Silence a library, and make a RetrofitError of its exceptions, which have no common class."""
    try:
        with silence():
            yield
    except RetrofitError:
        raise
    except Exception as error:
        raise RetrofitError(f"{problem} ({cause_of(error)}); please report it") from error


def to_onnx(program: Program, opset: int) -> tuple[onnx.ModelProto, torch.export.ExportedProgram]:
    """Convert a captured program to ONNX; return the model, and the program of the operations that
    became its nodes.

    The input is named `input` if it is the only one, else as the argument. Nothing in the model
    depends on where or when it was made.

    Raises:
        RetrofitError: If the exporter cannot convert the program, or not for this opset.
    """
    with (
        announced_if_slow("torch.onnx is converting the network"),
        reported("torch.onnx cannot export the network"),
        torch.no_grad(),
    ):
        converted: Any = torch.onnx.export(
            program.exported(),
            dynamo=True,
            optimize=True,
            opset_version=opset,
            verbose=False,
        )
    version = converted.model.opset_imports[""]
    if version != opset:
        raise RetrofitError(
            f"the exporter cannot write this network for opset {opset}; use `opset={version}`"
        )
    _name_outside(converted.model.graph)
    model = converted.model_proto
    _anonymize(model)
    return model, converted.exported_program


def _name_outside(graph: Any) -> None:
    """Name the inputs and outputs of a graph of onnx_ir."""
    if len(graph.inputs) == 1:
        graph.inputs[0].name = "input"
    for number, output in enumerate(graph.outputs):
        output.name = f"output{number}"
    if len(graph.outputs) == 1:
        graph.outputs[0].name = "output"


def _anonymize(model: onnx.ModelProto) -> None:
    """Take out what the exporter notes about the source code, and give the dynamic dimensions plain
    names.
    """
    graph = model.graph
    model.producer_name = "retrofit"
    graph.name = "network"
    values = (*graph.value_info, *graph.input, *graph.output)
    for part in (model, graph, *graph.node, *graph.initializer, *values):
        part.doc_string = ""
        del part.metadata_props[:]
    dims = graph.input[0].type.tensor_type.shape.dim
    axes = {dim.dim_param: axis for dim, axis in zip(dims, _AXES, strict=False)}
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = axes.get(dim.dim_param, dim.dim_param)


@contextmanager
def written(
    model: onnx.ModelProto, path: Path, force: bool, checks: Sequence[Check]
) -> Iterator[tuple[Comparison, int]]:
    """Check a model and write it to a temporary file, which gets its name when the body ends. If
    anything fails, a file that was at `path` before stays.

    Beyond 2 GB, where protobuf ends, the weights go to `path` with `.data` added.

    Yields:
        The last comparison, and how many bytes were written.

    Raises:
        RetrofitError: If the model is not valid, differs, or cannot be written.
    """
    data = path.with_name(path.name + ".data")
    if model.ByteSize() > LARGEST:
        ensure_writable(data, force)
        _put_weights_beside(model, data.name)
    with writing(path), temporary_folder(data) as folder:
        draft = folder / "model.onnx"
        weights = folder / data.name
        onnx.save_model(model, draft)
        with reported("the exported model is not valid ONNX"):
            onnx.checker.check_model(str(draft), full_check=True)
        comparison = _compared(draft, checks)
        files = [file for file in (draft, weights) if file.exists()]
        size = sum(file.stat().st_size for file in files)
        with (
            _weights_follow_their_model(draft, path, weights, data),
            atomic_write(path, force) as temporary,
        ):
            draft.rename(temporary)
            yield comparison, size
            if weights in files:
                if data.exists():
                    os.replace(data, folder / OLD)
                os.replace(weights, data)


def _put_weights_beside(model: onnx.ModelProto, name: str) -> None:
    # `onnx.save_model` would look for the name in the working folder
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= SMALL:
            set_external_data(tensor, name)


def _compared(draft: Path, checks: Sequence[Check]) -> Comparison:
    """Compare ONNX Runtime's outputs with each reference; return the last comparison."""
    run = open_onnx(draft)

    def outputs(*args: Any, **kwargs: Any) -> list[Tensor]:
        leaves = tree_leaves((args, kwargs))
        arrays = [leaf.cpu().numpy() for leaf in leaves if isinstance(leaf, Tensor)]
        return [torch.from_numpy(values) for values in run(*arrays)]

    comparison = Comparison()
    for reference, advice in checks:
        comparison = reference.compare(outputs)
        if not comparison.passed:
            raise ComparisonError(comparison, "ONNX Runtime differs from PyTorch", advice)
    return comparison


@contextmanager
def _weights_follow_their_model(
    draft: Path, path: Path, weights: Path, data: Path
) -> Iterator[None]:
    """If the body fails, leave beside the model at `path` the weights that belong to it.

    New weights are removed if their model did not get its name: `temporary_folder` then puts the
    old ones back.
    """
    has_weights = weights.exists()
    identity = draft.stat().st_ino
    try:
        yield
    except BaseException:
        is_model_in_place = path.exists() and path.stat().st_ino == identity
        if has_weights and not weights.exists() and not is_model_in_place:
            data.unlink(missing_ok=True)
        raise
