"""Sums over sets: those of a program's tiles, and those of several programs that share sets, each
of which stores its part for the last one to add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from retrofit.layers.kernels.triton.arithmetic import reciprocal
from retrofit.layers.kernels.triton.tiles import elements_at, load, over, zero_sums
from retrofit.layers.kernels.triton_plan import TABLE_ROWS

# Parts that the last program loads at a time
_LOADS = tl.constexpr(16)
_TABLE_ROWS = tl.constexpr(TABLE_ROWS)


class Shared(NamedTuple):
    """`tables.Entries` of which several programs have stored parts, or means over a share of some
    runs.
    """

    sets: Any
    valid: Any
    total: Any
    # how many parts there are
    splits: Any
    # runs of a program, of a set, and elements of a run
    share: Any
    runs: Any
    width: Any


@triton.jit
def reduce_sets(tile, REDUCE, TILE):
    """Reduce to a number for each set, by their sum or the largest."""
    if TILE.way != "columns":
        tile = REDUCE(tile, 1, keep_dims=True)
    if TILE.way != "rows":
        tile = REDUCE(tile, 0, keep_dims=True)
    if TILE.merge > 1:
        COLS: tl.constexpr = TILE.cols
        MERGE: tl.constexpr = TILE.merge
        # The lanes of a set
        merged = REDUCE(tl.reshape(tile, [COLS // MERGE, MERGE]), 1, keep_dims=True)
        tile = tl.reshape(tl.broadcast_to(merged, [COLS // MERGE, MERGE]), [1, COLS])
    return tile


@triton.jit
def totals(sums, TILE):
    """Add up tiles to a number for each set."""
    numbers = ()
    for k in tl.static_range(len(sums)):
        numbers = numbers + (reduce_sets(sums[k], tl.sum, TILE),)
    return numbers


@triton.jit
def _add_deviations(tile, operands, sums, TILE):
    """Add up deviations from a number of each set, and their squares; keep the extremes."""
    X, pivot = operands
    total, squares, low, high = sums
    deviation = tl.where(tile.mask, load(X, tile), pivot) - pivot
    return (
        total + deviation,
        squares + deviation * deviation,
        tl.maximum(low, -deviation),
        tl.maximum(high, deviation),
    )


@triton.jit
def mean_and_squares(X, place, TILE):
    """Return mean, sum of squared deviations, and the extremes (-low, high), in one pass about the
    mean of the first tile.
    """
    # A set in rows is a run; in the other ways, it has some
    runs = 1 if TILE.way == "rows" else place.stop - place.start
    size = tl.minimum(runs, TILE.rows) * tl.minimum(place.width, TILE.cols)
    first_tile = load(X, elements_at(place, place.start, 0, TILE))
    # `shift` corrects the roundings of the pivot, and is small itself: no division has to be exact
    pivot = reduce_sets(first_tile, tl.sum, TILE) * reciprocal(size.to(tl.float32))
    sums = over(place, _add_deviations, (X, pivot), zero_sums(4, TILE), TILE)
    total, squares, low, high = sums
    count = (runs * place.width).to(tl.float32)
    shift = reduce_sets(total, tl.sum, TILE) * reciprocal(count)
    squares = reduce_sets(squares, tl.sum, TILE) - shift * shift * count
    mean = pivot + tl.where(shift == shift, shift, 0.0)
    squares = tl.where(squares < 0, 0.0, squares)
    low = reduce_sets(low, tl.max, TILE) - pivot
    return mean, squares, low, reduce_sets(high, tl.max, TILE) + pivot


# Programs that share sets


@triton.jit
def store_parts(Parts, place, values):
    """Store this program's part of numbers of each set."""
    for k in tl.static_range(len(values)):
        part = (k * place.splits + tl.program_id(1)) * place.total
        tl.store(Parts + part + place.sets, values[k], mask=place.valid)


@triton.jit
def is_last_program(Table, place):
    """Whether the other programs that share this one's sets have stored their parts, which programs
    count behind the table.
    """
    # All threads' parts are written before one thread counts the program
    tl.debug_barrier()
    counter = Table + _TABLE_ROWS * place.total + tl.program_id(0)
    last = tl.atomic_add(counter, 1.0) == place.splits - 1
    # For the next launch
    tl.store(counter, 0.0, mask=last)
    return last


@triton.jit
def _load_parts(Parts, K, first, shared, LOADS):
    """Load some programs' parts, which other processors have just written."""
    program = first + tl.arange(0, LOADS)[:, None]
    mask = (program < shared.splits) & shared.valid
    offset = (K * shared.splits + program) * shared.total + shared.sets
    return tl.load(Parts + offset, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def reduce_parts(Parts, K, REDUCE, shared, LOADS=_LOADS):
    """Add up all programs' parts, in their order, or return the largest."""
    part = _load_parts(Parts, K, 0, shared, LOADS)
    for first in range(LOADS, shared.splits, LOADS):
        next_part = _load_parts(Parts, K, first, shared, LOADS)
        part = tl.maximum(part, next_part) if REDUCE is tl.max else part + next_part
    return REDUCE(part, 0, keep_dims=True)


@triton.jit
def sum_parts(Parts, COUNT, shared, LOADS=_LOADS):
    """Add up all programs' parts of several numbers."""
    numbers = ()
    for k in tl.static_range(COUNT):
        numbers = numbers + (reduce_parts(Parts, k, tl.sum, shared, LOADS),)
    return numbers


@triton.jit
def merge_moments(Parts, shared, LOADS=_LOADS):
    """Merge means and sums of squared deviations (Chan et al. 1979)."""
    zero = _load_parts(Parts, 0, 0, shared, LOADS) * 0
    total = zero
    for first in range(0, shared.splits, LOADS):
        means = _load_parts(Parts, 0, first, shared, LOADS)
        total += means * (_runs_of_parts(first, shared, LOADS) / shared.runs)
    mean = tl.sum(total, 0, keep_dims=True)
    total = zero
    for first in range(0, shared.splits, LOADS):
        deviation = _load_parts(Parts, 0, first, shared, LOADS) - mean
        size = (_runs_of_parts(first, shared, LOADS) * shared.width).to(tl.float32)
        total += _load_parts(Parts, 1, first, shared, LOADS) + deviation * deviation * size
    return mean, tl.sum(total, 0, keep_dims=True)


@triton.jit
def _runs_of_parts(first, shared, LOADS):
    """Return how many runs some programs have."""
    program = first + tl.arange(0, LOADS)[:, None]
    return tl.minimum(tl.maximum(shared.runs - program * shared.share, 0), shared.share)
