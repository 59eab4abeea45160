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

# ruff: noqa: RET505 - Triton compiles what stands behind a branch by a constant, but not its `else`

from __future__ import annotations

import os
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrofit.layers.kernels import eager
from retrofit.layers.kernels.eager import DENOMINATOR, NUMERATOR, KernelOptions, Running
from retrofit.layers.kernels.layout import Layout
from retrofit.layers.kernels.plan import LaunchPlan, plan_of
from retrofit.layers.power_transform import LOG_STRETCH, MIN_CURVATURE, TINY

READS_STRENGTH = True

# Stages in one launch
_ALL = -1
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
_BY_M1, _BY_M2, _BY_M3, _BY_M45, _BY_V = map(tl.constexpr, range(4, 9))
_SPREAD, _T, _LOW, _HIGH, _CENTRE = map(tl.constexpr, range(9, 14))
_FIELDS = 14
# Stages after which programs that share a set merge what they found: four and one
_COUNTERS = 5
# Of the table that the sums of the backward pass leave
_PULL, _OFFSET, _TILT = map(tl.constexpr, range(3))

# Coefficients of polynomials, highest power first
_NUMERATOR, _DENOMINATOR = tl.constexpr(NUMERATOR), tl.constexpr(DENOMINATOR)
# expm1(u) / u, and its derivative
_GROWTH = tl.constexpr((1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0))
_SLOPE = tl.constexpr((1 / 144, 1 / 30, 1 / 8, 1 / 3, 1 / 2))


_NUMBERS = ["outer_stride", "inner", "inner_stride", "stride", "lanes", "runs", "share"]
_NUMBERS += ["by_inner", "sets", "entries"]


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


class _Power(NamedTuple):
    """psi at a set's lambda = 1 + change, for its two signs: p = 1 + change and 1 - change.

    expm1(p * l) = a * E + (E - 1) with E = exp((p - 1) * l), which is 1 at change 0, where psi is
    the identity to the bit. Where one p is near 0, it loses its digits: there, E = exp(p * l).
    """

    # exponents of E, by sign
    up: Any
    down: Any
    # sign / p
    by_up: Any
    by_down: Any
    # 1 where E = exp((p - 1) * l), else 0; and |p * l| below which a series stands for expm1
    usual: Any
    small: Any


@triton.jit
def _power(change):
    up, down = 1 + change, 1 - change
    near = (tl.abs(up) < _SMALL_POWER) | (tl.abs(down) < _SMALL_POWER)
    by_up = 1 / tl.where(up == 0, 1e-20, up)
    by_down = -1 / tl.where(down == 0, 1e-20, down)
    exponents = tl.where(near, up, change), tl.where(near, down, -change)
    usual, small = tl.where(near, 0.0, 1.0), tl.where(near, _SMALL, 0.0)
    return _Power(exponents[0], exponents[1], by_up, by_down, usual, small)


@triton.jit
def _psi(h, power):
    """Return psi(h; lambda) and what its derivatives share."""
    a = tl.abs(h)
    negative = h < 0
    log2 = _log2(1 + a)
    log = log2 * _LN2
    exponent = tl.where(negative, power.down, power.up)
    inverse = tl.where(negative, power.by_down, power.by_up)
    grown = _exp2(exponent * log2)
    growth = a * power.usual * grown + (grown - 1)
    signed = tl.where(negative, -log, log)
    u = exponent * log
    series = tl.abs(u) < power.small
    y = tl.where(series, signed * _polynomial(u, _GROWTH), growth * inverse)
    return y, a, log2, log, signed, negative, grown, growth, inverse, series, u


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
def _pulls(h, g, power, table):
    """Return y, g * d psi / d h, g * d psi / d lambda and `_tendencies`."""
    y, a, log2, log, signed, negative, grown, growth, by, series, u = _psi(h, power)
    inverse = _exp2(-log2)
    direct = g * grown * (inverse + power.usual * (1 - inverse))
    exact = by * (signed * (growth + 1) - y)
    to_lmbda = g * tl.where(series, log * log * _polynomial(u, _SLOPE), exact)
    moved = _tendencies(
        h, a, log, negative, inverse, table.by_m1, table.by_m2, table.by_m3, table.by_m45
    )
    return y, direct, to_lmbda, moved


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
def _load(P, start, offset, mask, TILE: tl.constexpr):
    if TILE.even:
        return tl.load(P + start + offset).to(tl.float32)
    else:
        return tl.load(P + start + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(P, start, offset, mask, value, TILE: tl.constexpr):
    value = value.to(P.dtype.element_ty)
    if TILE.even:
        tl.store(P + start + offset, value)
    else:
        tl.store(P + start + offset, value, mask=mask)


@triton.jit
def _kept(value, mask, instead, TILE: tl.constexpr):
    return value if TILE.even else tl.where(mask, value, instead)


@triton.jit
def _spread_out(of_lanes, TILE: tl.constexpr):
    """Broadcast a number of each set of merged lanes to these."""
    wide = tl.broadcast_to(of_lanes[:, None], [TILE.cols // TILE.merge, TILE.merge])
    return tl.reshape(wide, [1, TILE.cols])


@triton.jit
def _total(tile, TILE: tl.constexpr):
    """Sum over the elements of each set."""
    if TILE.way == "rows":
        return tl.sum(tile, 1, keep_dims=True)
    elif TILE.way == "columns":
        lanes = tl.sum(tile, 0, keep_dims=True)
        if TILE.merge == 1:
            return lanes
        else:
            merged = tl.reshape(lanes, [TILE.cols // TILE.merge, TILE.merge])
            return _spread_out(tl.sum(merged, 1), TILE)
    else:
        return tl.sum(tl.sum(tile, 1, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _most(tile, TILE: tl.constexpr):
    """Return the largest element of each set."""
    if TILE.way == "rows":
        return tl.max(tile, 1, keep_dims=True)
    elif TILE.way == "columns":
        lanes = tl.max(tile, 0, keep_dims=True)
        if TILE.merge == 1:
            return lanes
        else:
            merged = tl.reshape(lanes, [TILE.cols // TILE.merge, TILE.merge])
            return _spread_out(tl.max(merged, 1), TILE)
    else:
        return tl.max(tl.max(tile, 1, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _row(Table, FIELD: tl.constexpr, sets, at):
    """Load a number of each set."""
    return tl.load(Table + FIELD * sets + at.sets, mask=at.valid, other=0.0)


@triton.jit
def _keep(Table, FIELD: tl.constexpr, sets, at, value):
    tl.store(Table + FIELD * sets + at.sets, value, mask=at.valid)


# Programs that share a set


@triton.jit
def _leave(Parts, K: tl.constexpr, sets, at, value):
    part = (K * tl.num_programs(1) + tl.program_id(1)) * sets
    tl.store(Parts + part + at.sets, value, mask=at.valid)


@triton.jit
def _is_last(Counters, STAGE: tl.constexpr):
    """Whether the other programs that share this one's sets have left their parts."""
    # All threads' parts are written before one thread counts the program
    tl.debug_barrier()
    counter = Counters + STAGE * tl.num_programs(0) + tl.program_id(0)
    last = tl.atomic_add(counter, 1) == tl.num_programs(1) - 1
    # For the next time
    tl.store(counter, 0, mask=last)
    return last


@triton.jit
def _parts(Parts, K: tl.constexpr, first, sets, at):
    """Load some programs' parts, which other processors have just written."""
    share = first + tl.arange(0, _SHARES)[:, None]
    there = (share < tl.num_programs(1)) & at.valid
    offset = (K * tl.num_programs(1) + share) * sets + at.sets
    return tl.load(Parts + offset, mask=there, other=0.0, cache_modifier=".cg"), share


@triton.jit
def _collect(Parts, K: tl.constexpr, sets, at):
    """Add up all programs' parts, in their order."""
    part, _ = _parts(Parts, K, 0, sets, at)
    for first in range(_SHARES, tl.num_programs(1), _SHARES):
        more, _ = _parts(Parts, K, first, sets, at)
        part += more
    return tl.sum(part, 0, keep_dims=True)


@triton.jit
def _widest(Parts, K: tl.constexpr, sets, at):
    part, _ = _parts(Parts, K, 0, sets, at)
    for first in range(_SHARES, tl.num_programs(1), _SHARES):
        more, _ = _parts(Parts, K, first, sets, at)
        part = tl.maximum(part, more)
    return tl.max(part, 0, keep_dims=True)


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


# Passes over a program's elements


@triton.jit
def _mean_and_squares(X, at, TILE: tl.constexpr):
    """Return mean, sum of squared deviations, and the extremes (-low, high), in one pass about the
    mean of the first tile.
    """
    start, offset, mask, _ = _elements(at, at.start, 0, TILE)
    x = _load(X, start, offset, mask, TILE)
    there = tl.maximum(_total(mask.to(tl.float32), TILE), 1.0)
    about = _total(_kept(x, mask, 0.0, TILE), TILE) / there
    zero = tl.zeros([TILE.rows, TILE.cols], tl.float32)
    total, power, low, high = zero, zero, zero, zero
    lanes = TILE.cols if TILE.narrow else at.lanes
    begin, end = (0, TILE.rows) if TILE.single else (at.start, at.stop)
    for r in range(begin, end, TILE.rows):
        for first in range(0, lanes, TILE.cols):
            start, offset, mask, _ = _elements(at, r, first, TILE)
            apart = _kept(_load(X, start, offset, mask, TILE) - about, mask, 0.0, TILE)
            total += apart
            power += apart * apart
            low = tl.maximum(low, -apart)
            high = tl.maximum(high, apart)
    count = ((at.stop - at.start) * at.width).to(tl.float32)
    shift = _total(total, TILE) / count
    squares = _total(power, TILE) - shift * shift * count
    mean = about + tl.where(shift == shift, shift, 0.0)
    squares = tl.where(squares < 0, 0.0, squares)
    return mean, squares, _most(low, TILE) - about, _most(high, TILE) + about


@triton.jit
def _sums(X, at, OF: tl.constexpr, given, TILE: tl.constexpr):
    """Sum what `OF` returns of each element and `given`."""
    zero = tl.zeros([TILE.rows, TILE.cols], tl.float32)
    a, b, c, d = zero, zero, zero, zero
    lanes = TILE.cols if TILE.narrow else at.lanes
    begin, end = (0, TILE.rows) if TILE.single else (at.start, at.stop)
    for r in range(begin, end, TILE.rows):
        for first in range(0, lanes, TILE.cols):
            start, offset, mask, _ = _elements(at, r, first, TILE)
            values = OF(_load(X, start, offset, mask, TILE), given)
            a += _kept(values[0], mask, 0.0, TILE)
            if len(values) > 1:
                b += _kept(values[1], mask, 0.0, TILE)
                c += _kept(values[2], mask, 0.0, TILE)
                d += _kept(values[3], mask, 0.0, TILE)
    return _total(a, TILE), _total(b, TILE), _total(c, TILE), _total(d, TILE)


@triton.jit
def _moments_of(x, given):
    return _moments((x - given[0]) * given[1])


@triton.jit
def _psi_of(x, given):
    return (_psi((x - given[0]) * given[1], given[2])[0],)


@triton.jit
def _distance_of(x, given):
    return (tl.abs(_psi((x - given[0]) * given[1], given[2])[0] - given[3]),)


@triton.jit
def _write(Out, X, Weight, Bias, Seed, at, mean, rstd, power, amount, TILE: tl.constexpr):
    """Write psi, its noise, gamma and beta."""
    if Weight is not None and TILE.along == "sets":
        gamma = _gamma(Weight, at, TILE)
    if Bias is not None and TILE.along == "sets":
        beta = _gamma(Bias, at, TILE)
    lanes = TILE.cols if TILE.narrow else at.lanes
    begin, end = (0, TILE.rows) if TILE.single else (at.start, at.stop)
    for r in range(begin, end, TILE.rows):
        for first in range(0, lanes, TILE.cols):
            start, offset, mask, parameter = _elements(at, r, first, TILE)
            y = _psi((_load(X, start, offset, mask, TILE) - mean) * rstd, power)[0]
            if Seed is not None:
                y += _normal(start + offset, Seed) * amount
            if TILE.along == "sets":
                if Weight is not None:
                    y *= gamma
                if Bias is not None:
                    y += beta
            else:
                if Weight is not None:
                    y *= tl.load(Weight + parameter, mask=mask, other=0.0).to(tl.float32)
                if Bias is not None:
                    y += tl.load(Bias + parameter, mask=mask, other=0.0).to(tl.float32)
            _store(Out, start, offset, mask, y, TILE)


@triton.jit
def _gamma(P, at, TILE: tl.constexpr):
    """Load gammas that no element changes."""
    if TILE.way == "columns":
        return tl.load(P + at.lane, mask=at.held, other=0.0).to(tl.float32)
    else:
        return tl.load(P + at.parameter + at.sets * 0, mask=at.valid, other=0.0).to(tl.float32)


# The two passes of a layer


@triton.jit(do_not_specialize=_NUMBERS)
def _forward(
    Out, X, Weight, Bias, Table, Parts, Counters, Code, Seed,
    RunningMean, RunningVar, RunningLambda, Batches, Momentum,
    unit, alpha, noise, eps, momentum,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    STAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stage 0 finds mean and variance, 1 the step, 2 and 3 the noise's scale, 4 writes; -1 is all
    at once.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    t = tl.load(Code).to(tl.float32) * unit
    count = at.count.to(tl.float32)

    if STAGE <= 0:
        mean, squares, low, high = _mean_and_squares(X, at, TILE)
        if STAGE == 0:
            _leave(Parts, 0, sets, at, mean)
            _leave(Parts, 1, sets, at, squares)
            _leave(Parts, 2, sets, at, low)
            _leave(Parts, 3, sets, at, high)
            if _is_last(Counters, 0):
                mean, squares = _merged(Parts, sets, at, share, runs)
                var = squares / count
                rstd = 1 / tl.sqrt(var + eps)
                _keep(Table, _MEAN, sets, at, mean)
                _keep(Table, _VAR, sets, at, var)
                _keep(Table, _RSTD, sets, at, rstd)
                _keep(Table, _LOW, sets, at, -(_widest(Parts, 2, sets, at) + mean) * rstd)
                _keep(Table, _HIGH, sets, at, (_widest(Parts, 3, sets, at) - mean) * rstd)
        else:
            var = squares / count
            rstd = 1 / tl.sqrt(var + eps)
            low, high = -(low + mean) * rstd, (high - mean) * rstd
    else:
        mean, rstd = _row(Table, _MEAN, sets, at), _row(Table, _RSTD, sets, at)

    if STAGE == -1 or STAGE == 1:
        m1, m2, m3, m45 = _sums(X, at, _moments_of, (mean, rstd), TILE)
        if STAGE == 1:
            _leave(Parts, 0, sets, at, m1)
            _leave(Parts, 1, sets, at, m2)
            _leave(Parts, 2, sets, at, m3)
            _leave(Parts, 3, sets, at, m45)
            if _is_last(Counters, 1):
                m1, m2 = _collect(Parts, 0, sets, at), _collect(Parts, 1, sets, at)
                m3, m45 = _collect(Parts, 2, sets, at), _collect(Parts, 3, sets, at)
                var = _row(Table, _VAR, sets, at)
                low, high = _row(Table, _LOW, sets, at), _row(Table, _HIGH, sets, at)
                step = _estimate(Table, sets, at, m1, m2, m3, m45, var, rstd, low, high, t)
                _follow(
                    RunningMean, RunningVar, RunningLambda, Momentum, momentum, at, mean, var, step
                )
        else:
            step = _estimate(Table, sets, at, m1, m2, m3, m45, var, rstd, low, high, t)
            _follow(RunningMean, RunningVar, RunningLambda, Momentum, momentum, at, mean, var, step)
    elif STAGE > 1:
        step = _row(Table, _STEP, sets, at)

    if STAGE == -1 or STAGE > 1:
        power = _power(t * alpha * step)
    spread = mean * 0
    if Seed is not None:
        if STAGE == -1 or STAGE == 2:
            centre, _, _, _ = _sums(X, at, _psi_of, (mean, rstd, power), TILE)
            if STAGE == 2:
                _leave(Parts, 0, sets, at, centre)
                if _is_last(Counters, 2):
                    _keep(Table, _CENTRE, sets, at, _collect(Parts, 0, sets, at) / count)
            else:
                centre = centre / count
        if STAGE == 3:
            centre = _row(Table, _CENTRE, sets, at)
        if STAGE == -1 or STAGE == 3:
            spread, _, _, _ = _sums(X, at, _distance_of, (mean, rstd, power, centre), TILE)
            if STAGE == 3:
                _leave(Parts, 0, sets, at, spread)
                if _is_last(Counters, 3):
                    _keep(Table, _SPREAD, sets, at, _collect(Parts, 0, sets, at) / count)
            else:
                spread = spread / count
        if STAGE == 4:
            spread = _row(Table, _SPREAD, sets, at)

    if STAGE == -1 or STAGE == 4:
        amount = noise * t * spread
        _write(Out, X, Weight, Bias, Seed, at, mean, rstd, power, amount, TILE)
        if STAGE == -1:
            _keep(Table, _MEAN, sets, at, mean)
            _keep(Table, _VAR, sets, at, var)
            _keep(Table, _RSTD, sets, at, rstd)
            _keep(Table, _SPREAD, sets, at, spread)
        if Batches is not None:
            first = tl.program_id(0) + tl.program_id(1) == 0
            tl.store(Batches, tl.load(Batches) + 1, mask=first)


@triton.jit
def _estimate(Table, sets, at, m1, m2, m3, m45, var, rstd, low, high, t):
    """Keep the step of each set, from sums over it, and its gradient; return the step."""
    count = at.count.to(tl.float32)
    v = var * rstd * rstd
    step, by_m1, by_m2, by_m3, by_m45, by_v = _first_step(
        m1 / count, m2 / count, m3 / count, m45 / count, v, low, high
    )
    _keep(Table, _STEP, sets, at, step)
    _keep(Table, _BY_M1, sets, at, by_m1)
    _keep(Table, _BY_M2, sets, at, by_m2)
    _keep(Table, _BY_M3, sets, at, by_m3)
    _keep(Table, _BY_M45, sets, at, by_m45)
    _keep(Table, _BY_V, sets, at, by_v)
    _keep(Table, _T, sets, at, step * 0 + t)
    return step


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


class _Gradient(NamedTuple):
    by_m1: Any
    by_m2: Any
    by_m3: Any
    by_m45: Any


@triton.jit(do_not_specialize=_NUMBERS)
def _backward(
    GradX, X, Grad, Weight, Table, Pulls, Parts, Counters, OfAffine, Seed,
    alpha, noise, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, entries,
    STAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stage 0 sums, 1 writes, -1 is both at once. `OfAffine` receives sums of grad * y and of grad,
    `entries` each.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    count = at.count.to(tl.float32)
    t = _row(Table, _T, sets, at)
    mean, rstd = _row(Table, _MEAN, sets, at), _row(Table, _RSTD, sets, at)
    power = _power(t * alpha * _row(Table, _STEP, sets, at))
    by_m1, by_m2 = _row(Table, _BY_M1, sets, at), _row(Table, _BY_M2, sets, at)
    by_m3, by_m45 = _row(Table, _BY_M3, sets, at), _row(Table, _BY_M45, sets, at)
    gradient = _Gradient(by_m1, by_m2, by_m3, by_m45)
    if STAGE <= 0:
        amount = noise * t * _row(Table, _SPREAD, sets, at)
        to_lmbda, direct, direct_h, moved, moved_h = _pulled(
            X, Grad, Weight, OfAffine, Seed, at, mean, rstd, power, gradient, amount, entries, TILE
        )
        if STAGE == 0:
            _leave(Parts, 0, sets, at, to_lmbda)
            _leave(Parts, 1, sets, at, direct)
            _leave(Parts, 2, sets, at, direct_h)
            _leave(Parts, 3, sets, at, moved)
            _leave(Parts, 4, sets, at, moved_h)
            if _is_last(Counters, 4):
                to_lmbda = _collect(Parts, 0, sets, at)
                direct, direct_h = _collect(Parts, 1, sets, at), _collect(Parts, 2, sets, at)
                moved, moved_h = _collect(Parts, 3, sets, at), _collect(Parts, 4, sets, at)
                by_v = _row(Table, _BY_V, sets, at)
                pull, offset, tilt = _projection(
                    to_lmbda, direct, direct_h, moved, moved_h, by_v, t * alpha, eps, rstd, count
                )
                _keep(Pulls, _PULL, sets, at, pull)
                _keep(Pulls, _OFFSET, sets, at, offset)
                _keep(Pulls, _TILT, sets, at, tilt)
        else:
            by_v = _row(Table, _BY_V, sets, at)
            pull, offset, tilt = _projection(
                to_lmbda, direct, direct_h, moved, moved_h, by_v, t * alpha, eps, rstd, count
            )
    else:
        pull, offset = _row(Pulls, _PULL, sets, at), _row(Pulls, _OFFSET, sets, at)
        tilt = _row(Pulls, _TILT, sets, at)
    if STAGE != 0:
        _write_gradient(
            GradX, X, Grad, Weight, at, mean, rstd, power, gradient, pull, offset, tilt, TILE
        )


@triton.jit
def _projection(to_lmbda, direct, direct_h, moved, moved_h, by_v, t, eps, rstd, count):
    """Return the factors of `_tendencies`, of 1 and of h in the gradient of x, times 1 / std.

    The step depends on v = var / (var + eps) too, N * d v / d h = 2 * h; what of it the projections
    leave is 2 * h * (1 - v).
    """
    pull = t * to_lmbda / count
    tilt = (direct_h + pull * moved_h) / count - 2 * pull * by_v * (eps * rstd * rstd)
    return rstd * pull, rstd * (direct + pull * moved) / count, rstd * tilt


@triton.jit
def _pulled(
    X, Grad, Weight, OfAffine, Seed, at, mean, rstd, power, gradient, amount, entries,
    TILE: tl.constexpr,
):  # fmt: skip
    """Return a program's sums of what `eager.pulled_back` takes means of, and leave those of grad *
    y and grad.
    """
    zero = tl.zeros([TILE.rows, TILE.cols], tl.float32)
    to_lmbda, direct, direct_h, moved, moved_h = zero, zero, zero, zero, zero
    to_weight, to_bias = zero, zero
    if Weight is not None and TILE.along == "sets":
        gamma = _gamma(Weight, at, TILE)
    lanes = TILE.cols if TILE.narrow else at.lanes
    begin, end = (0, TILE.rows) if TILE.single else (at.start, at.stop)
    for r in range(begin, end, TILE.rows):
        if TILE.along == "runs":
            to_weight, to_bias = zero, zero
        for first in range(0, lanes, TILE.cols):
            start, offset, mask, parameter = _elements(at, r, first, TILE)
            grad = _load(Grad, start, offset, mask, TILE)
            h = (_kept(_load(X, start, offset, mask, TILE), mask, mean, TILE) - mean) * rstd
            g = grad
            if Weight is not None:
                if TILE.along == "sets":
                    g = grad * gamma
                else:
                    g = grad * tl.load(Weight + parameter, mask=mask, other=0.0).to(tl.float32)
            y, slope, by_lmbda, tendency = _pulls(h, g, power, gradient)
            tendency = _kept(tendency, mask, 0.0, TILE)
            to_lmbda += by_lmbda
            direct += slope
            direct_h += slope * h
            moved += tendency
            moved_h += tendency * h
            if OfAffine is not None:
                if Seed is not None:
                    y += _normal(start + offset, Seed) * amount
                to_weight += grad * y
                to_bias += grad
        if OfAffine is not None and TILE.along == "runs":
            run = r + tl.arange(0, TILE.rows)
            entry = tl.program_id(0) * (at.count // at.width) + run
            tl.store(OfAffine + entry, tl.sum(to_weight, 1), mask=run < at.stop)
            tl.store(OfAffine + entries + entry, tl.sum(to_bias, 1), mask=run < at.stop)
    if OfAffine is not None and TILE.along != "runs":
        _leave_affine(OfAffine, at, to_weight, TILE)
        _leave_affine(OfAffine + entries, at, to_bias, TILE)
    direct, direct_h = _total(direct, TILE), _total(direct_h, TILE)
    return _total(to_lmbda, TILE), direct, direct_h, _total(moved, TILE), _total(moved_h, TILE)


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
        tl.store(OfAffine + entry, _total(tile, TILE), mask=at.valid)


@triton.jit
def _write_gradient(
    GradX, X, Grad, Weight, at, mean, rstd, power, gradient, pull, offset_, tilt,
    TILE: tl.constexpr,
):  # fmt: skip
    if Weight is not None and TILE.along == "sets":
        gamma = _gamma(Weight, at, TILE)
    lanes = TILE.cols if TILE.narrow else at.lanes
    begin, end = (0, TILE.rows) if TILE.single else (at.start, at.stop)
    for r in range(begin, end, TILE.rows):
        for first in range(0, lanes, TILE.cols):
            start, offset, mask, parameter = _elements(at, r, first, TILE)
            g = _load(Grad, start, offset, mask, TILE)
            h = (_load(X, start, offset, mask, TILE) - mean) * rstd
            if Weight is not None:
                if TILE.along == "sets":
                    g = g * gamma
                else:
                    g = g * tl.load(Weight + parameter, mask=mask, other=0.0).to(tl.float32)
            _, slope, _, tendency = _pulls(h, g, power, gradient)
            grad_x = slope * rstd + pull * tendency - offset_ - h * tilt
            _store(GradX, start, offset, mask, grad_x, TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _apply(
    Out, X, Constants,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    mean, rstd = _row(Constants, 0, sets, at), _row(Constants, 1, sets, at)
    power = _power(_row(Constants, 2, sets, at))
    gamma, beta = _row(Constants, 3, sets, at), _row(Constants, 4, sets, at)
    lanes = TILE.cols if TILE.narrow else at.lanes
    begin, end = (0, TILE.rows) if TILE.single else (at.start, at.stop)
    for r in range(begin, end, TILE.rows):
        for first in range(0, lanes, TILE.cols):
            start, offset, mask, _ = _elements(at, r, first, TILE)
            y = _psi((_load(X, start, offset, mask, TILE) - mean) * rstd, power)[0]
            _store(Out, start, offset, mask, y * gamma + beta, TILE)


# From Python


def takes(x: Tensor, layout: Layout) -> bool:
    """Whether the kernels can go about a tensor."""
    return _plan(x, layout) is not None


def _plan(x: Tensor, layout: Layout) -> LaunchPlan | None:
    return plan_of(layout.shape, layout.dims, layout.affine, processors(x.device))


@cache
def processors(device: torch.device) -> int:
    """Return how many programs at least keep a device busy."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_options(kernel: Any, plan: LaunchPlan) -> dict[str, int]:
    """Return what a kernel is compiled with; sums of the backward pass take twice the registers."""
    return {"num_warps": min(8, 2 * plan.warps) if kernel is _backward else plan.warps}


def launch(kernel: Any, plan: LaunchPlan, *arguments: Any) -> None:
    """Launch a kernel; tests replace this."""
    kernel[plan.grid](*arguments, plan.tile, **launch_options(kernel, plan))


def launch_on(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Launch a kernel that goes over no tensor of elements."""
    kernel[grid](*arguments)


def _room(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _counters(table: Tensor, plan: LaunchPlan) -> Tensor:
    """Return the room behind a table in which programs count themselves, a row a stage."""
    return table[_FIELDS * plan.sets :].view(torch.int32)


def _in_memory(parameter: Tensor | None, options: KernelOptions) -> Tensor | None:
    """Return gamma or beta in the order of memory of what they multiply."""
    if parameter is None:
        return None
    return options.layout.view(parameter, options.layout.affine)


def forward(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions
) -> Tensor:
    """Fill `out`, and move the running statistics; return a table of `_FIELDS` numbers a set,
    and behind it, room for counters.
    """
    how = _plan(x, options.layout)
    assert how is not None
    shared = how.splits > 1
    table = torch.empty(_FIELDS * how.sets, dtype=torch.float32, device=x.device)
    parts = counters = None
    if shared:
        size = _FIELDS * how.sets + _COUNTERS * how.tasks
        table = torch.zeros(size, dtype=torch.float32, device=x.device)
        parts = _room(x, 4, how.splits, how.sets)
        counters = _counters(table, how)
    tensors = out, x, _in_memory(weight, options), _in_memory(bias, options), table
    running, momentum = _running(options.running)
    strength = options.strength
    factors = strength.unit, options.alpha, options.noise, options.eps, momentum
    arguments = *tensors, parts, counters, strength.source, options.seed, *running, *factors
    stages: tuple[int, ...] = (_ALL,)
    if shared:
        stages = (0, 1, 4) if options.seed is None else (0, 1, 2, 3, 4)
    for stage in stages:
        launch(_forward, how, *arguments, *how.numbers, stage)
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
    """See `eager.backward`; `table` is `forward`'s."""
    how = _plan(x, options.layout)
    assert how is not None
    layout = options.layout
    shared = how.splits > 1
    parts = pulls = counters = None
    if shared:
        parts = _room(x, 5, how.splits, how.sets)
        pulls = _room(x, 3, how.sets)
        counters = _counters(table, how)
    of_affine = _room(x, 2, *how.gradients)
    tensors = grad_x, x, layout.view(grad), _in_memory(weight, options), table, pulls, parts
    factors = options.alpha, options.noise, options.eps
    arguments = *tensors, counters, of_affine, options.seed, *factors
    entries = of_affine.numel() // 2
    for stage in (0, 1) if shared else (_ALL,):
        launch(_backward, how, *arguments, *how.numbers, entries, stage)
    sums = of_affine.sum(how.summed)
    # Of a parameter that several sets have: all of them
    if sums.numel() != 2 * prod(layout.affine):
        sums = sums.view(2, -1).sum(1)
    return sums.view(2, *layout.affine)


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """See `eager.apply`."""
    affine = tuple(constants.shape[1:])
    how = plan_of(tuple(x.shape), dims, affine, processors(x.device))
    if how is None:
        eager.apply(out, x, dims, constants)
    else:
        launch(_apply, how, out, x, constants, *how.numbers)
