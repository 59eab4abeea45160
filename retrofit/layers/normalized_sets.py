"""The normalized sets of each family: a view of a layer's input, and the dimensions that span a set there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sets = Callable[[Tensor], tuple[Tensor, tuple[int, ...]]]


def no_sets(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """No values share statistics: they are constants."""
    return x, ()


def batch_sets(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each channel of (N, C, *) over (N, *)."""
    return x, (0, *range(2, x.ndim))


def channel_sets(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each position of (N, C, *) over C."""
    return x, (1,)


def trailing_sets(count: int, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each sample over its last `count` dimensions."""
    return x, tuple(range(x.ndim - count, x.ndim))


def group_sets(groups: int, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each sample and group of channels of (N, C, *) over (C / groups, *)."""
    return x.unflatten(1, (groups, -1)), tuple(range(2, x.ndim + 1))


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last where that is how `x` lies, and not otherwise contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last
