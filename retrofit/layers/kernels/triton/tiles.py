"""A program's elements, tile by tile: which they are, loading and storing them, and the loop over
them, in which a kernel's formula is called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# What a launch's plan says in numbers, for which no kernel is compiled anew
NUMBERS = ["outer_stride", "inner", "inner_stride", "stride", "lanes", "runs", "share"]
NUMBERS += ["by_inner", "sets", "partials"]
# Makes a kernel of a function that goes over elements
kernel = triton.jit(do_not_specialize=NUMBERS)


class ProgramPlace(NamedTuple):
    """What a program works on: `tables.Entries` of its sets, `sums.Shared`, and its elements."""

    # offset of its first run
    base: Any
    # numbers of the lanes within their run, and whether they are there
    lane: Any
    held: Any
    # numbers of sets in tables, and whether they are there; both broadcast to a tile; and how many
    # sets tables have
    sets: Any
    valid: Any
    total: Any
    # first gamma of its sets
    parameter: Any
    # its runs, those that each program has of a set's, and the distance from run to run
    start: Any
    stop: Any
    share: Any
    runs: Any
    stride: Any
    lanes: Any
    # elements of a set: all, and those that a run has
    count: Any
    width: Any
    # programs that share a set
    splits: Any
    # number of the block of lanes that it leaves sums for
    block: Any


@triton.jit
def place_of(
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, total,
    TILE,
):  # fmt: skip
    """Return what this program works on."""
    lanes, stride = lanes * TILE.unit, stride * TILE.unit
    task = tl.program_id(0)
    outer = task
    # Within an outer step, columns have blocks of lanes, and stretches have sets
    if TILE.way != "rows":
        outer, inner = task // inner, task % inner
    base = outer.to(tl.int64) * (outer_stride * TILE.unit)
    if TILE.way == "stretches":
        base += inner.to(tl.int64) * (inner_stride * TILE.unit)
    lane = tl.arange(0, TILE.cols)[None, :]
    start = 0 if TILE.single else tl.program_id(1) * share
    stop = tl.minimum(start + share, runs)
    parameter = inner * by_inner
    if TILE.way == "rows":
        run = tl.arange(0, TILE.rows)[:, None]
        sets = task * TILE.rows + run
        stop = runs - task * TILE.rows
        valid = run < stop
        parameter = sets % by_inner if TILE.along == "sets" else task * 0
        count, width = lanes, lanes
    elif TILE.way == "columns":
        lane += inner * TILE.cols
        sets = (outer * lanes + lane) // TILE.merge
        valid = lane < lanes
        count, width = runs * TILE.merge, TILE.merge
        task = outer
    else:
        sets = tl.zeros([1, 1], tl.int32) + task
        valid = sets >= 0
        count, width = runs * lanes, lanes
    return ProgramPlace(
        base, lane, lane < lanes, sets, valid, total, parameter, start, stop, share, runs,
        stride, lanes, count, width, tl.num_programs(1), task,
    )  # fmt: skip


class Elements(NamedTuple):
    """A tile: where it starts, offsets from there, which elements there are, and the numbers of
    their gammas.
    """

    start: Any
    offset: Any
    mask: Any
    parameter: Any


@triton.jit
def elements_at(place, first_run, first_lane, TILE):
    """Return the tile that starts at a run and a lane."""
    run = first_run + tl.arange(0, TILE.rows)[:, None]
    start = place.base + first_run * place.stride.to(tl.int64) + first_lane
    offset = (run - first_run) * place.stride + place.lane
    if TILE.even:
        mask = zeros(TILE) == 0
    else:
        mask = (run < place.stop) & (place.lane + first_lane < place.lanes)
    parameter = place.parameter + (run if TILE.along == "runs" else first_lane + place.lane)
    return Elements(start, offset, mask, parameter)


@triton.jit
def zeros(TILE):
    """Return a tile of zeros, to which sums are added."""
    # Older Tritons list no plain numbers
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    # What is added to -0.0 stays as it is, so the compiler drops a sum of one tile; 0.0 + -0.0 is 0.0
    return tl.full([ROWS, COLS], -0.0, tl.float32)


@triton.jit
def zero_sums(COUNT, TILE):
    """Return as many tiles of zeros."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (zeros(TILE),)
    return sums


@triton.jit
def add(sums, values):
    """Add values to sums, as many as there are sums."""
    added = ()
    for k in tl.static_range(len(sums)):
        added = added + (sums[k] + values[k],)
    return added


@triton.jit
def load(P, tile):
    """Load a tile, 0 beyond the end of its sets."""
    return tl.load(P + tile.start + tile.offset, mask=tile.mask, other=0.0).to(tl.float32)


@triton.jit
def load_standard(X, tile, mean, rstd):
    """Load and standardize a tile; 0 beyond the end of its sets."""
    return (tl.where(tile.mask, load(X, tile), mean) - mean) * rstd


@triton.jit
def store(P, tile, value):
    """Store a tile, in whatever type."""
    tl.store(P + tile.start + tile.offset, value.to(P.dtype.element_ty), mask=tile.mask)


@triton.jit
def over(place, FORMULA, operands, sums, TILE, AFTER=None):
    """Go through a program's elements. `FORMULA` takes a tile, its operands and the sums up to
    there, and returns them with the tile's own; one that stores has none. `AFTER` takes the sums
    behind each tile's runs.
    """
    end = TILE.rows if TILE.single else place.stop
    lanes = TILE.cols if TILE.narrow else place.lanes
    for first_run in range(place.start, end, TILE.rows):
        for first_lane in range(0, lanes, TILE.cols):
            sums = FORMULA(elements_at(place, first_run, first_lane, TILE), operands, sums, TILE)
        if AFTER is not None:
            sums = AFTER(place, first_run, operands, sums, TILE)
    return sums
