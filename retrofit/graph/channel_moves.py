"""Channels through transposes, permutations and reshapes: into which dimension a step puts them."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from retrofit.graph.trace import call_name

# Steps after which a value may have another rank.
RESHAPINGS = {"flatten", "unsqueeze", "view", "reshape"}


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
    if name in ("transpose", "swapaxes", "swapdims", "movedim"):
        return _transposed(args, dim, both_ways=name != "movedim")
    if name == "permute":
        return _permuted(args, dim)
    # The channels stay in dimension 1 if only dimensions behind them change.
    behind = dim == 1 and bool(args) and isinstance(args[0], int) and args[0] > 1
    if name in {"flatten", "unsqueeze"}:
        if behind:
            return dim
        return None
    if name in ("view", "reshape"):
        if dim == 1 and _keeps_two(node):
            return dim
        return None
    return None


def _transposed(dims: tuple[Any, ...], dim: int, both_ways: bool) -> int | None:
    if len(dims) != 2 or not all(isinstance(each, int) for each in dims):
        return None
    first, second = dims
    if dim == first:
        return int(second)
    if not both_ways:
        return None
    if dim == second:
        return int(first)
    # The rank is unknown: 3 and -1 may be one dimension. Counted from the same end, they differ.
    signs = {each < 0 for each in (first, second, dim)}
    if len(signs) == 1:
        return dim
    return None


def _permuted(args: tuple[Any, ...], dim: int) -> int | None:
    order = _unpacked(args)
    if not order or not all(isinstance(each, int) for each in order):
        return None
    rank = len(order)
    moved = [each % rank for each in order].index(dim % rank)
    return -1 if moved == rank - 1 else moved


def _unpacked(args: Sequence[Any]) -> Sequence[Any]:
    """Arguments that are given one by one, or as one tuple."""
    if len(args) == 1:
        return listed(args[0])
    return args


def _keeps_two(node: fx.Node) -> bool:
    """Whether a reshaping keeps the first two sizes of what it takes: images and channels."""
    sizes = _unpacked(node.args[1:])
    first_two = enumerate(sizes[:2])
    return len(sizes) > 1 and all(_is_size(size, node.args[0], dim) for dim, size in first_two)


def _is_size(size: Any, value: Any, dim: int) -> bool:
    """Whether a node is the size of a value's dimension: `x.size(dim)`, or `x.shape[dim]`."""
    if not isinstance(size, fx.Node):
        return False
    if call_name(size) == "size":
        return size.args == (value, dim)
    if call_name(size) != "getitem" or size.args[1] != dim:
        return False
    return isinstance(size.args[0], fx.Node) and _is_shape(size.args[0], value)


def _is_shape(shape: fx.Node, value: Any) -> bool:
    if call_name(shape) == "getattr":
        return shape.args == (value, "shape")
    return call_name(shape) == "size" and shape.args == (value,)
