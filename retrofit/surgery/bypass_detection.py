"""Runs that show whether a network bypasses converted layers, by computing with their tensors
without calling them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.compare import Answer, answers_of
from retrofit.errors import RetrofitError
from retrofit.inputs import Call
from retrofit.layers import FrozenBatchNorm
from retrofit.surgery.plan_and_report import LayerRow
from retrofit.surgery.source_run import SourceRun
from retrofit.utils.output_tensors import largest_gap
from retrofit.utils.text import plural, shortlist


def note_on_uncalled(model: nn.Module, converted: Iterable[LayerRow], run: SourceRun) -> str:
    """Return a note on the converted layers that the source did not call; refuse a network that
    evaluates by their tensors in place of calling them.

    `F.batch_norm(x, bn.running_mean, bn.running_var, ...)` in evaluation is BatchNorm, whatever the
    layer has become: such a network trains as one function and is evaluated as another. A frozen
    layer is what these tensors say.

    Args:
        model: The converted network.
        converted: The rows of its converted layers.
        run: The run of its source.

    Raises:
        RetrofitError: If other values in the tensors of these layers change the outputs.
    """
    if run.reference is None:
        return ""
    shapes = run.shapes
    sources = {row.name: row.source for row in converted if not shapes[row.name]}
    if not sources:
        return ""
    layers = {name: model.get_submodule(name) for name in sources}
    suspects = {
        name: layer for name, layer in layers.items() if not isinstance(layer, FrozenBatchNorm)
    }
    bypassed = _bypassed(model, run.reference.calls[0], suspects)
    if bypassed:
        first = bypassed[0]
        label = type(layers[first]).__name__
        raise RetrofitError(
            f"in evaluation the network computes with the tensors of {shortlist(bypassed)} and "
            f"does not call it: this code takes {label} for a {sources[first]}, which it is at "
            "strength 0 at most; call the layer, or keep it with `skip`"
        )
    return (
        f"not called when the network was run: {plural(len(sources), 'converted layer')} "
        f"({shortlist(sorted(sources))}); only training calls such layers, or code that reads "
        "their tensors, for which nothing changes"
    )


def _bypassed(model: nn.Module, call: Call, suspects: Mapping[str, Any]) -> list[str]:
    """Return the names of the layers with whose tensors the network evaluates."""
    answer = _answer_with_nan(model, call, [])
    # The network's code misses a tensor that its layer had before.
    if isinstance(answer, AttributeError):
        return list(suspects)
    if isinstance(answer, Exception):
        raise answer
    if not _differs(_answer_with_nan(model, call, suspects.values()), answer):
        return []
    return [
        name
        for name, layer in suspects.items()
        if _differs(_answer_with_nan(model, call, [layer]), answer)
    ]


def _answer_with_nan(model: nn.Module, call: Call, layers: Iterable[Any]) -> Answer | Exception:
    """Run a network with NaN in the tensors of some layers; return its answer, or what it raises."""
    before = [(layer, layer._parameters, layer._buffers) for layer in layers]
    for layer, parameters, buffers in before:
        vars(layer).update(_parameters=_nan_in(parameters), _buffers=_nan_in(buffers))
    try:
        (answer,) = answers_of(model, [call])
    finally:
        for layer, parameters, buffers in before:
            vars(layer).update(_parameters=parameters, _buffers=buffers)
    return answer


def _differs(other: Answer | Exception, answer: Answer) -> bool:
    # The network's own code may raise anything on NaN.
    if isinstance(other, Exception) or len(other.outputs) != len(answer.outputs):
        return True
    return any(map(largest_gap, other.outputs, answer.outputs))


def _nan_in(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: _nan_like(value) for name, value in tensors.items()}


def _nan_like(value: Tensor | None) -> Tensor | None:
    if value is None or not value.is_floating_point():
        return value
    other = torch.full_like(value, math.nan)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(other, requires_grad=value.requires_grad)
    return other
