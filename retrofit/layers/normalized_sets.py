"""The sets of values that a layer normalizes together, as a view of its input and the dimensions
that span a set there.
"""

from collections.abc import Callable

from torch import Tensor

Sets = Callable[[Tensor], tuple[Tensor, tuple[int, ...]]]
"""A view of a layer's input, and the dimensions that span a normalized set there."""


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
