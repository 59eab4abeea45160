"""From a captured program to an ONNX model, by torch's exporter: the same bytes every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from torch.export.graph_signature import TensorArgument

from retrofit.errors import RetrofitError, UsageError
from retrofit.export.capture import Program
from retrofit.export.silence import cause_of, silence

OPSETS = range(18, 23)


def check_opset(opset: int) -> None:
    """Refuse an opset that this is not tested with.

    Raises:
        UsageError: If there is no such opset here.
    """
    if opset not in OPSETS:
        raise UsageError(f"`opset={opset}` is not supported; use {OPSETS.start} to {OPSETS.stop - 1}")


def to_onnx(
    program: Program, opset: int, metadata: Mapping[str, str]
) -> tuple[onnx.ModelProto, torch.export.ExportedProgram]:
    """Write a captured program as ONNX.

    Args:
        program: A captured program. Its input is named `input` if it is the only one, else as the argument.
        opset: ONNX operator set.
        metadata: Key-value pairs for the file.

    Returns:
        The model, in which nothing depends on where or when it was made, and the program of the operations that became
        its nodes.

    Raises:
        RetrofitError: If the exporter cannot write it.
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
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    return model, written.exported_program


def _tensors(specs: Sequence[Any], kind: str) -> list[str]:
    return [spec.arg.name for spec in specs if spec.kind.name == kind and isinstance(spec.arg, TensorArgument)]


def node_counts(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many nodes of each operator a model has, the most frequent first."""
    counts = Counter(node.op_type for node in model.graph.node)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


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
