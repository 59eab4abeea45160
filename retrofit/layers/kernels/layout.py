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
    # after it, the shape of the affine parameters
    full_affine: tuple[int, ...]
    # after merging, as the next two
    shape: tuple[int, ...]
    # of the affine parameters; 1 where they broadcast
    affine: tuple[int, ...]
    # of `shape` that the normalized set spans
    dims: tuple[int, ...]

    def view(self, x: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """View `x` in this layout, parameters in the shape of `affine`; copies what lies otherwise
        in memory.
        """
        return x.permute(self.order).reshape(self.shape if shape is None else shape).contiguous()

    def empty_like(self, x: Tensor) -> Tensor:
        """Return room for a result in the tensor's own shape and memory format, of which `view` is
        a view.
        """
        return torch.empty_permuted(x.shape, self.order, dtype=x.dtype, device=x.device)

    def undo(self, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return rows of `kept` sizes (a number a set) or `full_affine` ones, with the tensor's own
        dimensions.
        """
        return rows.reshape(-1, *sizes).permute(
            0, *(1 + self.order.index(d) for d in range(len(self.order)))
        )


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
    order = tuple(sorted(range(len(size)), key=stride.__getitem__, reverse=True))
    dense = [math.prod(size[later] for later in order[place + 1 :]) for place in range(len(order))]
    if any(size[d] != 1 and stride[d] != step for d, step in zip(order, dense, strict=True)):
        order = tuple(range(len(size)))
    full = tuple(size[d] for d in order)
    kinds = [
        (d in dim, any(shape is not None and shape[d] != 1 for shape in affine)) for d in order
    ]
    shape, merged = [], []
    large = [(kind, n) for kind, n in zip(kinds, full, strict=True) if n != 1]
    for kind, run in groupby(large, key=lambda entry: entry[0]):
        shape.append(math.prod(n for _, n in run))
        merged.append(kind)
    # every set is a single value
    if dim and not any(in_set for in_set, _ in merged):
        shape.append(1)
        merged.append((True, False))
    return Layout(
        order=order,
        kept=tuple(1 if in_set else n for n, (in_set, _) in zip(full, kinds, strict=True)),
        full_affine=tuple(n if has else 1 for n, (_, has) in zip(full, kinds, strict=True)),
        shape=tuple(shape),
        affine=tuple(n if has else 1 for n, (_, has) in zip(shape, merged, strict=True)),
        dims=tuple(d for d, (in_set, _) in enumerate(merged) if in_set),
    )


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
    vector holds, `lane` through all of these sets, and a set has `share` neighbouring elements a
    run. The C++ kernels read it as it is.
    """

    _fields_ = (
        ("columns", ctypes.c_int64),
        *((name, Axis) for name in ("outer", "inner", "runs", "lane")),
        *((name, ctypes.c_int64) for name in ("affine_size", "share")),
    )

    @property
    def sets(self) -> int:
        sets: int = self.outer.size * (
            self.lane.size // self.share if self.columns else self.inner.size
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
    *axes, lane = (
        Axis(n, math.prod(shape[d + 1 :]), math.prod(affine[d + 1 :]) if affine[d] != 1 else 0)
        for d, n in enumerate(shape)
    )
    columns, share = len(axes) not in dims, 1
    within = [axis for d, axis in enumerate(axes) if d in dims]
    between = [axis for d, axis in enumerate(axes) if d not in dims]
    runs = within.pop() if within else Axis(1)
    inner = between.pop() if between and not columns else Axis(1)
    outer = between.pop() if between else Axis(1)
    if within or between or outer.affine or (columns and lane.affine and runs.affine):
        return None
    adjacent = inner.stride == lane.size and inner.affine == lane.size * lane.affine
    if (
        beside
        and not columns
        and adjacent
        and lane.size <= width
        and runs.size != 1
        and not runs.affine
    ):
        columns, share = True, lane.size
        lane = Axis(inner.size * share, lane.stride, lane.affine)
    if columns:
        block = width // share * share
        inner = Axis(math.ceil(lane.size / block), block, block * lane.affine)
    return Geometry(columns, outer, inner, runs, lane, math.prod(affine), share)
