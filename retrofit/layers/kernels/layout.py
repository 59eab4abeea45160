"""Views of a tensor in the order of its memory, with as few dimensions as its normalized sets allow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How a tensor is seen by the kernels: permuted into memory order, neighbouring dimensions of a kind merged.

    Attributes:
        order: The permutation.
        full: Shape after it; `kept` and `full_affine` the same for one number a set and for the affine parameters.
        shape: Shape after merging.
        affine: Shape of the affine parameters after merging; 1 where they broadcast.
        dims: Dimensions of `shape` that the normalized set spans.
    """

    order: tuple[int, ...]
    full: tuple[int, ...]
    kept: tuple[int, ...]
    full_affine: tuple[int, ...]
    shape: tuple[int, ...]
    affine: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, dim: tuple[int, ...], *affine: torch.Size | None) -> Layout:
        """Return the layout of `x` with sets over `dim` and affine parameters of shapes that broadcast to it."""
        return _layout_of(tuple(x.shape), x.stride(), dim, affine)

    def view(self, x: Tensor) -> Tensor:
        """View `x` in this layout; copies what lies otherwise in memory."""
        return self._ordered(x).reshape(self.shape).contiguous()

    def view_affine(self, parameter: Tensor) -> Tensor:
        """View an affine parameter so that it broadcasts to `view`'s result."""
        return self._ordered(parameter).reshape(self.affine)

    def empty_like(self, x: Tensor) -> Tensor:
        """Return room for a result in the tensor's own shape and memory format, of which `view` is a view."""
        stride = [0] * len(self.order)
        for position, d in enumerate(self.order):
            stride[d] = math.prod(self.full[position + 1 :])
        return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)

    def undo_sets(self, rows: Tensor) -> Tensor:
        """Return rows of one number a set, kept broadcastable, in the tensor's own number of dimensions."""
        return self._undo(rows, self.kept)

    def undo_affine(self, rows: Tensor) -> Tensor:
        """Undo `view_affine` for rows of parameters."""
        return self._undo(rows, self.full_affine)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._straight else x.permute(self.order)

    def _undo(self, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        rows = rows.reshape(-1, *sizes)
        return rows if self._straight else rows.permute(0, *(1 + self.order.index(d) for d in range(len(self.order))))

    @property
    def _straight(self) -> bool:
        return self.order == tuple(range(len(self.order)))


@lru_cache(maxsize=1024)
def _layout_of(
    size: tuple[int, ...], stride: tuple[int, ...], dim: tuple[int, ...], affine: tuple[torch.Size | None, ...]
) -> Layout:
    order = tuple(sorted(range(len(size)), key=stride.__getitem__, reverse=True))
    for place, d in enumerate(order):
        if size[d] != 1 and stride[d] != math.prod(size[later] for later in order[place + 1 :]):
            order = tuple(range(len(size)))
            break
    full = tuple(size[d] for d in order)
    kinds = [(d in dim, any(shape is not None and shape[d] != 1 for shape in affine)) for d in order]
    runs = [list(run) for _, run in groupby(((k, n) for k, n in zip(kinds, full, strict=True) if n != 1), _kind)]
    shape = [math.prod(n for _, n in run) for run in runs]
    merged = [_kind(run[0]) for run in runs]
    if dim and not any(in_set for in_set, _ in merged):  # every set is a single value
        shape.append(1)
        merged.append((True, False))
    return Layout(
        order,
        full,
        tuple(1 if in_set else n for n, (in_set, _) in zip(full, kinds, strict=True)),
        tuple(n if has else 1 for n, (_, has) in zip(full, kinds, strict=True)),
        tuple(shape),
        tuple(n if has else 1 for n, (_, has) in zip(shape, merged, strict=True)),
        tuple(d for d, (in_set, _) in enumerate(merged) if in_set),
    )


class Geometry(NamedTuple):
    """Where the normalized sets of a contiguous tensor lie, in elements.

    Set (o, i) starts at o * outer_stride + i * inner_stride and has `runs` stretches of `length` elements, `run_stride`
    apart. If `columns`, i counts blocks of neighbouring sets instead, each of which has `share` elements a run; a block
    has as many as a vector of `width` holds, and `length` is their elements' number. The index into the affine
    parameters, `affine_size` of them, starts at i * affine_inner and moves by `affine_run` a run and by `affine_lane`
    an element of a stretch, or of neighbouring sets.
    """

    columns: bool
    outer: int
    outer_stride: int
    inner: int
    inner_stride: int
    runs: int
    run_stride: int
    length: int
    affine_inner: int
    affine_run: int
    affine_lane: int
    affine_size: int
    share: int = 1

    @property
    def sets(self) -> int:
        """Number of sets."""
        return self.outer * (self.length // self.share if self.columns else self.inner)


@lru_cache(maxsize=1024)
def geometry_of(shape: tuple[int, ...], dims: tuple[int, ...], affine: tuple[int, ...], width: int) -> Geometry | None:
    """Return the geometry of sets over `dims`, or None where it has no words for them: they lie too irregularly."""
    stride = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    at = [math.prod(affine[d + 1 :]) if affine[d] != 1 else 0 for d in range(len(shape))]
    last = len(shape) - 1
    columns = last not in dims
    runs = [d for d in dims if d != last]
    others = [d for d in range(last) if d not in dims]
    inner = others.pop() if others and not columns else None
    if len(runs) > 1 or len(others) > 1 or any(at[d] for d in others):
        return None
    if columns and at[last] and any(at[d] for d in runs):
        return None
    return Geometry(
        columns,
        outer=shape[others[0]] if others else 1,
        outer_stride=stride[others[0]] if others else 0,
        inner=math.ceil(shape[last] / width) if columns else 1 if inner is None else shape[inner],
        inner_stride=width if columns else 0 if inner is None else stride[inner],
        runs=shape[runs[0]] if runs else 1,
        run_stride=stride[runs[0]] if runs else 0,
        length=shape[last],
        affine_inner=width * at[last] if columns else 0 if inner is None else at[inner],
        affine_run=at[runs[0]] if runs else 0,
        affine_lane=at[last],
        affine_size=math.prod(affine),
    )


def side_by_side(geometry: Geometry, width: int) -> Geometry:
    """Return the geometry as columns where stretches fit a vector of `width` and lie beside those of the next set."""
    share = geometry.length
    adjacent = geometry.inner_stride == share and geometry.affine_inner == share * geometry.affine_lane
    if geometry.columns or not adjacent or share > width or geometry.runs == 1 or geometry.affine_run:
        return geometry
    elements, block = geometry.inner * share, width // share * share
    return geometry._replace(
        columns=True,
        inner=math.ceil(elements / block),
        inner_stride=block,
        length=elements,
        affine_inner=block * geometry.affine_lane,
        share=share,
    )


def _kind(entry: tuple[tuple[bool, bool], int]) -> tuple[bool, bool]:
    return entry[0]
