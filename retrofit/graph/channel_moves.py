"""Channels through transposes and permutations: into which dimension a step puts them."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from retrofit.graph.trace import call_name

# Steps after which a value may have another rank.
RESHAPINGS = {"flatten", "unsqueeze"}


def listed(value: Any) -> Sequence[Any]:
    """Return an argument that is one number, or one for each dimension, as a sequence."""
    if isinstance(value, (tuple, list)):
        return value
    return (value,)


def moved_channels(node: fx.Node, dim: int) -> int | None:
    """Return where a step puts the channels that it takes in dimension `dim`.

    None says that the step does not move whole channels, or that it is unknown where to.
    """
    name = call_name(node)
    args = node.args[1:]
    if name in ("transpose", "swapaxes", "swapdims"):
        return _transposed(args, dim)
    if name == "permute":
        return _permuted(args, dim)
    if name not in RESHAPINGS or dim != 1 or not args:
        return None
    # The channels stay in dimension 1 if only dimensions behind them change.
    first = args[0]
    if isinstance(first, int) and first > 1:
        return dim
    return None


def _transposed(dims: tuple[Any, ...], dim: int) -> int | None:
    if len(dims) != 2 or not all(isinstance(each, int) for each in dims):
        return None
    first, second = dims
    if dim == first:
        return int(second)
    if dim == second:
        return int(first)
    # The rank is unknown: 3 and -1 may be one dimension. Counted from the same end, they differ.
    compared = (first, second, dim)
    signs = {each < 0 for each in compared}
    if len(signs) == 1:
        return dim
    return None


def _permuted(args: tuple[Any, ...], dim: int) -> int | None:
    # They are given one by one, or as one tuple.
    order: Sequence[Any] = args
    if len(args) == 1:
        order = listed(args[0])
    if not order or not all(isinstance(each, int) for each in order):
        return None
    rank = len(order)
    moved = [each % rank for each in order].index(dim % rank)
    return -1 if moved == rank - 1 else moved
