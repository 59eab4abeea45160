"""The formulas as Triton kernels: for CUDA, and for Triton's interpreter on the CPU
(TRITON_INTERPRET=1).

A program works on one set, or on a block of neighbouring sets where these alternate in memory; a
tile has elements of a set along its first axis and sets along its second. Where sets are few and
large, several programs share one: each stage then leaves partial sums, which every program of the
next stage adds up in the same order. No result depends on which program comes first. Offsets are
64-bit.
"""

from __future__ import annotations

import math
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrofit.layers.kernels import eager
from retrofit.layers.kernels.eager import DENOMINATOR, FIELDS, NUMERATOR, KernelOptions
from retrofit.layers.kernels.layout import Geometry, geometry_of
from retrofit.layers.power_transform import LOG_STRETCH, MIN_CURVATURE, TINY, StepGradient

# stages in one launch
_ALL = -1
# neighbouring sets a program works on where they alternate in memory
_COLUMNS = 16
# elements
_TILE = 1024
_PROGRAMS_PER_PROCESSOR = 4
# tiles that a program goes through at least before a set is shared
_ROUNDS = 4

_LOG_STRETCH, _MIN_CURVATURE, _TINY = (
    tl.constexpr(LOG_STRETCH),
    tl.constexpr(MIN_CURVATURE),
    tl.constexpr(TINY),
)
# What is kept of each set, as `eager.FIELDS` has it: `_GRADIENT` is the first of five. Rows of the
# forward's partial sums: `_MOMENTS` is the first of five; rows of the backward's: five sums, and
# the gradients of gamma and beta.
_MEAN, _RSTD, _STEP, _GRADIENT, _SPREAD = map(tl.constexpr, (0, 2, 3, 4, 9))
_MEANS, _SQUARES, _MOMENTS, _LOW, _HIGH, _CENTRE, _DISTANCES = map(
    tl.constexpr, (0, 1, 2, 7, 8, 9, 10)
)
_TO_WEIGHT, _TO_BIAS = tl.constexpr(5), tl.constexpr(6)
_FORWARD_PARTS, _BACKWARD_PARTS = 11, 7

# Coefficients of polynomials, highest power first
_NUMERATOR, _DENOMINATOR = tl.constexpr(NUMERATOR), tl.constexpr(DENOMINATOR)
_SERIES = tl.constexpr((1 / 5760, 1 / 840, 1 / 144, 1 / 30, 1 / 8, 1 / 3, 1 / 2))
_EXPM1 = tl.constexpr(
    (
        0.0013882494531571865,
        0.00836664717644453,
        0.04166720435023308,
        0.16666541993618011,
        0.4999999701976776,
    )
)
_LOG1P = tl.constexpr(
    (0.05413185432553291, -0.12067317217588425, 0.14983916282653809, -0.1682281792163849)
    + (0.19977077841758728, -0.24993441998958588, 0.3333354890346527, -0.5000005960464478)
)


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr):
    """Evaluate a polynomial, highest power first."""
    value = x * COEFFICIENTS[0] + COEFFICIENTS[1]
    for k in tl.static_range(2, len(COEFFICIENTS.value)):
        value = value * x + COEFFICIENTS[k]
    return value


@triton.jit
def _log_of(k, m):
    """Log of 2^(k / 2^23) * (1 + m), as normality.cpp has it."""
    return k.to(tl.float32) * (0.6931471805599453 / 8388608) + (
        _polynomial(m, _LOG1P) * (m * m) + m
    )


@triton.jit
def _log1p(a):
    a = tl.where(a > 1e37, 1e37, a)
    k = ((1 + a).to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
    scale = (0x3F800000 - k).to(tl.float32, bitcast=True)
    return _log_of(k, a * scale + (scale - 1))


@triton.jit
def _expm1(u):
    u = tl.where(u > 87.0, 87.0, tl.where(u < -87.0, -87.0, u))
    n = tl.floor(u * 1.4426950408889634 + 0.5)
    r = (u - n * 0.693145751953125) - n * 1.4286068203e-6
    scale = ((n.to(tl.int32) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return (_polynomial(r, _EXPM1) * (r * r) + r) * scale + (scale - 1)


@triton.jit
def _normal(position, Seed):
    """See `eager.normal`."""
    key = position.to(tl.uint32) + tl.load(Seed).to(tl.uint32, bitcast=True)
    key = (key ^ (key >> 17)) * 0xED5AD4BB
    key = ((key ^ (key >> 11)) + tl.load(Seed + 1).to(tl.uint32, bitcast=True)) * 0xAC4C1B51
    key = (key ^ (key >> 15)) * 0x31848BAB
    key = key ^ (key >> 14)
    v = (key & 0x7FFFFFFF).to(tl.int32, bitcast=True).to(tl.float32) * (1 / 2147483648) + (
        1 / 4294967296
    )
    q = v * (2 - v)
    k = (q.to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
    w = -_log_of(k, q * (0x3F800000 - k).to(tl.float32, bitcast=True) - 1)
    z = (1 - v) * _polynomial(w, _NUMERATOR) / _polynomial(w, _DENOMINATOR)
    return tl.where(key >= 0x80000000, -z, z)


@triton.jit
def _psi(h, change):
    """Return psi(h; 1 + change), log(1 + |h|), u = p * log and expm1(u)."""
    up, down = 1 + change, 1 - change
    up = tl.where(up == 0, 1e-20, up)
    down = tl.where(down == 0, 1e-20, down)
    log = _log1p(tl.abs(h))
    u = log * tl.where(h < 0, down, up)
    growth = _expm1(u)
    return growth * tl.where(h < 0, -1 / down, 1 / up), log, u, growth


class _Where(NamedTuple):
    """Where the sets of a tensor lie, as `Geometry` has it, and how many elements of a set a
    program takes.
    """

    outer_stride: Any
    inner: Any
    inner_stride: Any
    run_stride: Any
    length: Any
    affine_inner: Any
    affine_run: Any
    affine_lane: Any
    sets: Any
    elements: Any
    share: Any


class _Options(NamedTuple):
    """What `KernelOptions` holds beside shapes; `seed` and `factor` are None for no noise. Kernels
    take it as `given`: `options` is a name of Triton's own in the launcher that it writes of a
    kernel's arguments.
    """

    t: Any
    eps: Any
    factor: Any
    seed: Any


class _Sets(NamedTuple):
    """What a program works on: its sets, a tile's columns, and its share of their elements."""

    # number of the block of neighbouring sets
    block: Any
    # number of a set within the block
    lane: Any
    # offset of a set's first element
    base: Any
    # a set's number in `Stats` and `Parts`
    column: Any
    # whether the lane holds a set at all
    there: Any
    # of the share; it ends before `stop`
    start: Any
    stop: Any
    where: Any


@triton.jit
def _sets(where, COLUMNS: tl.constexpr):
    task = tl.program_id(0).to(tl.int64)
    o, i = task // where.inner, task % where.inner
    lane = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    base = o * where.outer_stride + i * where.inner_stride + lane
    column = task + lane if COLUMNS == 1 else o * where.length + i * where.inner_stride + lane
    there = lane == 0 if COLUMNS == 1 else i * where.inner_stride + lane < where.length
    start = tl.program_id(1) * where.share
    return _Sets(
        i, lane, base, column, there, start, tl.minimum(start + where.share, where.elements), where
    )


@triton.jit
def _elements(e, at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return of a tile from element `e` of the sets: offsets, which of them there are, and where in
    gamma and beta.
    """
    where = at.where
    e += tl.arange(0, ROWS)[:, None]
    run = (e // where.length if COLUMNS == 1 else e).to(tl.int64)
    lane = (e % where.length).to(tl.int64) if COLUMNS == 1 else at.lane
    offset = run * where.run_stride + at.base + (lane if COLUMNS == 1 else 0)
    parameter = at.block * where.affine_inner + run * where.affine_run + lane * where.affine_lane
    return offset, (e < at.stop) & at.there, parameter


@triton.jit
def _values(P, offset, mask):
    return tl.load(P + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _statistic(Stats, FIELD: tl.constexpr, at):
    """Return one number of each set, to be broadcast over its elements."""
    return _values(Stats + FIELD * at.where.sets, at.column, at.there)


@triton.jit
def _keep(Stats, FIELD: tl.constexpr, at, value):
    """Store one number of each set, by the first of the programs that share it."""
    tl.store(
        Stats + FIELD * at.where.sets + at.column,
        value,
        mask=at.there & (at.column * 0 + tl.program_id(1) == 0),
    )


@triton.jit
def _part(Parts, row, s, at):
    """Load what program `s` of those that share a set left in a row."""
    return _values(Parts + (row * tl.num_programs(1) + s) * at.where.sets, at.column, at.there)


@triton.jit
def _leave(Parts, row, at, value):
    tl.store(
        Parts + (row * tl.num_programs(1) + tl.program_id(1)) * at.where.sets + at.column,
        value,
        mask=at.there,
    )


@triton.jit
def _leave_five(Parts, ROW: tl.constexpr, at, values):
    for k in tl.static_range(5):
        _leave(Parts, ROW + k, at, values[k])


@triton.jit
def _collect(Parts, row, at):
    """Add up what the programs that share a set left of one sum, in their order."""
    total = _part(Parts, row, 0, at)
    for s in range(1, tl.num_programs(1)):
        total += _part(Parts, row, s, at)
    return total


@triton.jit
def _collect_five(Parts, ROW: tl.constexpr, at):
    first, second, third = (
        _collect(Parts, ROW, at),
        _collect(Parts, ROW + 1, at),
        _collect(Parts, ROW + 2, at),
    )
    return first, second, third, _collect(Parts, ROW + 3, at), _collect(Parts, ROW + 4, at)


@triton.jit
def _total(tile):
    """Sum a tile over the elements of each set."""
    return tl.sum(tile, 0, keep_dims=True)


@triton.jit
def _own_mean(X, at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return mean and sum of squared deviations of a program's share, as `eager.normalized`
    corrects them.
    """
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    total, offset_total, power = zero, zero, zero
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _ = _elements(e, at, ROWS, COLUMNS)
        total += _values(X, offset, mask)
    mean = _total(total) / (at.stop - at.start)
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _ = _elements(e, at, ROWS, COLUMNS)
        centred = tl.where(mask, _values(X, offset, mask) - mean, 0.0)
        offset_total += centred
        power += centred * centred
    shift = _total(offset_total) / (at.stop - at.start)
    squares = _total(power) - shift * shift * (at.stop - at.start)
    return mean + tl.where(shift == shift, shift, 0.0), squares


@triton.jit
def _whole_mean(Parts, at, COLUMNS: tl.constexpr):
    """Merge the programs' means and sums of squared deviations."""
    elements, share = at.where.elements, at.where.share
    mean = tl.zeros([1, COLUMNS], tl.float32)
    for s in range(0, tl.num_programs(1)):
        count = tl.minimum((s + 1) * share, elements) - s * share
        mean += _part(Parts, _MEANS, s, at) * (count / elements)
    squares = tl.zeros([1, COLUMNS], tl.float32)
    for s in range(0, tl.num_programs(1)):
        count = tl.minimum((s + 1) * share, elements) - s * share
        apart = _part(Parts, _MEANS, s, at) - mean
        squares += _part(Parts, _SQUARES, s, at) + apart * apart * count
    return mean, squares


@triton.jit
def _own_moments(X, at, mean, rstd, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return sums over a program's share of what `power_transform.first_step` takes means of, and
    its extremes.
    """
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    m1, m2, m3, m45, v, low, high = zero, zero, zero, zero, zero, zero, zero
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _ = _elements(e, at, ROWS, COLUMNS)
        h = tl.where(mask, (_values(X, offset, mask) - mean) * rstd, 0.0)
        a = tl.abs(h)
        log = _log1p(a)
        grown = log + a * log
        d = grown - a
        m1 += tl.where(h < 0, -log, log)
        m2 += h * d
        m3 += d
        m45 += a * (grown * log - 2 * d) + d * d
        v += h * h
        low = tl.where(h < low, h, low)
        high = tl.where(h > high, h, high)
    sums = _total(m1), _total(m2), _total(m3), _total(m45), _total(v)
    return sums, tl.min(low, 0, keep_dims=True), tl.max(high, 0, keep_dims=True)


@triton.jit
def _whole_extremes(Parts, at, COLUMNS: tl.constexpr):
    low, high = tl.zeros([1, COLUMNS], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
    for s in range(0, tl.num_programs(1)):
        low = tl.minimum(low, _part(Parts, _LOW, s, at))
        high = tl.maximum(high, _part(Parts, _HIGH, s, at))
    return low, high


@triton.jit
def _first_step(sums, low, high, elements):
    """Return the step of `power_transform.first_step`, within `step_bounds`, and its gradient."""
    m1, m2, m3, m45 = sums[0] / elements, sums[1] / elements, sums[2] / elements, sums[3] / elements
    v = sums[4] / elements
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
    return step, (
        -by_slope,
        (by_slope - 4 * by_bend * ratio) / v,
        -2 * by_bend * m3 / v,
        by_bend / v,
        by_v,
    )


@triton.jit
def _own_sum(X, at, mean, rstd, change, centre, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum psi over a program's share, or its distance from `centre` where that is given."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _ = _elements(e, at, ROWS, COLUMNS)
        y, _, _, _ = _psi((_values(X, offset, mask) - mean) * rstd, change)
        if centre is not None:
            y = tl.abs(y - centre)
        total += tl.where(mask, y, 0.0)
    return _total(total)


@triton.jit
def _forward(
    Out,
    X,
    Weight,
    Bias,
    Stats,
    Parts,
    given,
    STAGE: tl.constexpr,
    where,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stage 0 finds mean and variance, 1 the moments, 2 and 3 the noise's scale, 4 writes; -1 is
    all at once.
    """
    at = _sets(where, COLUMNS)
    t, elements = tl.load(given.t), where.elements

    if STAGE <= 0:
        mean, squares = _own_mean(X, at, ROWS, COLUMNS)
        if STAGE == 0:
            _leave(Parts, _MEANS, at, mean)
            _leave(Parts, _SQUARES, at, squares)
    if STAGE > 0:
        mean, squares = _whole_mean(Parts, at, COLUMNS)
    if STAGE != 0:
        var = squares / elements
        var = tl.where(var < 0, 0.0, var)
        rstd = 1 / tl.sqrt(var + given.eps)

    if STAGE == -1 or STAGE == 1:
        moments, low, high = _own_moments(X, at, mean, rstd, ROWS, COLUMNS)
        if STAGE == 1:
            _leave_five(Parts, _MOMENTS, at, moments)
            _leave(Parts, _LOW, at, low)
            _leave(Parts, _HIGH, at, high)
    if STAGE > 1:
        moments = _collect_five(Parts, _MOMENTS, at)
        low, high = _whole_extremes(Parts, at, COLUMNS)
    if STAGE == -1 or STAGE > 1:
        step, gradient = _first_step(moments, low, high, elements)
        change = t * step

    spread = tl.zeros([1, COLUMNS], tl.float32)
    if given.seed is not None:
        if STAGE == -1 or STAGE == 2:
            centre = _own_sum(X, at, mean, rstd, change, None, ROWS, COLUMNS)
            if STAGE == 2:
                _leave(Parts, _CENTRE, at, centre)
        if STAGE > 2:
            centre = _collect(Parts, _CENTRE, at)
        if STAGE == -1 or STAGE > 2:
            centre = centre / elements
        if STAGE == -1 or STAGE == 3:
            spread = _own_sum(X, at, mean, rstd, change, centre, ROWS, COLUMNS)
            if STAGE == 3:
                _leave(Parts, _DISTANCES, at, spread)
        if STAGE > 3:
            spread = _collect(Parts, _DISTANCES, at)
        if STAGE == -1 or STAGE > 3:
            spread = spread / elements

    if STAGE == -1 or STAGE == 4:
        if given.seed is not None:
            amount = tl.load(given.factor) * spread
        for e in range(at.start, at.stop, ROWS):
            offset, mask, parameter = _elements(e, at, ROWS, COLUMNS)
            y, _, _, _ = _psi((_values(X, offset, mask) - mean) * rstd, change)
            if given.seed is not None:
                y += _normal(offset, given.seed) * amount
            if Weight is not None:
                y *= _values(Weight, parameter, mask)
            if Bias is not None:
                y += _values(Bias, parameter, mask)
            tl.store(Out + offset, y.to(Out.dtype.element_ty), mask=mask)
        kept = (mean, var, rstd, step) + gradient + (spread,)
        for k in tl.static_range(10):
            _keep(Stats, k, at, kept[k])


@triton.jit
def _backward(
    GradX,
    X,
    Grad,
    Weight,
    Stats,
    Parts,
    given,
    STAGE: tl.constexpr,
    where,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stage 0 leaves sums: of what `eager.pulled_back` takes means of (the gradient of lambda, and
    `direct` and `shift`, plain and times h), of grad * y and of grad. Stage 1 writes; -1 does both
    at once.
    """
    at = _sets(where, COLUMNS)
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    t, elements = tl.load(given.t), where.elements
    mean = _statistic(Stats, _MEAN, at)
    rstd = _statistic(Stats, _RSTD, at)
    change = t * _statistic(Stats, _STEP, at)
    by_m1, by_m2 = _statistic(Stats, _GRADIENT, at), _statistic(Stats, _GRADIENT + 1, at)
    by_m3, by_m45 = _statistic(Stats, _GRADIENT + 2, at), _statistic(Stats, _GRADIENT + 3, at)
    by = StepGradient(by_m1, by_m2, by_m3, by_m45, _statistic(Stats, _GRADIENT + 4, at))

    if STAGE <= 0:
        if given.seed is not None:
            amount = tl.load(given.factor) * _statistic(Stats, _SPREAD, at)
        to_lmbda, direct, direct_h, shift, shift_h, to_weight, to_bias = (
            zero,
            zero,
            zero,
            zero,
            zero,
            zero,
            zero,
        )
        for e in range(at.start, at.stop, ROWS):
            offset, mask, parameter = _elements(e, at, ROWS, COLUMNS)
            grad = _values(Grad, offset, mask)
            h = tl.where(mask, (_values(X, offset, mask) - mean) * rstd, 0.0)
            y, log, u, growth = _psi(h, change)
            g = grad
            if Weight is not None:
                g *= _values(Weight, parameter, mask)
            pulled, moved = _pulls(h, log, growth, g, by)
            moved = tl.where(mask, moved, 0.0)
            to_lmbda += g * _lmbda_derivative(u, log, growth)
            direct += pulled
            direct_h += pulled * h
            shift += moved
            shift_h += moved * h
            if given.seed is not None:
                y += _normal(offset, given.seed) * amount
            to_weight += grad * y
            to_bias += grad
        sums = _total(to_lmbda), _total(direct), _total(direct_h), _total(shift), _total(shift_h)
        _leave(Parts, _TO_WEIGHT, at, _total(to_weight))
        _leave(Parts, _TO_BIAS, at, _total(to_bias))
        if STAGE == 0:
            _leave_five(Parts, 0, at, sums)
    if STAGE == 1:
        sums = _collect_five(Parts, 0, at)
    if STAGE != 0:
        pull = t * (sums[0] / elements)
        centre = (sums[1] + pull * sums[3]) / elements
        tilt = (sums[2] + pull * sums[4]) / elements
        for e in range(at.start, at.stop, ROWS):
            offset, mask, parameter = _elements(e, at, ROWS, COLUMNS)
            h = (_values(X, offset, mask) - mean) * rstd
            _, log, _, growth = _psi(h, change)
            g = _values(Grad, offset, mask)
            if Weight is not None:
                g *= _values(Weight, parameter, mask)
            pulled, moved = _pulls(h, log, growth, g, by)
            grad_x = rstd * (pulled + pull * moved - centre - h * tilt)
            tl.store(GradX + offset, grad_x.to(GradX.dtype.element_ty), mask=mask)


@triton.jit
def _pulls(h, log, growth, g, by):
    """Return g * d psi / d h, and the set's size times d step / d h
    (`power_transform.step_derivative`).
    """
    a = tl.abs(h)
    inverse = 1 / (1 + a)
    a_log = a * log
    grown = log + a_log
    d = grown - a
    even = by.by_m45 * (grown * log - 2 * d + log * (a_log + 2 * d)) + by.by_m3 * log
    moved = (
        by.by_m1 * inverse + by.by_m2 * (d + a_log) + 2 * by.by_v * h + tl.where(h < 0, -even, even)
    )
    return g * ((growth + 1) * inverse), moved


@triton.jit
def _lmbda_derivative(u, log, growth):
    """`power_transform.lmbda_derivative`, with a shorter series on a smaller radius."""
    small = tl.abs(u) < 0.3
    w = tl.where(small, 1.0, u)
    return (
        log * log * tl.where(small, _polynomial(u, _SERIES), ((growth + 1) * w - growth) / (w * w))
    )


@triton.jit
def _affine_gradients(
    Parts, X, Grad, Stats, given, numbering, where, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum grad * y and grad over what one affine parameter multiplies, where that is not one
    normalized set. An element's set is (offset // set_outer) * set_count + offset // set_inner %
    set_count, of `normalized` many.
    """
    at = _sets(where, COLUMNS)
    set_outer, set_inner, set_count, normalized = numbering
    to_weight, to_bias = (
        tl.zeros([ROWS, COLUMNS], tl.float32),
        tl.zeros([ROWS, COLUMNS], tl.float32),
    )
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _ = _elements(e, at, ROWS, COLUMNS)
        of = (offset // set_outer) * set_count + offset // set_inner % set_count
        grad = _values(Grad, offset, mask)
        mean, rstd = _values(Stats, of, mask), _values(Stats + _RSTD * normalized, of, mask)
        h = (_values(X, offset, mask) - mean) * rstd
        y, _, _, _ = _psi(h, tl.load(given.t) * _values(Stats + _STEP * normalized, of, mask))
        if given.seed is not None:
            y += _normal(offset, given.seed) * (
                tl.load(given.factor) * _values(Stats + _SPREAD * normalized, of, mask)
            )
        to_weight += grad * y
        to_bias += grad
    _leave(Parts, 0, at, _total(to_weight))
    _leave(Parts, 1, at, _total(to_bias))


@triton.jit
def _apply(Out, X, Constants, where, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = _sets(where, COLUMNS)
    mean, rstd = _statistic(Constants, 0, at), _statistic(Constants, 1, at)
    change = _statistic(Constants, 2, at)
    gamma, beta = _statistic(Constants, 3, at), _statistic(Constants, 4, at)
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _ = _elements(e, at, ROWS, COLUMNS)
        y, _, _, _ = _psi((_values(X, offset, mask) - mean) * rstd, change)
        tl.store(Out + offset, (y * gamma + beta).to(Out.dtype.element_ty), mask=mask)


class _Launch:
    """How the sets of a tensor are shared out to programs."""

    def __init__(self, x: Tensor, geometry: Geometry) -> None:
        outer, inner, runs, lane = geometry.outer, geometry.inner, geometry.runs, geometry.lane
        elements = runs.size * (1 if geometry.columns else lane.size)
        tasks = outer.size * inner.size
        self.columns = _COLUMNS if geometry.columns else 1
        self.rows = min(triton.next_power_of_2(elements), _TILE // self.columns)
        most = triton.cdiv(elements, _ROUNDS * self.rows)
        share = triton.cdiv(elements, min(most, triton.cdiv(_programs(x.device), tasks)))
        self.splits = triton.cdiv(elements, share)
        self.grid = (tasks, self.splits)
        strides = outer.stride, inner.size, inner.stride, runs.stride, lane.size
        self.where = _Where(
            *strides, inner.affine, runs.affine, lane.affine, geometry.sets, elements, share
        )

    def run(self, kernel: Any, *arguments: Any) -> None:
        kernel[self.grid](*arguments, self.where, self.rows, self.columns)

    def parts(self, fields: int, x: Tensor) -> Tensor:
        """Room for `fields` partial sums of each set."""
        return torch.empty(
            fields, self.splits, self.where.sets, dtype=torch.float32, device=x.device
        )


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


READS_STRENGTH = False


def forward(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions
) -> Tensor:
    """See `eager.forward`."""
    layout = options.layout
    geometry = geometry_of(layout.shape, layout.dims, layout.affine, _COLUMNS)
    if geometry is None:
        return eager.forward(out, x, weight, bias, options)
    out, x = layout.view(out), layout.view(x)
    weight, bias = (None if p is None else layout.view(p, layout.affine) for p in (weight, bias))
    launch, given = (
        _Launch(x, geometry),
        _Options(options.t, options.eps, options.factor, options.seed),
    )
    kept = (1 if d in layout.dims else n for d, n in enumerate(x.shape))
    stats = torch.empty((FIELDS, *kept), dtype=torch.float32, device=x.device)
    pointers = out, x, weight, bias, stats, launch.parts(_FORWARD_PARTS, x)
    stages = range(5) if options.seed is not None else (0, 1, 4)
    for stage in stages if launch.splits > 1 else (_ALL,):
        launch.run(_forward, *pointers, given, stage)
    return stats


def backward(
    grad_x: Tensor,
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    options: KernelOptions,
) -> Tensor:
    """See `eager.backward`."""
    layout = options.layout
    affine, dims = layout.affine, layout.dims
    geometry = geometry_of(layout.shape, dims, affine, _COLUMNS)
    if geometry is None:
        return eager.backward(grad_x, x, grad, weight, stats, options)
    grad_x, x, grad = layout.view(grad_x), layout.view(x), layout.view(grad)
    weight = None if weight is None else layout.view(weight, affine)
    launch, given = (
        _Launch(x, geometry),
        _Options(options.t, options.eps, options.factor, options.seed),
    )
    parts = launch.parts(_BACKWARD_PARTS, x)
    for stage in (0, 1) if launch.splits > 1 else (_ALL,):
        launch.run(_backward, grad_x, x, grad, weight, stats, parts, given, stage)
    # one parameter a set, or several sets
    if all(affine[d] == 1 for d in dims):
        sums = parts[_TO_WEIGHT.value :].sum(1).view(2, *stats.shape[1:])
        return sums.sum_to_size(2, *affine)

    # Another pass over the sets of elements that share a parameter
    runs = [(n == 1, size) for n, size in zip(affine, x.shape, strict=True)]
    merged = [
        (summed, math.prod(n for _, n in run)) for summed, run in groupby(runs, key=itemgetter(0))
    ]
    shape, summed = (
        tuple(n for _, n in merged),
        tuple(d for d, (over, _) in enumerate(merged) if over),
    )
    of_parameters = geometry_of(shape, summed, (1,) * len(shape), _COLUMNS)
    if of_parameters is None:
        raise AssertionError(
            f"no layer has affine parameters of shape {affine} on sets over {dims}"
        )
    launch = _Launch(x, of_parameters)
    shares = launch.parts(2, x)
    outer, inner = geometry.outer, geometry.lane if geometry.columns else geometry.inner
    numbering = outer.stride or x.numel(), inner.stride or x.numel(), inner.size, geometry.sets
    launch.run(_affine_gradients, shares, x, grad, stats, given, numbering)
    return shares.sum(1).view(2, *affine)


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """See `eager.apply`."""
    geometry = geometry_of(tuple(x.shape), dims, tuple(constants.shape[1:]), _COLUMNS)
    if geometry is None:
        eager.apply(out, x, dims, constants)
    else:
        _Launch(x, geometry).run(_apply, out, x, constants)
