"""The tensors in what a network answers, and how far two of them are apart."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What holds no tensors, whatever attributes it has.
_NO_TENSORS = str | bytes | int | float | nn.Module | type | None


def tensors_in(answer: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors anywhere in what a network answers: in lists, mappings, dataclasses and
    other objects.

    What is in `seen`, by `id`, is left out.
    """
    if seen is None:
        seen = set()
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, _NO_TENSORS) or id(answer) in seen:
        return
    seen.add(id(answer))
    for value in _held_by(answer):
        yield from tensors_in(value, seen)


def _held_by(answer: Any) -> Iterable[Any]:
    """Return the values in an answer that may hold tensors."""
    if isinstance(answer, Tensor):
        return ()
    if isinstance(answer, Mapping):
        return answer.values()
    if isinstance(answer, list | tuple):
        return answer
    if is_dataclass(answer):
        return [getattr(answer, entry.name, None) for entry in fields(answer)]
    if hasattr(answer, "__dict__") and not callable(answer):
        return vars(answer).values()
    return ()


def largest_gap(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference: inf where shapes differ, or NaN or infinity is on one
    side only.
    """
    if ours.shape != theirs.shape:
        return math.inf
    a = _doubles(ours)
    b = _doubles(theirs)
    alike = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().nan_to_num(math.inf, math.inf)
    return float(gap.masked_fill(alike, 0.0).max()) if gap.numel() else 0.0


def _doubles(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor).double()
    return tensor.double()


def scale_of(source: Tensor) -> float:
    """Return the largest absolute value that is finite; 0 if none is."""
    finite = source[source.isfinite()]
    if finite.numel():
        return float(finite.abs().max())
    return 0.0
