"""How the Triton kernels share out the sets of a tensor to programs. It stands outside `triton`, for
it is asked where Triton is not installed, too.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from retrofit.layers.kernels.layout import Geometry, geometry_of

# Numbers of each set, in the table that the forward pass leaves for the backward pass (`norm_table`)
TABLE_ROWS = 14

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
    # whether a tile has all lanes of its runs; whether it has all elements of its sets
    narrow: bool
    single: bool
    # whether every tile is full
    even: bool
    # divides lanes and strides, which are given in units of it
    unit: int = 1


class LaunchPlan(NamedTuple):
    """A launch, but for its tensors."""

    tile: Tile
    warps: int
    # programs that have sets of their own, and programs that share each of them
    tasks: int
    splits: int
    sets: int
    # what kernels take of strides and sizes
    numbers: tuple[int, ...]
    # shape of the partial sums for one parameter: those of a gamma lie along the first two
    gradients: tuple[int, int, int]

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
        return _columns(geometry, along, processors)
    lanes = geometry.lane.size
    if along == "lanes" and lanes > LARGEST:
        return None
    in_rows = along == "sets" or (along == "lanes" and not geometry.inner.affine)
    if geometry.runs.size == 1 and lanes <= LARGEST and in_rows:
        return _rows(geometry, along)
    return _stretches(geometry, along, processors)


def _geometry(
    shape: tuple[int, ...], dims: tuple[int, ...], affine: tuple[int, ...]
) -> Geometry | None:
    """Return the geometry, with neighbouring lanes merged where a tile can do so."""
    geometry = geometry_of(shape, dims, affine, COLUMNS)
    if geometry is not None and geometry.merge & (geometry.merge - 1):
        # A stretch fits no vector of one element
        return geometry_of(shape, dims, affine, 1)
    return geometry


def _along(geometry: Geometry) -> str:
    if geometry.runs.affine:
        return "runs"
    if geometry.lane.affine and not geometry.columns:
        return "lanes"
    return "sets"


def _shares(runs: int, rows: int, tiles: int, tasks: int, processors: int) -> tuple[int, int]:
    """Return the runs that each program takes of a set, and how many programs share one; `tiles`
    hold the lanes of some `rows` runs.
    """
    splits = 1 if tasks >= processors else PROGRAMS * processors // tasks
    splits = max(1, min(splits, runs * tiles // (ROUNDS * rows)))
    share = math.ceil(math.ceil(runs / splits) / rows) * rows
    return share, math.ceil(runs / share)


def _columns(geometry: Geometry, along: str, processors: int) -> LaunchPlan:
    outer, runs, lane = geometry.outer, geometry.runs, geometry.lane
    cols = max(min(_power(lane.size), COLUMNS), geometry.merge)
    rows = min(_power(runs.size), max(1, TILE // cols))
    blocks = math.ceil(lane.size / cols)
    tasks = outer.size * blocks
    share, splits = _shares(runs.size, rows, 1, tasks, processors)
    even = lane.size % cols == 0 and runs.size % rows == 0
    tile = Tile("columns", rows, cols, geometry.merge, along, True, runs.size <= rows, even)
    strides = outer.stride, 0, runs.stride, lane.size
    sets = outer.size * lane.size // geometry.merge
    numbers = blocks, runs.size, share, 0, sets
    return _launch(tile, 4, tasks, splits, strides, numbers, geometry.affine_size)


def _rows(geometry: Geometry, along: str) -> LaunchPlan:
    lanes = geometry.lane.size
    sets = geometry.outer.size * geometry.inner.size
    cols = _power(lanes)
    rows = max(1, min(_power(sets), 2 * TILE // cols))
    tasks = math.ceil(sets / rows)
    even = lanes == cols and sets % rows == 0
    tile = Tile("rows", rows, cols, 1, along, True, True, even)
    # The number of a set's gamma repeats after so many
    repeat = geometry.inner.size if geometry.inner.affine else 1
    strides = rows * lanes, 0, lanes, lanes
    numbers = 1, sets, sets, repeat, sets
    warps = max(1, min(8, rows * cols // 512))
    return _launch(tile, warps, tasks, 1, strides, numbers, geometry.affine_size)


def _stretches(geometry: Geometry, along: str, processors: int) -> LaunchPlan:
    outer, inner, runs, lanes = geometry.outer, geometry.inner, geometry.runs, geometry.lane.size
    tasks = outer.size * inner.size
    whole = _power(lanes) * _power(runs.size) <= LARGEST
    cols = _power(lanes) if whole or along == "lanes" else min(_power(lanes), TILE)
    rows = _power(runs.size) if whole else max(1, TILE // cols)
    share, splits = _shares(runs.size, rows, math.ceil(lanes / cols), tasks, processors)
    narrow = lanes <= cols
    even = lanes % cols == 0 and runs.size % rows == 0
    tile = Tile("stretches", rows, cols, 1, along, narrow, narrow and runs.size <= rows, even)
    strides = outer.stride, inner.stride, runs.stride, lanes
    numbers = inner.size, runs.size, share, inner.affine, tasks
    warps = max(4, min(8, rows * cols // 512))
    return _launch(tile, warps, tasks, splits, strides, numbers, geometry.affine_size)


def _launch(
    tile: Tile,
    warps: int,
    tasks: int,
    splits: int,
    strides: tuple[int, int, int, int],
    numbers: tuple[int, int, int, int, int],
    affine: int,
) -> LaunchPlan:
    """Return the plan by strides of the outer loop, the inner one and the runs, and the lanes; and,
    in the kernels' order, by the other numbers.
    """
    unit = math.gcd(_VECTOR, *strides)
    outer, inner, run, lanes = (stride // unit for stride in strides)
    ordered = outer, numbers[0], inner, run, lanes, *numbers[1:]
    sets = numbers[-1]
    # What the programs of a share leave for a parameter; along the runs, all programs do
    left = {
        "runs": tasks * numbers[1],
        "lanes": tasks * strides[3],
        "sets": sets * tile.merge,
    }
    shared = 1 if tile.along == "runs" else splits
    gradients = shared, left[tile.along] // affine, affine
    return LaunchPlan(tile._replace(unit=unit), warps, tasks, splits, sets, ordered, gradients)
