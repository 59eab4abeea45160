"""From a folded network to an ONNX model, by torch's exporter, without a word from it and the same bytes every time."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import onnx
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.placement import placement_of
from retrofit.utils.text import with_class

OPSETS = range(18, 23)
INPUT = "input"


def check_opset(opset: int) -> None:
    """Refuse an opset that this is not tested with.

    Raises:
        UsageError: If there is no such opset here.
    """
    if opset not in OPSETS:
        raise UsageError(f"`opset={opset}` is not supported; use {OPSETS.start} to {OPSETS.stop - 1}")


def to_onnx(
    net: nn.Module, size: Sequence[int], opset: int, dynamic_size: bool, metadata: Mapping[str, str]
) -> onnx.ModelProto:
    """Export a network in evaluation mode.

    Args:
        net: Takes one tensor, (N, *size), and gives tensors.
        size: Shape of one sample.
        opset: ONNX operator set.
        dynamic_size: Whether all dimensions after the channels may vary, besides the batch.
        metadata: Key-value pairs for the file.

    Returns:
        The model; nothing in it depends on where or when it was made.

    Raises:
        RetrofitError: If the network cannot be exported so.
    """
    device, dtype = placement_of(net)
    example = torch.zeros(2, *size, device=device, dtype=dtype)
    dims: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    if dynamic_size:
        dims |= dict.fromkeys(range(2, example.ndim), torch.export.Dim.DYNAMIC)
    with torch.no_grad():
        outputs = [leaf for leaf in tree_leaves(net(example)) if isinstance(leaf, torch.Tensor)]
    names = ["output"] if len(outputs) == 1 else [f"output{i}" for i in range(len(outputs))]
    try:
        with silence(), torch.no_grad():
            program = torch.onnx.export(
                net,
                (example,),
                dynamo=True,
                opset_version=opset,
                input_names=[INPUT],
                output_names=names,
                dynamic_shapes=(dims,),
                verbose=False,
            )
    except Exception as error:  # torch.export raises anything that the network's code does
        advice = (
            "leave out `dynamic_size`" if dynamic_size else "only networks that torch.export can trace can be exported"
        )
        raise RetrofitError(f"torch.onnx cannot export the network ({_cause(error)}); {advice}") from error
    assert program is not None
    model = program.model_proto
    found = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if found != opset:
        raise RetrofitError(f"the exporter cannot write this network for opset {opset}; use `opset={found}`")
    _anonymous(model, dynamic_size)
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    return model


def node_counts(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many nodes of each operator a model has, the most frequent first."""
    counts = Counter(node.op_type for node in model.graph.node)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@contextmanager
def silence() -> Iterator[None]:
    """Keep the exporter's warnings, log lines and prints from the user: a network that it fails on, it prints whole."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _anonymous(model: onnx.ModelProto, dynamic_size: bool) -> None:
    """Take out what the exporter notes about the source code, and give the dynamic dimensions plain names."""
    model.producer_name, model.doc_string = "retrofit", ""
    model.graph.doc_string, model.graph.name = "", "network"
    del model.metadata_props[:], model.graph.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        value.doc_string = ""
        del value.metadata_props[:]
    for tensor in model.graph.initializer:
        tensor.doc_string = ""
        del tensor.metadata_props[:]
    names = {}
    for axis, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
        if dim.dim_param:
            names[dim.dim_param] = "batch" if axis == 0 else ("height", "width", "depth")[axis - 2]
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return with_class(error).rstrip(".")
