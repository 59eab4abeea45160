"""Sizes other than the example's, for which a file has to be right too.

torch.export follows one way through a network's code, and notes under which conditions on the sizes
other inputs would have gone it too. Most only choose between ways to the same numbers. A file
of ONNX cannot hold conditions. So each that another size breaks is tried: there, the captured
operations alone have to give what the network gives. And the exporter may take a size that varies
for a constant, as that of an adaptive pooling, so the file is run at other sizes too.

Before torch 2.9, a captured program does not say its conditions; every size is tried there.
"""

import operator
from collections.abc import Iterator
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from retrofit.compare import Reference
from retrofit.comparison import ComparisonError
from retrofit.errors import RetrofitError
from retrofit.export.capture import Program
from retrofit.export.request import Request
from retrofit.export.signature import unmet_condition
from retrofit.inputs import Call
from retrofit.utils.text import one_line

# Steps from a captured size to others, which leave remainders of all kinds
_STEPS = (1, 2, 3, 4, 7, 8, 16, 32, -1)
_SAYS_CONDITIONS = torch.__version__ >= "2.9"
# Numbers of samples
_BATCHES = (*range(1, 9), 16, 32)
# Inputs tried for each condition: the network may refuse one
_TRIALS = 3


def at_other_sizes(request: Request, program: Program, tolerance: float) -> Reference:
    """Return what a captured program gives where the sizes behind the channels are others.

    Raises:
        RetrofitError: If it takes none of the sizes that are tried.
    """
    example = request.unseen[0].resized(request.batch or 1)
    dims = range(2, max(tensor.ndim for tensor in example.tensors))
    calls = [example.stretched(dims, partial(operator.add, step)) for step in (1, 32)]
    # What divides a size divides its double
    calls += [example.stretched([dim], partial(operator.mul, 2)) for dim in dims]
    try:
        return Reference(program.unconditional(), calls, tolerance=tolerance)
    except RetrofitError as error:
        raise RetrofitError(
            f"the captured network took no other size that was tried ({one_line(error)}); leave "
            "out `dynamic_size`"
        ) from error


def refuse_other_functions(request: Request, program: Program) -> None:
    """Check a captured program at sizes beyond the conditions of its capture.

    Raises:
        ComparisonError: If it is not the network's function there.
    """
    trials = _trials(request, program)
    if not trials:
        return
    captured = program.unconditional()
    for condition, calls in trials.items():
        for call in calls:
            try:
                reference = Reference(request.network, [call], tolerance=request.allowed)
                comparison = reference.compare(captured)
            # What one of them does not take, nobody is told wrong numbers for
            except RetrofitError:
                continue
            if comparison.differs:
                claim = f"the captured network holds for some sizes alone ({condition}), and elsewhere differs"
                has_other_batch = call.batch != request.calls[0].batch
                advice = "fix `batch`" if has_other_batch else "leave out `dynamic_size`"
                raise ComparisonError(comparison, claim, advice)
            break


def _trials(request: Request, program: Program) -> dict[str, list[Call]]:
    """Return, for each condition, some calls that break it."""
    trials: dict[str, list[Call]] = {}
    for call in _other_calls(request):
        shapes = call.to(torch.device("meta"), torch.float32)
        if _SAYS_CONDITIONS:
            values = tree_leaves((shapes.args, dict(shapes.kwargs)))
            condition = unmet_condition(program.module, values)
        else:
            condition = f"not {', '.join(str(tuple(tensor.shape)) for tensor in shapes.tensors)}"
        if not condition:
            continue
        calls = trials.setdefault(condition, [])
        if len(calls) < _TRIALS:
            calls.append(call)
    return trials


def _other_calls(request: Request) -> Iterator[Call]:
    """Yield calls of other sizes, as far as these may vary."""
    example = request.calls[0]
    if request.batch is None:
        for rows in _BATCHES:
            yield example.resized(rows)
    if not request.dynamic_size:
        return
    last = max(tensor.ndim for tensor in example.tensors)
    for step in _STEPS:
        for dims in ({*range(2, last)}, *({dim} for dim in range(2, last))):
            yield example.stretched(dims, partial(operator.add, step))
