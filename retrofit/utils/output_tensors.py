"""The tensors in a network's outputs, and how far two of them are apart."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What holds no tensors, whatever attributes it has.
_NO_TENSORS = str | bytes | int | float | nn.Module | type | None


def tensors_in(output: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors anywhere in an output: in lists, mappings, dataclasses and other objects.

    Objects whose `id` is in `seen` are left out.
    """
    if seen is None:
        seen = set()
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, _NO_TENSORS) or id(output) in seen:
        return
    seen.add(id(output))
    for value in _held_by(output):
        yield from tensors_in(value, seen)


def _held_by(output: Any) -> Iterable[Any]:
    """Return the values in an output that may hold tensors."""
    if isinstance(output, Tensor):
        return ()
    if isinstance(output, Mapping):
        return output.values()
    if isinstance(output, list | tuple):
        return output
    if is_dataclass(output):
        return [getattr(output, entry.name, None) for entry in fields(output)]
    if hasattr(output, "__dict__") and not callable(output):
        return vars(output).values()
    return ()


def shape_or_class(output: Any) -> object:
    """Return the shape of a tensor, or the name of another object's class, for messages."""
    if isinstance(output, Tensor):
        return tuple(output.shape)
    return type(output).__name__


def largest_gap(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference of two tensors.

    It is inf if their shapes differ, or if only one of them holds NaN or infinity in a place.
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


def scale_of(tensor: Tensor) -> float:
    """Return the largest absolute value that is finite; 0 if none is."""
    values = _doubles(tensor)
    finite = values[values.isfinite()]
    if finite.numel():
        return float(finite.abs().max())
    return 0.0


def spread_of(samples: Tensor) -> float:
    """Return how far apart the samples (N, *) are in the element where they differ most; 0 if none
    is finite.
    """
    values = _doubles(samples)
    if not values.numel():
        return 0.0
    spread = values.amax(0) - values.amin(0)
    return float(spread.nan_to_num(0.0, 0.0, 0.0).max())
