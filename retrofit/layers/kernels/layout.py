"""Views of a tensor in the order of its memory, with as few dimensions as its normalized sets
allow.
"""

import ctypes
import math
from collections.abc import Sequence
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


@lru_cache(maxsize=1024)
def layout_of(
    size: tuple[int, ...], stride: tuple[int, ...], dim: tuple[int, ...], *affine: torch.Size | None
) -> Layout:
    """Return the layout of a tensor with sets over `dim` and affine parameters of shapes that
    broadcast to it.
    """
    order = _memory_order(size, stride)
    full = tuple(size[d] for d in order)
    in_set = [d in dim for d in order]
    fixed = [_is_fixed(affine, d) for d in order]
    shape, merged_in_set, merged_fixed = _merged(full, in_set, fixed)
    # every set is a single value
    if dim and not any(merged_in_set):
        shape += (1,)
        merged_in_set += (True,)
        merged_fixed += (True,)
    return Layout(
        order=order,
        kept=_one_where(in_set, full),
        shape=shape,
        affine=_one_where(merged_fixed, shape),
        dims=tuple(d for d, within in enumerate(merged_in_set) if within),
    )


def _is_fixed(shapes: tuple[torch.Size | None, ...], d: int) -> bool:
    """Whether no parameter changes along a dimension."""
    return all(shape is None or shape[d] == 1 for shape in shapes)


def _merged(
    sizes: tuple[int, ...], in_set: list[bool], fixed: list[bool]
) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[bool, ...]]:
    """Merge neighbouring dimensions of a kind, those of size 1 with any."""
    shape: tuple[int, ...] = ()
    kinds: list[tuple[bool, bool]] = []
    large = [entry for entry in zip(sizes, in_set, fixed, strict=True) if entry[0] != 1]
    for kind, run in groupby(large, key=lambda entry: entry[1:]):
        shape += (math.prod(n for n, *_ in run),)
        kinds.append(kind)
    return shape, tuple(kind[0] for kind in kinds), tuple(kind[1] for kind in kinds)


def _one_where(flags: Sequence[bool], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if flag else n for flag, n in zip(flags, sizes, strict=True))


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
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    affine: tuple[int, ...],
    width: int,
    beside: bool = False,
) -> Geometry | None:
    """Return the geometry of sets over `dims` for vectors of `width`, None where sets need more
    loops. With `beside`, stretches that fit a vector and lie beside those of the next set are
    columns.
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
    if beside and not columns and lane.size <= width and _lie_beside(inner, runs, lane):
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
