"""Views of a tensor in the order of its memory, with as few dimensions as its normalized sets
allow.
"""

import ctypes
import math
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How a tensor is seen by the kernels: permuted into memory order, neighbouring dimensions of a
    kind merged.
    """

    # the permutation
    order: tuple[int, ...]
    # after it, the shape of one number a set
    kept: tuple[int, ...]
    # after merging, as the next two
    shape: tuple[int, ...]
    # of the affine parameters; 1 where they broadcast
    affine: tuple[int, ...]
    # of `shape` that the normalized set spans
    dims: tuple[int, ...]

    def view(self, x: Tensor) -> Tensor:
        """View a dense tensor in this layout."""
        return x.as_strided((x.numel(),), (1,)).view(self.shape)

    def view_affine(self, parameter: Tensor | None) -> Tensor | None:
        """View a parameter in this layout, in whose order it lies."""
        return None if parameter is None else parameter.reshape(self.affine)

    def undo(self, rows: Tensor) -> Tensor:
        """Return rows of numbers for each set with the tensor's own dimensions."""
        places = (1 + self.order.index(d) for d in range(len(self.order)))
        return rows.reshape(-1, *self.kept).permute(0, *places)


@lru_cache(maxsize=1024)
def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements fill their memory in some order of the dimensions, without overlap."""
    length = 1
    for step, count in sorted((step, n) for step, n in zip(stride, size, strict=True) if n != 1):
        if step != length:
            return False
        length *= count
    return True


def dense(x: Tensor) -> Tensor:
    """Return a tensor, or a dense copy of one that is not."""
    return x if is_dense(x.shape, x.stride()) else torch.empty_like(x).copy_(x)


def laid_out_as(x: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient that lies in memory as `x` does."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


@lru_cache(maxsize=1024)
def layout_of(
    size: tuple[int, ...], stride: tuple[int, ...], dim: tuple[int, ...], affine: torch.Size | None
) -> Layout:
    """Return the layout of a tensor with sets over `dim` and affine parameters of a shape that
    broadcasts to it.
    """
    order = _memory_order(size, stride)
    dimensions = [_Dimension(size[d], d in dim, affine is None or affine[d] == 1) for d in order]
    merged = _merged(dimensions)
    dims = tuple(d for d, each in enumerate(merged) if each.in_set)
    # every set is a single value
    if dim and not dims:
        dims = (len(merged),)
        merged.append(_Dimension(1, in_set=True, fixed=True))
    return Layout(
        order=order,
        kept=tuple(each.of_sets for each in dimensions),
        shape=tuple(each.size for each in merged),
        affine=tuple(each.of_parameters for each in merged),
        dims=dims,
    )


def channel_layout(x: Tensor) -> Layout:
    """Return the layout of (N, C, *) whose sets and parameters are those of a channel."""
    channels = torch.Size(n if d == 1 else 1 for d, n in enumerate(x.shape))
    return layout_of(x.shape, x.stride(), (0, *range(2, x.ndim)), channels)


class _Dimension(NamedTuple):
    size: int
    # whether the normalized set spans it
    in_set: bool
    # whether no parameter changes along it
    fixed: bool

    @property
    def of_sets(self) -> int:
        """How many sets lie along it."""
        return 1 if self.in_set else self.size

    @property
    def of_parameters(self) -> int:
        """How many parameters lie along it."""
        return 1 if self.fixed else self.size


def _merged(dimensions: list[_Dimension]) -> list[_Dimension]:
    """Merge neighbouring dimensions of a kind, those of size 1 with any."""
    large = [each for each in dimensions if each.size != 1]
    runs = groupby(large, key=lambda each: each[1:])
    return [_Dimension(math.prod(each.size for each in run), *kind) for kind, run in runs]


def _memory_order(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions from the outermost in memory to the innermost, in their own order for a
    tensor that is not dense.
    """
    order = tuple(range(len(size)))
    if not is_dense(size, stride):
        return order
    return tuple(sorted(order, key=stride.__getitem__, reverse=True))


class Axis(ctypes.Structure):
    """One loop over a tensor: how many steps, and how far each moves in the tensor and in the
    affine parameters.
    """

    _fields_ = tuple((name, ctypes.c_int64) for name in ("size", "stride", "affine"))


class Geometry(ctypes.Structure):
    """Where the normalized sets of a contiguous tensor lie, as loops around each other; strides are
    in elements.

    The two outer loops go from set to set, the two inner ones through a set: `runs` stretches of
    memory, each of them `lane.size` neighbouring elements. If `columns`, neighbouring elements
    belong to neighbouring sets instead: then `inner` goes from block to block of as many sets as a
    vector holds, `lane` through all of these sets, and a set has `merge` neighbouring elements a
    run. The C++ kernels read both structures as they are: normality.cpp has the same fields.
    """

    _fields_ = (
        ("columns", ctypes.c_int64),
        *((name, Axis) for name in ("outer", "inner", "runs", "lane")),
        *((name, ctypes.c_int64) for name in ("affine_size", "merge")),
    )

    @property
    def sets(self) -> int:
        sets: int = self.outer.size * (
            self.lane.size // self.merge if self.columns else self.inner.size
        )
        return sets


@lru_cache(maxsize=1024)
def geometry_of(
    shape: tuple[int, ...], dims: tuple[int, ...], affine: tuple[int, ...], width: int
) -> Geometry | None:
    """Return the geometry of sets over `dims` for vectors of `width`, None where sets need more
    loops. Stretches that fit a vector and lie beside those of the next set are columns.
    """
    *axes, lane = _axes(shape, affine)
    columns = len(axes) not in dims
    loops = _loops(axes, dims, columns)
    if loops is None:
        return None
    outer, inner, runs = loops
    if outer.affine or (columns and lane.affine and runs.affine):
        return None
    merge = 1
    if not columns and lane.size <= width and _lie_beside(inner, runs, lane):
        columns = True
        merge = lane.size
        lane = Axis(inner.size * merge, lane.stride, lane.affine)
    if columns:
        block = width // merge * merge
        inner = Axis(math.ceil(lane.size / block), block, block * lane.affine)
    return Geometry(columns, outer, inner, runs, lane, math.prod(affine), merge)


def _axes(shape: tuple[int, ...], affine: tuple[int, ...]) -> list[Axis]:
    """Return a loop over each dimension of a contiguous tensor."""
    axes = []
    for d, n in enumerate(shape):
        step = math.prod(affine[d + 1 :]) if affine[d] != 1 else 0
        axes.append(Axis(n, math.prod(shape[d + 1 :]), step))
    return axes


def _loops(
    axes: list[Axis], dims: tuple[int, ...], columns: bool
) -> tuple[Axis, Axis, Axis] | None:
    """Return the two loops from set to set, of which columns have one, and that through a set; None
    where there are more.
    """
    within = [axis for d, axis in enumerate(axes) if d in dims]
    between = [axis for d, axis in enumerate(axes) if d not in dims]
    runs = _innermost(within)
    inner = Axis(1) if columns else _innermost(between)
    outer = _innermost(between)
    return None if within or between else (outer, inner, runs)


def _innermost(axes: list[Axis]) -> Axis:
    """Take the innermost loop away; one of a single step where there is none."""
    return axes.pop() if axes else Axis(1)


def _lie_beside(inner: Axis, runs: Axis, lane: Axis) -> bool:
    """Whether the stretches of a set lie beside those of the next."""
    adjacent = inner.stride == lane.size and inner.affine == lane.size * lane.affine
    return adjacent and runs.size != 1 and not runs.affine
