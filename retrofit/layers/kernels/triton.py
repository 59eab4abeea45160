"""The formulas as Triton kernels: for CUDA, and for Triton's interpreter on the CPU
(TRITON_INTERPRET=1).

A tile has runs along its first axis and neighbouring elements, lanes, along its second. Sets lie in
one of three ways (`plan.py`):

- columns: a lane is a set, or some neighbouring lanes are, and its elements lie along the runs;
- stretches: a set is all lanes of its runs;
- rows: a set is one run, which fits a tile; a tile holds several sets.

Where sets are few and large, several programs share one. Each leaves partial sums, and the last of
them to finish adds them up, always in the same order: no result depends on which program comes
first. Tables hold a number a set, a row a field (`_MEAN` and so on). What stands in capitals and is
no pointer is a constant to Triton's compiler.
"""

# ruff: noqa: RET505 - Triton compiles what stands behind a branch by a constant, but not its
# `else`, and adds tuples, but does not unpack them
# mypy: disable-error-code="assignment, annotation-unchecked"

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrofit.layers.kernels import eager
from retrofit.layers.kernels.eager import DENOMINATOR, NUMERATOR, KernelOptions, Running
from retrofit.layers.kernels.layout import Layout
from retrofit.layers.kernels.plan import FIELDS, LaunchPlan, plan_of
from retrofit.layers.power_transform import LOG_STRETCH, MIN_CURVATURE, TINY

READS_STRENGTH = True
# Of Triton: those before lose constants and numbers in tuples
OLDEST = 3, 5
# A thread's, at most, so that two programs of 8 warps fit a processor
REGISTERS = 128

# Parts of others that the last program loads at a time
_LOADS = tl.constexpr(16)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

_LOG_STRETCH, _MIN_CURVATURE, _TINY = map(tl.constexpr, (LOG_STRETCH, MIN_CURVATURE, TINY))
_LN2 = tl.constexpr(0.6931471805599453)
# |p| below which expm1(p * log) / p is not taken as it stands, and |p * log| below which a series
# stands for it
_SMALL_POWER, _SMALL = tl.constexpr(0.5), tl.constexpr(0.2)

# Rows of the table that the forward pass leaves: the first four as in `eager.FIELDS`
_MEAN, _VAR, _RSTD, _STEP = map(tl.constexpr, range(4))
# Derivatives of the step by its moments and by v; the factors of the step and of the noise
_SLOPES, _STRENGTH, _AMOUNT = map(tl.constexpr, (4, 9, 10))
# Of a stage for a later one: the extremes, and the mean of what gets noise
_BOUNDS, _CENTRE = map(tl.constexpr, (11, 13))
# Then, of the backward pass: the factors of `_tendencies`, of 1 and of h in the gradient of x
_PROJECTION = tl.constexpr(11)
_FIELDS = tl.constexpr(FIELDS)

_NUMBERS = ["outer_stride", "inner", "inner_stride", "stride", "lanes", "runs", "share"]
_NUMBERS += ["by_inner", "sets", "entries"]


# Coefficients of polynomials, highest power first
_NUMERATOR, _DENOMINATOR = tl.constexpr(NUMERATOR), tl.constexpr(DENOMINATOR)
# expm1(u) / u, and its derivative
_GROWTH = tl.constexpr((1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0))
_SLOPE = tl.constexpr((1 / 144, 1 / 30, 1 / 8, 1 / 3, 1 / 2))


@triton.jit
def _polynomial(x, COEFFICIENTS):
    """Evaluate a polynomial, highest power first."""
    value = x * COEFFICIENTS[0] + COEFFICIENTS[1]
    for k in tl.static_range(2, len(COEFFICIENTS.value)):
        value = value * x + COEFFICIENTS[k]
    return value


@triton.jit
def _instruction(x, NAME):
    """Apply one instruction of a GPU."""
    return tl.inline_asm_elementwise(
        NAME + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _log2(x):
    """One instruction, with an absolute error of 2^-22 beside 1."""
    return tl.log2(x) if _INTERPRETED else _instruction(x, "lg2")


@triton.jit
def _exp2(x):
    """One instruction, with a relative error of 2^-22; 1 at 0."""
    return tl.exp2(x) if _INTERPRETED else _instruction(x, "ex2")


@triton.jit
def _reciprocal(x):
    """One instruction, with a relative error of 2^-23."""
    return 1 / x if _INTERPRETED else _instruction(x, "rcp")


@triton.jit
def _normal(position, Seed):
    """See `eager.normal`."""
    key = position.to(tl.uint32) + tl.load(Seed).to(tl.uint32, bitcast=True)
    key = (key ^ (key >> 17)) * 0xED5AD4BB
    key = ((key ^ (key >> 11)) + tl.load(Seed + 1).to(tl.uint32, bitcast=True)) * 0xAC4C1B51
    key = (key ^ (key >> 15)) * 0x31848BAB
    key = key ^ (key >> 14)
    whole = (key & 0x7FFFFFFF).to(tl.int32, bitcast=True).to(tl.float32)
    v = whole * (1 / 2147483648) + 1 / 4294967296
    w = -tl.log(v * (2 - v))
    z = (1 - v) * _polynomial(w, _NUMERATOR) / _polynomial(w, _DENOMINATOR)
    return tl.where(key >= 0x80000000, -z, z)


# The transform


@triton.jit
def _power(change):
    """Return what psi takes at a set's lambda = 1 + change, for its two signs: p = 1 + change and
    1 - change.

    expm1(p * l) = a * E + (E - 1) with E = exp((p - 1) * l), which is 1 at change 0, where psi is
    the identity to the bit. Where one p is near 0, it loses its digits: there, E = exp(p * l).

    These are exponents of E, by sign; sign / p; 1 where E = exp((p - 1) * l), else 0; and the
    |p * l| below which a series stands for expm1. Where no p is near 0, the first four will do. (A
    tuple without names: those of one within another are lost in older Tritons.)
    """
    up, down = 1 + change, 1 - change
    near = (tl.abs(up) < _SMALL_POWER) | (tl.abs(down) < _SMALL_POWER)
    by_up = 1 / tl.where(up == 0, 1e-20, up)
    by_down = -1 / tl.where(down == 0, 1e-20, down)
    usual, small = tl.where(near, 0.0, 1.0), tl.where(near, _SMALL, 0.0)
    up, down = tl.where(near, up, change), tl.where(near, down, -change)
    return up, down, by_up, by_down, usual, small


class _Psi(NamedTuple):
    """psi, and what its derivatives share."""

    y: Any
    a: Any
    log2: Any
    # log(1 + |h|), and with the sign of h
    log: Any
    signed: Any
    negative: Any
    # E, expm1(p * log) and sign / p
    grown: Any
    growth: Any
    inverse: Any
    # p * log, where E has that exponent
    u: Any


@triton.jit
def _psi(h, power):
    """Return psi(h; lambda) and what its derivatives share."""
    up, down, by_up, by_down = power[:4]
    a = tl.abs(h)
    negative = h < 0
    log2 = _log2(1 + a)
    log = log2 * _LN2
    exponent = tl.where(negative, down, up)
    inverse = tl.where(negative, by_down, by_up)
    grown = _exp2(exponent * log2)
    signed = tl.where(negative, -log, log)
    u = exponent * log
    if len(power) == 4:
        growth = a * grown + (grown - 1)
        y = growth * inverse
    else:
        growth = a * power[4] * grown + (grown - 1)
        y = tl.where(tl.abs(u) < power[5], signed * _polynomial(u, _GROWTH), growth * inverse)
    return _Psi(y, a, log2, log, signed, negative, grown, growth, inverse, u)


@triton.jit
def _tendencies(h, a, log, negative, inverse, by_m1, by_m2, by_m3, by_m45):
    """Return the set's size times d step / d h, but for the moment v
    (`power_transform.step_derivative`); `inverse` is 1 / (1 + |h|).
    """
    grown = log + a * log
    d = grown - a
    both = grown + d
    even = by_m45 * (log * (2 * both - log) - 2 * d) + by_m3 * log
    return by_m1 * inverse + by_m2 * (both - log) + tl.where(negative, -even, even)


@triton.jit
def _pulls(h, g, power, slopes):
    """Return y, g * d psi / d h, g * d psi / d lambda and `_tendencies`; `slopes` are the step's
    derivatives.
    """
    psi = _psi(h, power)
    inverse = _exp2(-psi.log2)
    by_lmbda = psi.inverse * (psi.signed * (psi.growth + 1) - psi.y)
    if len(power) == 4:
        direct = g * psi.grown
    else:
        direct = g * psi.grown * (inverse + power[4] * (1 - inverse))
        series = psi.log * psi.log * _polynomial(psi.u, _SLOPE)
        by_lmbda = tl.where(tl.abs(psi.u) < power[5], series, by_lmbda)
    moved = _tendencies(
        h, psi.a, psi.log, psi.negative, inverse, slopes[0], slopes[1], slopes[2], slopes[3]
    )
    return psi.y, direct, g * by_lmbda, moved


@triton.jit
def _moments(h):
    """Return what `power_transform.first_step` takes means of, but for v."""
    a = tl.abs(h)
    log = _log2(1 + a) * _LN2
    grown = log + a * log
    d = grown - a
    return tl.where(h < 0, -log, log), h * d, d, a * (grown * log - 2 * d) + d * d


@triton.jit
def _log1p(a):
    return tl.where(a < 1e-4, a, tl.log(1 + a))


@triton.jit
def _first_step(m1, m2, m3, m45, v, low, high):
    """Return the step of `power_transform.first_step`, within `step_bounds`, and its gradient."""
    v = tl.where(v < _TINY, _TINY, v)
    ratio = m2 / v
    slope = ratio - m1
    bend = (m45 - m3 * m3) / v
    raw = bend - 2 * ratio * ratio
    curvature = tl.where(raw < _MIN_CURVATURE, _MIN_CURVATURE, raw)
    step = -slope / curvature
    least = -_LOG_STRETCH / _log1p(tl.where(-low < _TINY, _TINY, -low))
    most = _LOG_STRETCH / _log1p(tl.where(high < _TINY, _TINY, high))
    free = (step >= least) & (step <= most)
    step = tl.where(step < least, least, tl.where(step > most, most, step))
    by_slope = tl.where(free, -1 / curvature, 0.0)
    by_bend = tl.where(free & (raw > _MIN_CURVATURE), slope / (curvature * curvature), 0.0)
    by_v = (-by_slope * ratio - by_bend * bend + 4 * by_bend * ratio * ratio) / v
    by_m2 = (by_slope - 4 * by_bend * ratio) / v
    return step, -by_slope, by_m2, -2 * by_bend * m3 / v, by_bend / v, by_v


# Where elements lie


class _Entries(NamedTuple):
    """Numbers in a table: which of a row, whether they are there, and how many a row has."""

    sets: Any
    valid: Any
    total: Any


class _Shared(NamedTuple):
    """`_Entries` of which several programs have left parts, or means over a share of some runs."""

    sets: Any
    valid: Any
    total: Any
    # how many parts there are
    splits: Any
    # runs of a set, of a program, and elements of a run
    share: Any
    runs: Any
    width: Any


class _Place(NamedTuple):
    """What a program works on; see `_Shared`."""

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
def _place(
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, total,
    TILE,
):  # fmt: skip
    """Return what this program works on."""
    lanes, stride = lanes * TILE.unit, stride * TILE.unit
    task = tl.program_id(0)
    outer = task
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
    return _Place(
        base, lane, lane < lanes, sets, valid, total, parameter, start, stop, share, runs,
        stride, lanes, count, width, tl.num_programs(1), task,
    )  # fmt: skip


class _Elements(NamedTuple):
    """A tile: where it starts, offsets from there, which elements there are, and the numbers of
    their gammas.
    """

    start: Any
    offset: Any
    there: Any
    parameter: Any


@triton.jit
def _elements(at, r, first, TILE):
    run = r + tl.arange(0, TILE.rows)[:, None]
    start = at.base + r * at.stride.to(tl.int64) + first
    offset = (run - r) * at.stride + at.lane
    if TILE.even:
        there = _zeros(TILE) == 0
    else:
        there = (run < at.stop) & (at.lane + first < at.lanes)
    parameter = at.parameter + (run if TILE.along == "runs" else first + at.lane)
    return _Elements(start, offset, there, parameter)


@triton.jit
def _load(P, tile):
    """Load a tile, 0 beyond the end of its sets."""
    return tl.load(P + tile.start + tile.offset, mask=tile.there, other=0.0).to(tl.float32)


@triton.jit
def _store(P, tile, value):
    tl.store(P + tile.start + tile.offset, value.to(P.dtype.element_ty), mask=tile.there)


@triton.jit
def _standard(X, tile, mean, rstd):
    """Load and standardize a tile; 0 beyond the end of its sets."""
    return (tl.where(tile.there, _load(X, tile), mean) - mean) * rstd


# The skeleton: a formula takes a tile, what it needs beside, and the sums up to there, and returns
# them with the tile's own. One that writes has none.


@triton.jit
def _over(at, FORMULA, given, sums, TILE, AFTER=None):
    """Go through a program's elements; `AFTER` takes the sums behind each tile's runs."""
    end = TILE.rows if TILE.single else at.stop
    lanes = TILE.cols if TILE.narrow else at.lanes
    for r in range(at.start, end, TILE.rows):
        for first in range(0, lanes, TILE.cols):
            sums = FORMULA(_elements(at, r, first, TILE), given, sums, TILE)
        if AFTER is not None:
            sums = AFTER(at, r, given, sums, TILE)
    return sums


@triton.jit
def _over_by_power(at, FORMULA, given, power, sums, TILE, AFTER=None):
    """Go through a program's elements with a power, where no p is near 0 without its series."""
    if TILE.single or tl.max(power[5]) > 0:
        sums = _over(at, FORMULA, given + (power,), sums, TILE, AFTER)
    else:
        sums = _over(at, FORMULA, given + (power[:4],), sums, TILE, AFTER)
    return sums


@triton.jit
def _number(P, place, mask, instead):
    """Load numbers in whatever type, `instead` where there are none."""
    if P is None:
        return place.to(tl.float32) * 0 + instead
    else:
        return tl.load(P + place, mask=mask, other=instead).to(tl.float32)


@triton.jit
def _zeros(TILE):
    # Older Tritons list no plain numbers
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def _of_sets(tile, REDUCE, TILE):
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
def _totals(sums, TILE):
    totals = ()
    for k in tl.static_range(len(sums)):
        totals = totals + (_of_sets(sums[k], tl.sum, TILE),)
    return totals


@triton.jit
def _keep(Table, FIELD, at, values):
    """Store numbers of each set, in rows of a table from `FIELD` on."""
    for k in tl.static_range(len(values)):
        tl.store(Table + (FIELD + k) * at.total + at.sets, values[k], mask=at.valid)


@triton.jit
def _row(Table, FIELD, at):
    return tl.load(Table + FIELD * at.total + at.sets, mask=at.valid, other=0.0)


@triton.jit
def _rows(Table, FIELD, COUNT, at):
    """Load numbers of each set."""
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (_row(Table, FIELD + k, at),)
    return rows


# Programs that share a set


@triton.jit
def _leave(Parts, at, values):
    for k in tl.static_range(len(values)):
        part = (k * at.splits + tl.program_id(1)) * at.total
        tl.store(Parts + part + at.sets, values[k], mask=at.valid)


@triton.jit
def _is_last(Table, at):
    """Whether the other programs that share this one's sets have left their parts, which programs
    count behind the table.
    """
    # All threads' parts are written before one thread counts the program
    tl.debug_barrier()
    counter = Table + _FIELDS * at.total + tl.program_id(0)
    last = tl.atomic_add(counter, 1.0) == at.splits - 1
    # For the next launch
    tl.store(counter, 0.0, mask=last)
    return last


@triton.jit
def _parts(Parts, K, first, at, LOADS):
    """Load some programs' parts, which other processors have just written."""
    share = first + tl.arange(0, LOADS)[:, None]
    there = (share < at.splits) & at.valid
    offset = (K * at.splits + share) * at.total + at.sets
    return tl.load(Parts + offset, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _collect(Parts, K, REDUCE, at, LOADS=_LOADS):
    """Add up all programs' parts, in their order, or return the largest."""
    part = _parts(Parts, K, 0, at, LOADS)
    for first in range(LOADS, at.splits, LOADS):
        more = _parts(Parts, K, first, at, LOADS)
        part = tl.maximum(part, more) if REDUCE is tl.max else part + more
    return REDUCE(part, 0, keep_dims=True)


@triton.jit
def _collected(Parts, COUNT, at, LOADS=_LOADS):
    totals = ()
    for k in tl.static_range(COUNT):
        totals = totals + (_collect(Parts, k, tl.sum, at, LOADS),)
    return totals


@triton.jit
def _merged(Parts, at, LOADS=_LOADS):
    """Merge means and sums of squared deviations (Chan et al. 1979)."""
    zero = _parts(Parts, 0, 0, at, LOADS) * 0
    total = zero
    for first in range(0, at.splits, LOADS):
        total += _parts(Parts, 0, first, at, LOADS) * (_runs_from(first, at, LOADS) / at.runs)
    mean = tl.sum(total, 0, keep_dims=True)
    total = zero
    for first in range(0, at.splits, LOADS):
        apart = _parts(Parts, 0, first, at, LOADS) - mean
        size = (_runs_from(first, at, LOADS) * at.width).to(tl.float32)
        total += _parts(Parts, 1, first, at, LOADS) + apart * apart * size
    return mean, tl.sum(total, 0, keep_dims=True)


@triton.jit
def _runs_from(first, at, LOADS):
    """How many runs some programs have."""
    share = first + tl.arange(0, LOADS)[:, None]
    return tl.minimum(tl.maximum(at.runs - share * at.share, 0), at.share)


# Mean and variance


@triton.jit
def _apart(tile, given, sums, TILE):
    """Add up deviations from a number of each set, and their squares; keep the extremes."""
    X, about = given
    total, power, low, high = sums
    apart = tl.where(tile.there, _load(X, tile), about) - about
    return total + apart, power + apart * apart, tl.maximum(low, -apart), tl.maximum(high, apart)


@triton.jit
def _mean_and_squares(X, at, TILE):
    """Return mean, sum of squared deviations, and the extremes (-low, high), in one pass about the
    mean of the first tile.
    """
    # A set in rows is a run; in the other ways, it has some
    runs = 1 if TILE.way == "rows" else at.stop - at.start
    first = tl.minimum(runs, TILE.rows) * tl.minimum(at.width, TILE.cols)
    about = _of_sets(_load(X, _elements(at, at.start, 0, TILE)), tl.sum, TILE) / first
    zero = _zeros(TILE)
    total, power, low, high = _over(at, _apart, (X, about), (zero, zero, zero, zero), TILE)
    count = (runs * at.width).to(tl.float32)
    shift = _of_sets(total, tl.sum, TILE) / count
    squares = _of_sets(power, tl.sum, TILE) - shift * shift * count
    mean = about + tl.where(shift == shift, shift, 0.0)
    squares = tl.where(squares < 0, 0.0, squares)
    return mean, squares, _of_sets(low, tl.max, TILE) - about, _of_sets(high, tl.max, TILE) + about


@triton.jit
def _standardization(mean, squares, low, high, at, eps):
    """Return mean, variance, 1 / std, and the standardized extremes."""
    var = squares / at.count.to(tl.float32)
    rstd = 1 / tl.sqrt(var + eps)
    return mean, var, rstd, -(low + mean) * rstd, (high - mean) * rstd


@triton.jit(do_not_specialize=_NUMBERS)
def _statistics(
    X, Table, Parts, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep mean and variance."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    _leave(Parts, at, _mean_and_squares(X, at, TILE))
    if _is_last(Table, at):
        mean, squares = _merged(Parts, at)
        low, high = _collect(Parts, 2, tl.max, at), _collect(Parts, 3, tl.max, at)
        mean, var, rstd, low, high = _standardization(mean, squares, low, high, at, eps)
        _keep(Table, _MEAN, at, (mean, var, rstd))
        _keep(Table, _BOUNDS, at, (low, high))


# The step of lambda, and the running statistics


@triton.jit
def _of_step(tile, given, sums, TILE):
    X, mean, rstd = given
    m1, m2, m3, m45 = _moments(_standard(X, tile, mean, rstd))
    return sums[0] + m1, sums[1] + m2, sums[2] + m3, sums[3] + m45


@triton.jit
def _sums_of_step(X, at, mean, rstd, TILE):
    zero = _zeros(TILE)
    return _totals(_over(at, _of_step, (X, mean, rstd), (zero, zero, zero, zero), TILE), TILE)


@triton.jit
def _keep_step(Table, at, moments, var, rstd, low, high, t):
    """Keep the step of each set, from sums over it, its gradient, and the factor t that it has;
    return the step.
    """
    count = at.count.to(tl.float32)
    m1, m2, m3, m45 = moments
    v = var * rstd * rstd
    step = _first_step(m1 / count, m2 / count, m3 / count, m45 / count, v, low, high)
    _keep(Table, _STEP, at, step + (t,))
    return step[0]


@triton.jit
def _follow(Mean, Var, Lambda, Momentum, momentum, at, mean, var, step):
    """Move the running statistics towards the batch's, its variance unbiased."""
    count = at.count.to(tl.float32)
    if Momentum is not None:
        momentum = 1 / tl.load(Momentum).to(tl.float32)
    _move(Mean, at, momentum, mean)
    _move(Var, at, momentum, var * (count / tl.maximum(count - 1, 1.0)))
    _move(Lambda, at, momentum, 1 + step)


@triton.jit
def _move(Running, at, momentum, value):
    if Running is not None:
        old = _number(Running, at.sets, at.valid, 0.0)
        new = old * (1 - momentum) + value * momentum
        tl.store(Running + at.sets, new.to(Running.dtype.element_ty), mask=at.valid)


@triton.jit
def _count_batch(Batches):
    if Batches is not None:
        first = tl.program_id(0) + tl.program_id(1) == 0
        tl.store(Batches, tl.load(Batches) + 1, mask=first)


@triton.jit(do_not_specialize=_NUMBERS)
def _estimate(
    X, Table, Parts, Code, Mean, Var, Lambda, Batches, Momentum, factor, momentum,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep the step of lambda, and move the running statistics."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    mean, var, rstd = _rows(Table, _MEAN, 3, at)
    _leave(Parts, at, _sums_of_step(X, at, mean, rstd, TILE))
    if _is_last(Table, at):
        t = tl.load(Code).to(tl.float32) * factor
        low, high = _rows(Table, _BOUNDS, 2, at)
        step = _keep_step(Table, at, _collected(Parts, 4, at), var, rstd, low, high, t)
        _follow(Mean, Var, Lambda, Momentum, momentum, at, mean, var, step)
    _count_batch(Batches)


# What the forward pass finds of a set, and the size of its noise: the mean distance from its mean


@triton.jit
def _transform(Table, at):
    """Return mean, 1 / std, the power, and the factor of the noise."""
    mean, _, rstd, step = _rows(Table, _MEAN, 4, at)
    strength, amount = _rows(Table, _STRENGTH, 2, at)
    return mean, rstd, _power(strength * step), amount


@triton.jit
def _of_centre(tile, given, sums, TILE):
    X, mean, rstd, power = given
    return (sums[0] + _psi(_standard(X, tile, mean, rstd), power).y,)


@triton.jit
def _of_spread(tile, given, sums, TILE):
    X, mean, rstd, power, centre = given
    apart = tl.abs(_psi(_standard(X, tile, mean, rstd), power).y - centre)
    return (sums[0] + tl.where(tile.there, apart, 0.0),)


@triton.jit(do_not_specialize=_NUMBERS)
def _noise(
    X, Table, Parts, Code, factor,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    FIELD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keep the mean of what the noise is added to, or the mean distance from it, as a factor."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    mean, rstd, power, _ = _transform(Table, at)
    zero = (_zeros(TILE),)
    if FIELD == _CENTRE:
        scale = 1.0
        sums = _over(at, _of_centre, (X, mean, rstd, power), zero, TILE)
    else:
        scale = tl.load(Code).to(tl.float32) * factor
        sums = _over(at, _of_spread, (X, mean, rstd, power, _row(Table, _CENTRE, at)), zero, TILE)
    _leave(Parts, at, _totals(sums, TILE))
    if _is_last(Table, at):
        _keep(Table, FIELD, at, (_collect(Parts, 0, tl.sum, at) / at.count * scale,))


# The result


@triton.jit
def _of_set(P, at, instead, TILE):
    """Load gammas that no element changes."""
    if P is None or TILE.along != "sets":
        return instead
    elif TILE.way == "columns":
        return _number(P, at.lane, at.held, 0.0)
    else:
        return _number(P, at.parameter + at.sets * 0, at.valid, 0.0)


@triton.jit
def _of_element(P, of_set, tile, TILE):
    """Load the gammas of a tile, where they are not its set's."""
    if P is None or TILE.along == "sets":
        return of_set
    else:
        return _number(P, tile.parameter, tile.there, 0.0)


@triton.jit
def _result(tile, given, sums, TILE):
    Out, X, Weight, Bias, Seed, gamma, beta, mean, rstd, amount, power = given
    y = _psi(_standard(X, tile, mean, rstd), power).y
    if Seed is not None:
        y += _normal(tile.start + tile.offset, Seed) * amount
    gamma, beta = _of_element(Weight, gamma, tile, TILE), _of_element(Bias, beta, tile, TILE)
    _store(Out, tile, y * gamma + beta)
    return sums


@triton.jit
def _write_result(Out, X, Weight, Bias, Seed, at, mean, rstd, power, amount, TILE):
    """Write psi, its noise, gamma and beta."""
    gamma, beta = _of_set(Weight, at, 1.0, TILE), _of_set(Bias, at, 0.0, TILE)
    given = Out, X, Weight, Bias, Seed, gamma, beta, mean, rstd, amount
    # A branch has to return something
    _over_by_power(at, _result, given, power, (at.runs,), TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _write(
    Out, X, Weight, Bias, Table, Seed,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the result by what is kept of its sets."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    mean, rstd, power, amount = _transform(Table, at)
    _write_result(Out, X, Weight, Bias, Seed, at, mean, rstd, power, amount, TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _forward(
    Out, X, Weight, Bias, Table, Code, Seed, Mean, Var, Lambda, Batches, Momentum,
    factor, of_noise, eps, momentum,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Do all of a set that a program has to itself."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    code = tl.load(Code).to(tl.float32)
    mean, squares, low, high = _mean_and_squares(X, at, TILE)
    mean, var, rstd, low, high = _standardization(mean, squares, low, high, at, eps)
    _keep(Table, _MEAN, at, (mean, var, rstd))
    moments = _sums_of_step(X, at, mean, rstd, TILE)
    step = _keep_step(Table, at, moments, var, rstd, low, high, code * factor)
    _follow(Mean, Var, Lambda, Momentum, momentum, at, mean, var, step)
    _count_batch(Batches)
    power = _power(code * factor * step)
    amount = 0.0
    if Seed is not None:
        zero = (_zeros(TILE),)
        sums = _over(at, _of_centre, (X, mean, rstd, power), zero, TILE)
        centre = _totals(sums, TILE)[0] / at.count
        sums = _over(at, _of_spread, (X, mean, rstd, power, centre), zero, TILE)
        spread = _totals(sums, TILE)[0]
        amount = spread / at.count * (code * of_noise)
        _keep(Table, _AMOUNT, at, (amount,))
    _write_result(Out, X, Weight, Bias, Seed, at, mean, rstd, power, amount, TILE)


# Its gradient


@triton.jit
def _of_pulls(tile, given, sums, TILE):
    """Add up what `eager.pulled_back` takes means of, and the gradients of gamma and beta."""
    _, _, X, Grad, Weight, Seed, gamma, mean, rstd, slopes, amount, power = given
    to_lmbda, direct, direct_h, moved, moved_h, to_weight, to_bias = sums
    grad = _load(Grad, tile)
    h = _standard(X, tile, mean, rstd)
    g = grad * _of_element(Weight, gamma, tile, TILE)
    y, slope, by_lmbda, tendency = _pulls(h, g, power, slopes)
    tendency = tl.where(tile.there, tendency, 0.0)
    if Seed is not None:
        y += _normal(tile.start + tile.offset, Seed) * amount
    return (
        to_lmbda + by_lmbda, direct + slope, direct_h + slope * h, moved + tendency,
        moved_h + tendency * h, to_weight + grad * y, to_bias + grad,
    )  # fmt: skip


@triton.jit
def _leave_affine_of_runs(at, r, given, sums, TILE):
    """Leave sums over a program's lanes for gammas that change along the runs."""
    if TILE.along == "runs":
        run = r + tl.arange(0, TILE.rows)
        entry = given[0] + tl.program_id(0) * at.runs + run
        for k in tl.static_range(2):
            tl.store(entry + k * given[1], tl.sum(sums[5 + k], 1), mask=run < at.stop)
        sums = sums[:5] + (_zeros(TILE), _zeros(TILE))
    return sums


@triton.jit
def _leave_affine(OfAffine, entries, at, sums, TILE):
    """Leave two sums over a program's elements for each gamma: by lane, or by set."""
    part = tl.program_id(1) * (entries // at.splits)
    for k in tl.static_range(2):
        entry = OfAffine + k * entries + part
        if TILE.way == "columns" or TILE.along == "lanes":
            of_lanes = tl.sum(sums[k], 0, keep_dims=True)
            tl.store(entry + at.block * at.lanes + at.lane, of_lanes, mask=at.held)
        else:
            tl.store(entry + at.sets, _of_sets(sums[k], tl.sum, TILE), mask=at.valid)


@triton.jit
def _pulled(X, Grad, Weight, Table, OfAffine, Seed, at, entries, TILE):
    """Return a program's sums of what `eager.pulled_back` takes means of, and leave those for gamma
    and beta.
    """
    mean, rstd, power, amount = _transform(Table, at)
    slopes, gamma = _rows(Table, _SLOPES, 4, at), _of_set(Weight, at, 1.0, TILE)
    given = OfAffine, entries, X, Grad, Weight, Seed, gamma, mean, rstd, slopes, amount
    zero = _zeros(TILE)
    zeros = zero, zero, zero, zero, zero, zero, zero
    sums = _over_by_power(at, _of_pulls, given, power, zeros, TILE, _leave_affine_of_runs)
    if TILE.along != "runs":
        _leave_affine(OfAffine, entries, at, sums[5:], TILE)
    return _totals(sums[:5], TILE)


@triton.jit
def _projection(sums, Table, at, eps):
    """Return the factors of `_tendencies`, of 1 and of h in the gradient of x, times 1 / std.

    The step depends on v = var / (var + eps) too, N * d v / d h = 2 * h; what of it the projections
    leave is 2 * h * (1 - v).
    """
    to_lmbda, direct, direct_h, moved, moved_h = sums
    count = at.count.to(tl.float32)
    rstd, by_v = _row(Table, _RSTD, at), _row(Table, _SLOPES + 4, at)
    pull = _row(Table, _STRENGTH, at) * to_lmbda / count
    tilt = (direct_h + pull * moved_h) / count - 2 * pull * by_v * (eps * rstd * rstd)
    return rstd * pull, rstd * (direct + pull * moved) / count, rstd * tilt


@triton.jit
def _gradient_of_x(tile, given, sums, TILE):
    GradX, X, Grad, Weight, gamma, mean, rstd, slopes, power, pull, offset, tilt = given
    h = _standard(X, tile, mean, rstd)
    g = _load(Grad, tile) * _of_element(Weight, gamma, tile, TILE)
    _, slope, _, tendency = _pulls(h, g, power, slopes)
    _store(GradX, tile, slope * rstd + pull * tendency - offset - h * tilt)
    return sums


@triton.jit
def _write_gradient(GradX, X, Grad, Weight, Table, at, projection, TILE):
    mean, rstd, power, _ = _transform(Table, at)
    slopes, gamma = _rows(Table, _SLOPES, 4, at), _of_set(Weight, at, 1.0, TILE)
    given = GradX, X, Grad, Weight, gamma, mean, rstd, slopes, power
    _over(at, _gradient_of_x, given + projection, (), TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _pull(
    X, Grad, Weight, Table, Parts, OfAffine, Seed, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, entries,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep the sums that the gradient of x takes. `OfAffine` receives sums of grad * y and of grad,
    `entries` each.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    _leave(Parts, at, _pulled(X, Grad, Weight, Table, OfAffine, Seed, at, entries, TILE))
    if _is_last(Table, at):
        projection = _projection(_collected(Parts, 5, at), Table, at, eps)
        _keep(Table, _PROJECTION, at, projection)


@triton.jit(do_not_specialize=_NUMBERS)
def _gradient(
    GradX, X, Grad, Weight, Table,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x by what `_pull` kept."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    _write_gradient(GradX, X, Grad, Weight, Table, at, _rows(Table, _PROJECTION, 3, at), TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _backward(
    GradX, X, Grad, Weight, Table, OfAffine, Seed, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, entries,
    TILE: tl.constexpr,
):  # fmt: skip
    """Do all of a set that a program has to itself."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    sums = _pulled(X, Grad, Weight, Table, OfAffine, Seed, at, entries, TILE)
    _write_gradient(GradX, X, Grad, Weight, Table, at, _projection(sums, Table, at, eps), TILE)


# By constants


@triton.jit(do_not_specialize=_NUMBERS)
def _apply(
    Out, X, Constants,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    mean, rstd, change, gamma, beta = _rows(Constants, 0, 5, at)
    given = Out, X, None, None, None, gamma, beta, mean, rstd, 0.0, _power(change)
    _over(at, _result, given, (), TILE)


# From Python


def fault() -> str | None:
    """Say why this Triton cannot compile the kernels, or return None where it can."""
    major, minor = triton.__version__.split(".")[:2]
    if (int(major), int(minor)) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return f"triton {triton.__version__} is older than {needed}, which the kernels need"
    return None


@cache
def processors(device: torch.device) -> int:
    """Return how many programs at least keep a device busy."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_for(x: Tensor, layout: Layout) -> LaunchPlan:
    """Return how kernels go about a tensor that they can go about."""
    plan = plan_of(layout.shape, layout.dims, layout.affine, processors(x.device))
    assert plan is not None
    return plan


def launch_options(kernel: Any, plan: LaunchPlan) -> dict[str, int]:
    """Return what a kernel is compiled with. The backward pass takes twice the registers, and more
    where the compiler unrolls its loops.
    """
    if kernel in (_pull, _gradient, _backward):
        return {"num_warps": min(8, 2 * plan.warps), "maxnreg": REGISTERS}
    return {"num_warps": plan.warps}


def launch(kernel: Any, plan: LaunchPlan, *arguments: Any) -> None:
    """Launch a kernel; tests replace this."""
    kernel[plan.grid](*arguments, plan.tile, **launch_options(kernel, plan))


def launch_on(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Launch a kernel that goes over no tensor of elements."""
    kernel[grid](*arguments)


def room(x: Tensor, *shape: int) -> Tensor:
    """Return room for numbers beside a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def forward(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions
) -> Tensor:
    """Fill `out`, and move the running statistics; return a table of `FIELDS` numbers a set, and a
    number more, by which programs that share sets count themselves.

    Tensors lie in memory in the order of the layout, whatever their shapes.
    """
    plan = plan_for(x, options.layout)
    running, momentum = _running(options.running)
    code, unit = options.strength
    seed, eps, numbers = options.seed, options.eps, plan.numbers
    factor = unit * options.alpha
    of_noise = unit * options.noise
    size = (FIELDS + 1) * plan.sets
    if plan.splits == 1:
        table = room(x, size)
        tensors = out, x, weight, bias, table, code, seed, *running
        launch(_forward, plan, *tensors, factor, of_noise, eps, momentum, *numbers)
        return table
    table = torch.zeros(size, dtype=torch.float32, device=x.device)
    shared = x, table, room(x, 4, plan.splits, plan.sets)
    launch(_statistics, plan, *shared, eps, *numbers)
    launch(_estimate, plan, *shared, code, *running, factor, momentum, *numbers)
    if seed is not None:
        launch(_noise, plan, *shared, code, of_noise, *numbers, _CENTRE)
        launch(_noise, plan, *shared, code, of_noise, *numbers, _AMOUNT)
    launch(_write, plan, out, x, weight, bias, table, seed, *numbers)
    return table


def _running(running: Running | None) -> tuple[list[Tensor | None], float]:
    """Return the running mean, variance and lambda, what counts batches, what the momentum is one
    over, and the momentum.
    """
    if running is None:
        return [None] * 5, 0.0
    batches, momentum = running.tracked, running.momentum
    average = None
    if batches is not None and momentum is None:
        average = batches.add_(1)
        batches = None
    return [running.mean, running.var, running.lmbda, batches, average], momentum or 0.0


def backward(
    grad_x: Tensor,
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    table: Tensor,
    options: KernelOptions,
) -> Tensor:
    """See `eager.backward`; `table` is `forward`'s, and tensors lie in memory as there."""
    plan = plan_for(x, options.layout)
    of_affine = room(x, 2, *plan.gradients)
    entries = of_affine.numel() // 2
    tensors = x, grad, weight, table
    beside = of_affine, options.seed, options.eps, *plan.numbers, entries
    if plan.splits == 1:
        launch(_backward, plan, grad_x, *tensors, *beside)
    else:
        launch(_pull, plan, *tensors, room(x, 5, plan.splits, plan.sets), *beside)
        launch(_gradient, plan, grad_x, *tensors, *plan.numbers)
    sums = of_affine.sum((1, 2))
    # Of a parameter that several sets have: all of them
    if sums.numel() != 2 * math.prod(options.layout.affine):
        sums = sums.view(2, -1).sum(1)
    return sums.view(2, *options.layout.affine)


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """See `eager.apply`."""
    plan = plan_of(tuple(x.shape), dims, tuple(constants.shape[1:]), processors(x.device))
    if plan is None:
        eager.apply(out, x, dims, constants)
    else:
        launch(_apply, plan, out, x, constants, *plan.numbers)
