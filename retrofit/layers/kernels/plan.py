"""How the Triton kernels share out the sets of a tensor to programs."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

from retrofit.layers.kernels.layout import Geometry, geometry_of

# Numbers of each set, in the table that the forward pass leaves for the backward pass
FIELDS = 14

# Elements of a tile, at least; of a set that is held as a whole, at most
TILE = 1024
LARGEST = 4096
# Lanes of a tile of columns: 128 bytes of a half type
COLUMNS = 64
# Programs a processor that share sets, and tiles that each of them goes through at least
PROGRAMS = 4
ROUNDS = 4
# Elements that a load of 128 bits has, in a half type
_VECTOR = 8


class Tile(NamedTuple):
    """What a kernel is compiled for."""

    # columns, stretches or rows
    way: str
    # a tile's runs and lanes
    rows: int
    cols: int
    # neighbouring lanes that make up a set of columns
    merge: int
    # what gamma and beta change along: sets, runs or lanes
    along: str
    # divides lanes and strides, which are given in units of it
    unit: int
    # whether a tile has all lanes of its runs; whether it has all elements of its sets
    narrow: bool
    single: bool
    # whether every tile is full
    even: bool


class LaunchPlan(NamedTuple):
    """A launch, but for its tensors."""

    tile: Tile
    warps: int
    # programs that have sets of their own, and programs that share each of them
    tasks: int
    splits: int
    sets: int
    # shape of one number a set
    kept: tuple[int, ...]
    # what kernels take of strides and sizes
    numbers: tuple[int, ...]
    # shape of the partial sums for one parameter, and its dimensions that are summed
    gradients: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int]:
        return self.tasks, self.splits

    @property
    def shares(self) -> tuple[int, int, int]:
        """Runs of a set, those that a program takes of it, and elements of a set in a run."""
        lanes, runs, share = self.numbers[4:7]
        if self.tile.way == "rows":
            return 1, 1, lanes * self.tile.unit
        width = self.tile.merge if self.tile.way == "columns" else lanes * self.tile.unit
        return runs, share, width


def _power(number: int) -> int:
    """Return the smallest power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


@lru_cache(maxsize=1024)
def plan_of(
    shape: tuple[int, ...], dims: tuple[int, ...], affine: tuple[int, ...], processors: int
) -> LaunchPlan | None:
    """Return the plan for a contiguous tensor with sets over `dims` and affine parameters of a
    shape that broadcasts to it; None where sets lie in another way than kernels know.
    """
    geometry = _geometry(shape, dims, affine)
    if geometry is None or (geometry.runs.affine and geometry.lane.affine):
        return None
    along = _along(geometry)
    if geometry.columns:
        return None if along == "lanes" else _columns(shape, dims, geometry, along, processors)
    lanes = geometry.lane.size
    if along == "lanes" and lanes > LARGEST:
        return None
    in_rows = along == "sets" or (along == "lanes" and not geometry.inner.affine)
    if geometry.runs.size == 1 and lanes <= LARGEST and in_rows:
        return _rows(shape, dims, geometry, along)
    return _stretches(shape, dims, geometry, along, processors)


def _geometry(
    shape: tuple[int, ...], dims: tuple[int, ...], affine: tuple[int, ...]
) -> Geometry | None:
    """Return the geometry, with neighbouring lanes merged where a tile can do so."""
    geometry = geometry_of(shape, dims, affine, COLUMNS, True)
    if geometry is not None and geometry.share & (geometry.share - 1):
        return geometry_of(shape, dims, affine, COLUMNS)
    return geometry


def _along(geometry: Geometry) -> str:
    if geometry.runs.affine:
        return "runs"
    if geometry.lane.affine and not geometry.columns:
        return "lanes"
    return "sets"


def _kept(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in dims else n for d, n in enumerate(shape))


def _shares(runs: int, rows: int, tiles: int, tasks: int, processors: int) -> tuple[int, int]:
    """Return the runs that each program takes of a set, and how many programs share one; `tiles`
    hold the lanes of some `rows` runs.
    """
    splits = 1 if tasks >= processors else PROGRAMS * processors // tasks
    splits = max(1, min(splits, runs * tiles // (ROUNDS * rows)))
    share = math.ceil(math.ceil(runs / splits) / rows) * rows
    return share, math.ceil(runs / share)


def _columns(
    shape: tuple[int, ...], dims: tuple[int, ...], geometry: Geometry, along: str, processors: int
) -> LaunchPlan:
    lanes, runs = geometry.lane.size, geometry.runs.size
    outer, merge = geometry.outer.size, geometry.share
    cols = max(min(_power(lanes), COLUMNS), merge)
    rows = max(1, TILE // cols)
    blocks = math.ceil(lanes / cols)
    tasks = outer * blocks
    share, splits = _shares(runs, rows, 1, tasks, processors)
    unit = math.gcd(_VECTOR, lanes, geometry.runs.stride, geometry.outer.stride)
    even = lanes % cols == 0 and runs % rows == 0
    tile = Tile("columns", rows, cols, merge, along, unit, True, runs <= rows, even)
    stride = geometry.runs.stride // unit
    numbers = geometry.outer.stride // unit, blocks, 0, stride, lanes // unit, runs, share, 0
    gradients: Any = (tasks, runs) if along == "runs" else (outer * splits, lanes)
    sets = outer * lanes // merge
    kept = _kept(shape, dims)
    return LaunchPlan(tile, 4, tasks, splits, sets, kept, (*numbers, sets), gradients, (1,))


def _rows(
    shape: tuple[int, ...], dims: tuple[int, ...], geometry: Geometry, along: str
) -> LaunchPlan:
    lanes = geometry.lane.size
    sets = geometry.outer.size * geometry.inner.size
    cols = _power(lanes)
    rows = max(1, min(_power(sets), 2 * TILE // cols))
    tasks = math.ceil(sets / rows)
    unit = math.gcd(_VECTOR, lanes)
    even = lanes == cols and sets % rows == 0
    tile = Tile("rows", rows, cols, 1, along, unit, True, True, even)
    # The number of a set's gamma, which repeats with `inner`
    inner = geometry.inner.size if geometry.inner.affine else 1
    numbers = 0, inner, 0, lanes // unit, lanes // unit, sets, sets, 0
    gradients = (sets // inner, inner) if along == "sets" else (tasks, lanes)
    warps = max(1, min(8, rows * cols // 512))
    kept = _kept(shape, dims)
    return LaunchPlan(tile, warps, tasks, 1, sets, kept, (*numbers, sets), gradients, (1,))


def _stretches(
    shape: tuple[int, ...], dims: tuple[int, ...], geometry: Geometry, along: str, processors: int
) -> LaunchPlan:
    lanes, runs = geometry.lane.size, geometry.runs.size
    tasks = geometry.outer.size * geometry.inner.size
    whole = _power(lanes) * _power(runs) <= LARGEST
    cols = _power(lanes) if whole or along == "lanes" else min(_power(lanes), TILE)
    rows = _power(runs) if whole else max(1, TILE // cols)
    tiles = math.ceil(lanes / cols)
    share, splits = _shares(runs, rows, tiles, tasks, processors)
    strides = geometry.runs.stride, geometry.inner.stride, geometry.outer.stride
    unit = math.gcd(_VECTOR, lanes, *strides)
    narrow, even = lanes <= cols, lanes % cols == 0 and runs % rows == 0
    tile = Tile("stretches", rows, cols, 1, along, unit, narrow, narrow and runs <= rows, even)
    outer_stride, inner_stride = geometry.outer.stride // unit, geometry.inner.stride // unit
    stride, inner = geometry.runs.stride // unit, geometry.inner.size
    places = outer_stride, inner, inner_stride, stride
    numbers = *places, lanes // unit, runs, share, geometry.inner.affine
    gradients = {
        "runs": (geometry.outer.size, inner * runs),
        "lanes": (geometry.outer.size, inner, splits, lanes),
        "sets": (geometry.outer.size, inner, splits),
    }[along]
    summed = (1,) if along == "runs" else (1, 3)
    warps = max(4, min(8, rows * cols // 512))
    kept = _kept(shape, dims)
    return LaunchPlan(tile, warps, tasks, splits, tasks, kept, (*numbers, tasks), gradients, summed)
