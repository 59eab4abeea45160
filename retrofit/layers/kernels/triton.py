"""The formulas as Triton kernels: for CUDA, and for Triton's interpreter on the CPU
(TRITON_INTERPRET=1).

A tile has runs along its first axis and neighbouring elements, lanes, along its second. Sets lie in
one of three ways (`plan.py`):

- columns: a lane is a set, or some neighbouring lanes are, and its elements lie along the runs;
- stretches: a set is all lanes of its runs;
- rows: a set is one run, which fits a tile; a tile holds several sets.

Where sets are few and large, several programs share one. Each leaves partial sums, and the last of
them to finish adds them up, always in the same order: no result depends on which program comes
first. Tables hold a number a set, a row a field (`_MEAN` and so on).
"""

# ruff: noqa: RET505 - Triton compiles what stands behind a branch by a constant, but not its
# `else`, and adds tuples, but does not unpack them
# mypy: disable-error-code="assignment"

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

# Partial sums that the last program adds up at a time
_SHARES = tl.constexpr(16)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

_LOG_STRETCH, _MIN_CURVATURE, _TINY = map(tl.constexpr, (LOG_STRETCH, MIN_CURVATURE, TINY))
_LN2 = tl.constexpr(0.6931471805599453)
# |p| below which expm1(p * log) / p is not taken as it stands, and |p * log| below which a series
# stands for it
_SMALL_POWER, _SMALL = tl.constexpr(0.5), tl.constexpr(0.2)

# Rows of the table that the forward pass leaves: the first four as in `eager.FIELDS`
_MEAN, _VAR, _RSTD, _STEP = map(tl.constexpr, range(4))
# Derivatives of the step by its moments and by v; t, and the noise's scale
_SLOPES, _T, _SPREAD = map(tl.constexpr, (4, 9, 10))
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
def _polynomial(x, COEFFICIENTS: tl.constexpr):
    """Evaluate a polynomial, highest power first."""
    value = x * COEFFICIENTS[0] + COEFFICIENTS[1]
    for k in tl.static_range(2, len(COEFFICIENTS.value)):
        value = value * x + COEFFICIENTS[k]
    return value


@triton.jit
def _log2(x):
    """One instruction, with an absolute error of 2^-22 beside 1."""
    if _INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _exp2(x):
    """One instruction, with a relative error of 2^-22; 1 at 0."""
    if _INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _reciprocal(x):
    """One instruction, with a relative error of 2^-23."""
    if _INTERPRETED:
        return 1 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


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


class _Place(NamedTuple):
    """What a program works on."""

    # offset of its first run
    base: Any
    # numbers of the lanes within their run, and whether they are there
    lane: Any
    held: Any
    # numbers of sets in tables, and whether they are there; both broadcast to a tile
    sets: Any
    valid: Any
    # first gamma of its sets
    parameter: Any
    # its runs, and the distance from run to run
    start: Any
    stop: Any
    stride: Any
    lanes: Any
    # elements of a set: all, and those that a run has
    count: Any
    width: Any
    # number of the block of runs that its sets lie in
    outer: Any


@triton.jit
def _in_rows(inner, lanes, runs, TILE: tl.constexpr):
    task = tl.program_id(0)
    run = tl.arange(0, TILE.rows)[:, None]
    lane = tl.arange(0, TILE.cols)[None, :]
    stop = runs - task * TILE.rows
    sets = task * TILE.rows + run
    base = task.to(tl.int64) * TILE.rows * lanes
    parameter = sets % inner if TILE.along == "sets" else task * 0
    return _Place(
        base, lane, lane < lanes, sets, run < stop, parameter, task * 0, stop, lanes, lanes, lanes,
        lanes, task,
    )  # fmt: skip


@triton.jit
def _in_columns(outer_stride, inner, stride, lanes, runs, share, TILE: tl.constexpr):
    task = tl.program_id(0)
    outer = task // inner
    base = outer.to(tl.int64) * outer_stride
    lane = task % inner * TILE.cols + tl.arange(0, TILE.cols)[None, :]
    held = lane < lanes
    sets = (outer * lanes + lane) // TILE.merge
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, runs)
    return _Place(
        base, lane, held, sets, held, task * 0, start, stop, stride, lanes, runs * TILE.merge,
        TILE.merge, outer,
    )  # fmt: skip


@triton.jit
def _in_stretches(
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE: tl.constexpr
):
    task = tl.program_id(0)
    outer, place = task // inner, task % inner
    base = outer.to(tl.int64) * outer_stride + place.to(tl.int64) * inner_stride
    lane = tl.arange(0, TILE.cols)[None, :]
    sets = tl.zeros([1, 1], tl.int32) + task
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, runs)
    return _Place(
        base, lane, lane < lanes, sets, sets >= 0, place * by_inner, start, stop, stride, lanes,
        runs * lanes, lanes, outer,
    )  # fmt: skip


@triton.jit
def _place(
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE: tl.constexpr
):
    """Return what this program works on."""
    outer_stride, inner_stride = outer_stride * TILE.unit, inner_stride * TILE.unit
    lanes, stride = lanes * TILE.unit, stride * TILE.unit
    if TILE.way == "rows":
        return _in_rows(inner, lanes, runs, TILE)
    elif TILE.way == "columns":
        return _in_columns(outer_stride, inner, stride, lanes, runs, share, TILE)
    else:
        return _in_stretches(
            outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE
        )


@triton.jit
def _elements(at, r, first, TILE: tl.constexpr):
    """Return of a tile: where it starts, offsets from there, which elements there are, and the
    numbers of its gammas.
    """
    run = r + tl.arange(0, TILE.rows)[:, None]
    start = at.base + r * at.stride.to(tl.int64) + first
    offset = (run - r) * at.stride + at.lane
    mask = (run < at.stop) & (at.lane + first < at.lanes)
    parameter = at.parameter + (run if TILE.along == "runs" else first + at.lane)
    return start, offset, mask, parameter


@triton.jit
def _load(P, tile, TILE: tl.constexpr):
    """Load a tile, 0 beyond the end of its sets."""
    if TILE.even:
        return tl.load(P + tile[0] + tile[1]).to(tl.float32)
    else:
        return tl.load(P + tile[0] + tile[1], mask=tile[2], other=0.0).to(tl.float32)


@triton.jit
def _store(P, tile, value, TILE: tl.constexpr):
    value = value.to(P.dtype.element_ty)
    if TILE.even:
        tl.store(P + tile[0] + tile[1], value)
    else:
        tl.store(P + tile[0] + tile[1], value, mask=tile[2])


@triton.jit
def _kept(value, tile, instead, TILE: tl.constexpr):
    return value if TILE.even else tl.where(tile[2], value, instead)


@triton.jit
def _standard(X, tile, mean, rstd, TILE: tl.constexpr):
    """Load and standardize a tile; 0 beyond the end of its sets."""
    return (_kept(_load(X, tile, TILE), tile, mean, TILE) - mean) * rstd


# The skeleton: a formula takes a tile, what it needs beside, and the sums up to there, and returns
# them with the tile's own. One that writes has none.


@triton.jit
def _over(at, FORMULA: tl.constexpr, given, sums, TILE: tl.constexpr):
    """Go through a program's elements."""
    begin, end = (0, TILE.rows) if TILE.single else (at.start, at.stop)
    for r in range(begin, end, TILE.rows):
        sums = _over_lanes(at, r, FORMULA, given, sums, TILE)
    return sums


@triton.jit
def _over_lanes(at, r, FORMULA: tl.constexpr, given, sums, TILE: tl.constexpr):
    lanes = TILE.cols if TILE.narrow else at.lanes
    for first in range(0, lanes, TILE.cols):
        sums = FORMULA(_elements(at, r, first, TILE), given, sums, TILE)
    return sums


@triton.jit
def _over_by_power(
    at, OVER: tl.constexpr, FORMULA: tl.constexpr, given, power, sums, TILE: tl.constexpr
):
    """Go through a program's elements with a power, where no p is near 0 without its series."""
    # Apart, for the first is decided when this is compiled
    if TILE.single:  # noqa: SIM114
        sums = OVER(at, FORMULA, given + (power,), sums, TILE)
    elif tl.max(power[5]) > 0:
        sums = OVER(at, FORMULA, given + (power,), sums, TILE)
    else:
        sums = OVER(at, FORMULA, given + (power[:4],), sums, TILE)
    return sums


@triton.jit
def _number(P, place, mask, instead):
    """Load numbers in whatever type, `instead` where there are none."""
    if P is None:
        return place.to(tl.float32) * 0 + instead
    else:
        return tl.load(P + place, mask=mask, other=instead).to(tl.float32)


@triton.jit
def _zeros(TILE: tl.constexpr):
    # Older Tritons list no plain numbers
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def _of_lanes(lanes, LARGEST: tl.constexpr, TILE: tl.constexpr):
    """Sum over the lanes of each set of columns, or return the largest."""
    if TILE.merge == 1:
        return lanes
    else:
        COLS: tl.constexpr = TILE.cols
        MERGE: tl.constexpr = TILE.merge
        merged = tl.reshape(lanes, [COLS // MERGE, MERGE])
        of_sets = tl.max(merged, 1) if LARGEST else tl.sum(merged, 1)
        wide = tl.broadcast_to(of_sets[:, None], [COLS // MERGE, MERGE])
        return tl.reshape(wide, [1, COLS])


@triton.jit
def _of_sets(tile, LARGEST: tl.constexpr, TILE: tl.constexpr):
    """Sum over the elements of each set, or return the largest."""
    if TILE.way != "columns":
        tile = tl.max(tile, 1, keep_dims=True) if LARGEST else tl.sum(tile, 1, keep_dims=True)
    if TILE.way != "rows":
        tile = tl.max(tile, 0, keep_dims=True) if LARGEST else tl.sum(tile, 0, keep_dims=True)
    return _of_lanes(tile, LARGEST, TILE)


@triton.jit
def _totals(sums, TILE: tl.constexpr):
    totals = ()
    for k in tl.static_range(len(sums)):
        totals = totals + (_of_sets(sums[k], False, TILE),)
    return totals


@triton.jit
def _keep(Table, FIELD: tl.constexpr, sets, at, values):
    """Store numbers of each set, in rows of a table from `FIELD` on."""
    for k in tl.static_range(len(values)):
        tl.store(Table + (FIELD + k) * sets + at.sets, values[k], mask=at.valid)


@triton.jit
def _row(Table, FIELD: tl.constexpr, sets, at):
    return tl.load(Table + FIELD * sets + at.sets, mask=at.valid, other=0.0)


@triton.jit
def _rows(Table, FIELD: tl.constexpr, COUNT: tl.constexpr, sets, at):
    """Load numbers of each set."""
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (_row(Table, FIELD + k, sets, at),)
    return rows


# Programs that share a set


@triton.jit
def _leave(Parts, sets, at, values):
    for k in tl.static_range(len(values)):
        part = (k * tl.num_programs(1) + tl.program_id(1)) * sets
        tl.store(Parts + part + at.sets, values[k], mask=at.valid)


@triton.jit
def _is_last(Table, sets):
    """Whether the other programs that share this one's sets have left their parts, which programs
    count behind the table.
    """
    # All threads' parts are written before one thread counts the program
    tl.debug_barrier()
    counter = Table + _FIELDS * sets + tl.program_id(0)
    last = tl.atomic_add(counter, 1.0) == tl.num_programs(1) - 1
    # For the next launch
    tl.store(counter, 0.0, mask=last)
    return last


@triton.jit
def _parts(Parts, K: tl.constexpr, first, sets, at):
    """Load some programs' parts, which other processors have just written."""
    share = first + tl.arange(0, _SHARES)[:, None]
    there = (share < tl.num_programs(1)) & at.valid
    offset = (K * tl.num_programs(1) + share) * sets + at.sets
    return tl.load(Parts + offset, mask=there, other=0.0, cache_modifier=".cg"), share


@triton.jit
def _collect(Parts, K: tl.constexpr, LARGEST: tl.constexpr, sets, at):
    """Add up all programs' parts, in their order, or return the largest."""
    part, _ = _parts(Parts, K, 0, sets, at)
    for first in range(_SHARES, tl.num_programs(1), _SHARES):
        more, _ = _parts(Parts, K, first, sets, at)
        part = tl.maximum(part, more) if LARGEST else part + more
    if LARGEST:
        return tl.max(part, 0, keep_dims=True)
    else:
        return tl.sum(part, 0, keep_dims=True)


@triton.jit
def _collected(Parts, COUNT: tl.constexpr, sets, at):
    totals = ()
    for k in tl.static_range(COUNT):
        totals = totals + (_collect(Parts, k, False, sets, at),)
    return totals


@triton.jit
def _merged(Parts, sets, at, share, runs):
    """Merge means and sums of squared deviations (Chan et al. 1979)."""
    total, _ = _parts(Parts, 0, 0, sets, at)
    total *= 0
    for first in range(0, tl.num_programs(1), _SHARES):
        mean, s = _parts(Parts, 0, first, sets, at)
        total += mean * (_share_of(s, share, runs) / runs)
    mean = tl.sum(total, 0, keep_dims=True)
    total *= 0
    for first in range(0, tl.num_programs(1), _SHARES):
        part, s = _parts(Parts, 0, first, sets, at)
        squares, _ = _parts(Parts, 1, first, sets, at)
        apart = part - mean
        total += squares + apart * apart * (_share_of(s, share, runs) * at.width).to(tl.float32)
    return mean, tl.sum(total, 0, keep_dims=True)


@triton.jit
def _share_of(s, share, runs):
    """How many runs program `s` has."""
    left = runs - s * share
    return tl.where(left < 0, 0, tl.where(left < share, left, share))


# Mean and variance


@triton.jit
def _apart(tile, given, sums, TILE: tl.constexpr):
    """Add up deviations from a number of each set, and their squares; keep the extremes."""
    X, about = given
    total, power, low, high = sums
    apart = _kept(_load(X, tile, TILE), tile, about, TILE) - about
    return total + apart, power + apart * apart, tl.maximum(low, -apart), tl.maximum(high, apart)


@triton.jit
def _mean_and_squares(X, at, TILE: tl.constexpr):
    """Return mean, sum of squared deviations, and the extremes (-low, high), in one pass about the
    mean of the first tile.
    """
    # A set in rows is a run; in the other ways, it has some
    runs = 1 if TILE.way == "rows" else at.stop - at.start
    first = tl.minimum(runs, TILE.rows) * tl.minimum(at.width, TILE.cols)
    about = _of_sets(_load(X, _elements(at, at.start, 0, TILE), TILE), False, TILE) / first
    zero = _zeros(TILE)
    total, power, low, high = _over(at, _apart, (X, about), (zero, zero, zero, zero), TILE)
    count = (runs * at.width).to(tl.float32)
    shift = _of_sets(total, False, TILE) / count
    squares = _of_sets(power, False, TILE) - shift * shift * count
    mean = about + tl.where(shift == shift, shift, 0.0)
    squares = tl.where(squares < 0, 0.0, squares)
    return mean, squares, _of_sets(low, True, TILE) - about, _of_sets(high, True, TILE) + about


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
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    _leave(Parts, sets, at, _mean_and_squares(X, at, TILE))
    if _is_last(Table, sets):
        mean, squares = _merged(Parts, sets, at, share, runs)
        low, high = _collect(Parts, 2, True, sets, at), _collect(Parts, 3, True, sets, at)
        mean, var, rstd, low, high = _standardization(mean, squares, low, high, at, eps)
        _keep(Table, _MEAN, sets, at, (mean, var, rstd))
        _keep(Table, _BOUNDS, sets, at, (low, high))


# The step of lambda, and the running statistics


@triton.jit
def _of_step(tile, given, sums, TILE: tl.constexpr):
    X, mean, rstd = given
    m1, m2, m3, m45 = _moments(_standard(X, tile, mean, rstd, TILE))
    return sums[0] + m1, sums[1] + m2, sums[2] + m3, sums[3] + m45


@triton.jit
def _sums_of_step(X, at, mean, rstd, TILE: tl.constexpr):
    zero = _zeros(TILE)
    return _totals(_over(at, _of_step, (X, mean, rstd), (zero, zero, zero, zero), TILE), TILE)


@triton.jit
def _keep_step(Table, sets, at, moments, var, rstd, low, high, t):
    """Keep the step of each set, from sums over it, and its gradient; return the step."""
    count = at.count.to(tl.float32)
    m1, m2, m3, m45 = moments
    v = var * rstd * rstd
    found = _first_step(m1 / count, m2 / count, m3 / count, m45 / count, v, low, high)
    _keep(Table, _STEP, sets, at, found)
    _keep(Table, _T, sets, at, (found[0] * 0 + t,))
    return found[0]


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
        old = tl.load(Running + at.sets, mask=at.valid, other=0.0).to(tl.float32)
        new = old * (1 - momentum) + value * momentum
        tl.store(Running + at.sets, new.to(Running.dtype.element_ty), mask=at.valid)


@triton.jit
def _count_batch(Batches):
    if Batches is not None:
        first = tl.program_id(0) + tl.program_id(1) == 0
        tl.store(Batches, tl.load(Batches) + 1, mask=first)


@triton.jit(do_not_specialize=_NUMBERS)
def _estimate(
    X, Table, Parts, Code, Mean, Var, Lambda, Batches, Momentum, unit, momentum,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep the step of lambda, and move the running statistics."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    mean, var, rstd = _rows(Table, _MEAN, 3, sets, at)
    _leave(Parts, sets, at, _sums_of_step(X, at, mean, rstd, TILE))
    if _is_last(Table, sets):
        t = tl.load(Code).to(tl.float32) * unit
        low, high = _rows(Table, _BOUNDS, 2, sets, at)
        moments = _collected(Parts, 4, sets, at)
        step = _keep_step(Table, sets, at, moments, var, rstd, low, high, t)
        _follow(Mean, Var, Lambda, Momentum, momentum, at, mean, var, step)
    _count_batch(Batches)


# The size of the noise: the mean distance of a set from its mean


@triton.jit
def _of_centre(tile, given, sums, TILE: tl.constexpr):
    X, mean, rstd, power = given
    return (sums[0] + _psi(_standard(X, tile, mean, rstd, TILE), power).y,)


@triton.jit
def _of_spread(tile, given, sums, TILE: tl.constexpr):
    X, mean, rstd, centre, power = given
    apart = tl.abs(_psi(_standard(X, tile, mean, rstd, TILE), power).y - centre)
    return (sums[0] + _kept(apart, tile, 0.0, TILE),)


@triton.jit(do_not_specialize=_NUMBERS)
def _noise(
    X, Table, Parts, alpha,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    FIELD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keep the mean of what the noise is added to, or the mean distance from it."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    mean, _, rstd, step = _rows(Table, _MEAN, 4, sets, at)
    power = _power(_row(Table, _T, sets, at) * alpha * step)
    zero = (_zeros(TILE),)
    if FIELD == _CENTRE:
        sums = _over(at, _of_centre, (X, mean, rstd, power), zero, TILE)
    else:
        centre = _row(Table, _CENTRE, sets, at)
        sums = _over(at, _of_spread, (X, mean, rstd, centre, power), zero, TILE)
    _leave(Parts, sets, at, _totals(sums, TILE))
    if _is_last(Table, sets):
        _keep(Table, FIELD, sets, at, (_collect(Parts, 0, False, sets, at) / at.count,))


# The result


@triton.jit
def _of_set(P, at, instead, TILE: tl.constexpr):
    """Load gammas that no element changes."""
    if P is None or TILE.along != "sets":
        return instead
    elif TILE.way == "columns":
        return tl.load(P + at.lane, mask=at.held, other=0.0).to(tl.float32)
    else:
        return tl.load(P + at.parameter + at.sets * 0, mask=at.valid, other=0.0).to(tl.float32)


@triton.jit
def _of_element(P, of_set, tile, TILE: tl.constexpr):
    """Load the gammas of a tile, where they are not its set's."""
    if P is None or TILE.along == "sets":
        return of_set
    else:
        return tl.load(P + tile[3], mask=tile[2], other=0.0).to(tl.float32)


@triton.jit
def _result(tile, given, sums, TILE: tl.constexpr):
    Out, X, Weight, Bias, Seed, gamma, beta, mean, rstd, amount, power = given
    y = _psi(_standard(X, tile, mean, rstd, TILE), power).y
    if Seed is not None:
        y += _normal(tile[0] + tile[1], Seed) * amount
    gamma, beta = _of_element(Weight, gamma, tile, TILE), _of_element(Bias, beta, tile, TILE)
    _store(Out, tile, y * gamma + beta, TILE)
    return sums


@triton.jit
def _write_result(Out, X, Weight, Bias, Seed, at, mean, rstd, power, amount, TILE: tl.constexpr):
    """Write psi, its noise, gamma and beta."""
    gamma, beta = _of_set(Weight, at, 1.0, TILE), _of_set(Bias, at, 0.0, TILE)
    given = Out, X, Weight, Bias, Seed, gamma, beta, mean, rstd, amount
    # A branch has to return something
    _over_by_power(at, _over, _result, given, power, (at.start,), TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _write(
    Out, X, Weight, Bias, Table, Seed, alpha, noise,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the result by what is kept of its sets."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    mean, _, rstd, step = _rows(Table, _MEAN, 4, sets, at)
    t, spread = _rows(Table, _T, 2, sets, at)
    power = _power(t * alpha * step)
    _write_result(Out, X, Weight, Bias, Seed, at, mean, rstd, power, noise * t * spread, TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _forward(
    Out, X, Weight, Bias, Table, Code, Seed, Mean, Var, Lambda, Batches, Momentum,
    unit, alpha, noise, eps, momentum,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Do all of a set that a program has to itself."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    t = tl.load(Code).to(tl.float32) * unit
    mean, squares, low, high = _mean_and_squares(X, at, TILE)
    mean, var, rstd, low, high = _standardization(mean, squares, low, high, at, eps)
    _keep(Table, _MEAN, sets, at, (mean, var, rstd))
    moments = _sums_of_step(X, at, mean, rstd, TILE)
    step = _keep_step(Table, sets, at, moments, var, rstd, low, high, t)
    _follow(Mean, Var, Lambda, Momentum, momentum, at, mean, var, step)
    _count_batch(Batches)
    power = _power(t * alpha * step)
    spread = mean * 0
    if Seed is not None:
        zero = (_zeros(TILE),)
        centre = _totals(_over(at, _of_centre, (X, mean, rstd, power), zero, TILE), TILE)[0]
        given = X, mean, rstd, centre / at.count, power
        spread = _totals(_over(at, _of_spread, given, zero, TILE), TILE)[0] / at.count
        _keep(Table, _SPREAD, sets, at, (spread,))
    _write_result(Out, X, Weight, Bias, Seed, at, mean, rstd, power, noise * t * spread, TILE)


# Its gradient


@triton.jit
def _of_pulls(tile, given, sums, TILE: tl.constexpr):
    """Add up what `eager.pulled_back` takes means of, and the gradients of gamma and beta."""
    X, Grad, Weight, Seed, gamma, mean, rstd, slopes, amount, power = given
    to_lmbda, direct, direct_h, moved, moved_h, to_weight, to_bias = sums
    grad = _load(Grad, tile, TILE)
    h = _standard(X, tile, mean, rstd, TILE)
    g = grad * _of_element(Weight, gamma, tile, TILE)
    y, slope, by_lmbda, tendency = _pulls(h, g, power, slopes)
    tendency = _kept(tendency, tile, 0.0, TILE)
    if Seed is not None:
        y += _normal(tile[0] + tile[1], Seed) * amount
    return (
        to_lmbda + by_lmbda, direct + slope, direct_h + slope * h, moved + tendency,
        moved_h + tendency * h, to_weight + grad * y, to_bias + grad,
    )  # fmt: skip


@triton.jit
def _sums_of_pulls(at, FORMULA: tl.constexpr, given, sums, TILE: tl.constexpr):
    """Go through a program's elements; leave the gradients of gammas that change along the runs."""
    OfAffine, entries, given = given[0], given[1], given[2:]
    if TILE.along == "runs":
        begin, end = (0, TILE.rows) if TILE.single else (at.start, at.stop)
        for r in range(begin, end, TILE.rows):
            sums = _over_lanes(at, r, FORMULA, given, sums, TILE)
            run = r + tl.arange(0, TILE.rows)
            entry = OfAffine + tl.program_id(0) * (at.count // at.width) + run
            tl.store(entry, tl.sum(sums[5], 1), mask=run < at.stop)
            tl.store(entry + entries, tl.sum(sums[6], 1), mask=run < at.stop)
            sums = sums[:5] + (_zeros(TILE), _zeros(TILE))
        return sums
    else:
        return _over(at, FORMULA, given, sums, TILE)


@triton.jit
def _leave_affine(OfAffine, at, tile, TILE: tl.constexpr):
    """Leave sums over a program's elements for each gamma: by lane, or by set."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if TILE.way == "columns":
        entry = (at.outer * tl.num_programs(1) + tl.program_id(1)) * at.lanes + at.lane
        tl.store(OfAffine + entry, tl.sum(tile, 0, keep_dims=True), mask=at.held)
    elif TILE.along == "lanes":
        entry = program * at.lanes + at.lane
        tl.store(OfAffine + entry, tl.sum(tile, 0, keep_dims=True), mask=at.held)
    else:
        entry = at.sets * tl.num_programs(1) + tl.program_id(1)
        tl.store(OfAffine + entry, _of_sets(tile, False, TILE), mask=at.valid)


@triton.jit
def _pulled(
    X, Grad, Weight, Table, OfAffine, Seed, at, noise, alpha, entries, sets, TILE: tl.constexpr
):
    """Return a program's sums of what `eager.pulled_back` takes means of, and leave those for gamma
    and beta.
    """
    mean, _, rstd, step = _rows(Table, _MEAN, 4, sets, at)
    t, spread = _rows(Table, _T, 2, sets, at)
    slopes, gamma = _rows(Table, _SLOPES, 4, sets, at), _of_set(Weight, at, 1.0, TILE)
    given = OfAffine, entries, X, Grad, Weight, Seed, gamma, mean, rstd, slopes, noise * t * spread
    zero, power = _zeros(TILE), _power(t * alpha * step)
    zeros = zero, zero, zero, zero, zero, zero, zero
    sums = _over_by_power(at, _sums_of_pulls, _of_pulls, given, power, zeros, TILE)
    if TILE.along != "runs":
        _leave_affine(OfAffine, at, sums[5], TILE)
        _leave_affine(OfAffine + entries, at, sums[6], TILE)
    return _totals(sums[:5], TILE)


@triton.jit
def _projection(sums, Table, at, sets, alpha, eps):
    """Return the factors of `_tendencies`, of 1 and of h in the gradient of x, times 1 / std.

    The step depends on v = var / (var + eps) too, N * d v / d h = 2 * h; what of it the projections
    leave is 2 * h * (1 - v).
    """
    to_lmbda, direct, direct_h, moved, moved_h = sums
    count = at.count.to(tl.float32)
    rstd, by_v = _row(Table, _RSTD, sets, at), _row(Table, _SLOPES + 4, sets, at)
    pull = _row(Table, _T, sets, at) * alpha * to_lmbda / count
    tilt = (direct_h + pull * moved_h) / count - 2 * pull * by_v * (eps * rstd * rstd)
    return rstd * pull, rstd * (direct + pull * moved) / count, rstd * tilt


@triton.jit
def _gradient_of_x(tile, given, sums, TILE: tl.constexpr):
    GradX, X, Grad, Weight, gamma, mean, rstd, slopes, pull, offset, tilt, power = given
    h = _standard(X, tile, mean, rstd, TILE)
    g = _load(Grad, tile, TILE) * _of_element(Weight, gamma, tile, TILE)
    _, slope, _, tendency = _pulls(h, g, power, slopes)
    _store(GradX, tile, slope * rstd + pull * tendency - offset - h * tilt, TILE)
    return sums


@triton.jit
def _write_gradient(GradX, X, Grad, Weight, Table, at, projection, alpha, sets, TILE: tl.constexpr):
    mean, _, rstd, step = _rows(Table, _MEAN, 4, sets, at)
    slopes, gamma = _rows(Table, _SLOPES, 4, sets, at), _of_set(Weight, at, 1.0, TILE)
    power = _power(_row(Table, _T, sets, at) * alpha * step)
    pull, offset, tilt = projection
    given = GradX, X, Grad, Weight, gamma, mean, rstd, slopes, pull, offset, tilt, power
    _over(at, _gradient_of_x, given, (), TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _pull(
    X, Grad, Weight, Table, Parts, OfAffine, Seed, alpha, noise, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, entries,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep the sums that the gradient of x takes. `OfAffine` receives sums of grad * y and of grad,
    `entries` each.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    sums = _pulled(X, Grad, Weight, Table, OfAffine, Seed, at, noise, alpha, entries, sets, TILE)
    _leave(Parts, sets, at, sums)
    if _is_last(Table, sets):
        sums = _collected(Parts, 5, sets, at)
        _keep(Table, _PROJECTION, sets, at, _projection(sums, Table, at, sets, alpha, eps))


@triton.jit(do_not_specialize=_NUMBERS)
def _gradient(
    GradX, X, Grad, Weight, Table, alpha,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x by what `_pull` kept."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    projection = _rows(Table, _PROJECTION, 3, sets, at)
    _write_gradient(GradX, X, Grad, Weight, Table, at, projection, alpha, sets, TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _backward(
    GradX, X, Grad, Weight, Table, OfAffine, Seed, alpha, noise, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, entries,
    TILE: tl.constexpr,
):  # fmt: skip
    """Do all of a set that a program has to itself."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    sums = _pulled(X, Grad, Weight, Table, OfAffine, Seed, at, noise, alpha, entries, sets, TILE)
    projection = _projection(sums, Table, at, sets, alpha, eps)
    _write_gradient(GradX, X, Grad, Weight, Table, at, projection, alpha, sets, TILE)


# By constants


@triton.jit(do_not_specialize=_NUMBERS)
def _apply(
    Out, X, Constants,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    mean, rstd, change, gamma, beta = _rows(Constants, 0, 5, sets, at)
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


def _plan(x: Tensor, layout: Layout) -> LaunchPlan:
    """Return how kernels go about a tensor that they can go about."""
    plan = plan_of(layout.shape, layout.dims, layout.affine, processors(x.device))
    assert plan is not None
    return plan


@cache
def processors(device: torch.device) -> int:
    """Return how many programs at least keep a device busy."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    how = _plan(x, options.layout)
    running, momentum = _running(options.running)
    code, unit = options.strength
    seed, alpha, noise, numbers = options.seed, options.alpha, options.noise, how.numbers
    size = (FIELDS + 1) * how.sets
    if how.splits == 1:
        table = room(x, size)
        tensors = out, x, weight, bias, table, code, seed, *running
        launch(_forward, how, *tensors, unit, alpha, noise, options.eps, momentum, *numbers)
        return table
    table = torch.zeros(size, dtype=torch.float32, device=x.device)
    parts = room(x, 4, how.splits, how.sets)
    launch(_statistics, how, x, table, parts, options.eps, *numbers)
    launch(_estimate, how, x, table, parts, code, *running, unit, momentum, *numbers)
    if seed is not None:
        launch(_noise, how, x, table, parts, alpha, *numbers, _CENTRE)
        launch(_noise, how, x, table, parts, alpha, *numbers, _SPREAD)
    launch(_write, how, out, x, weight, bias, table, seed, alpha, noise, *numbers)
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
    how = _plan(x, options.layout)
    of_affine = room(x, 2, *how.gradients)
    factors = options.alpha, options.noise, options.eps
    numbers = *how.numbers, math.prod(how.gradients)
    if how.splits == 1:
        tensors = grad_x, x, grad, weight, table, of_affine, options.seed
        launch(_backward, how, *tensors, *factors, *numbers)
    else:
        parts = room(x, 5, how.splits, how.sets)
        beside = table, parts, of_affine, options.seed
        launch(_pull, how, x, grad, weight, *beside, *factors, *numbers)
        launch(_gradient, how, grad_x, x, grad, weight, table, options.alpha, *how.numbers)
    sums = of_affine.sum(how.summed)
    # Of a parameter that several sets have: all of them
    if sums.numel() != 2 * math.prod(options.layout.affine):
        sums = sums.view(2, -1).sum(1)
    return sums.view(2, *options.layout.affine)


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """See `eager.apply`."""
    affine = tuple(constants.shape[1:])
    how = plan_of(tuple(x.shape), dims, affine, processors(x.device))
    if how is None:
        eager.apply(out, x, dims, constants)
    else:
        launch(_apply, how, out, x, constants, *how.numbers)
