"""The formulas as Triton kernels: for CUDA, and for Triton's interpreter on the CPU (TRITON_INTERPRET=1).

A program works on one set, or on a block of neighbouring sets where these alternate in memory; a tile has elements of
a set along its first axis and sets along its second. Where sets are few and large, several programs share one: each
stage then leaves partial sums, which every program of the next stage adds up in the same order. No result depends on
which program comes first. Offsets are 64-bit.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers.kernels import eager
from retrofit.layers.kernels.formulas import FIELDS
from retrofit.layers.kernels.layout import Geometry, geometry_of
from retrofit.layers.lambda_estimate import LOG_STRETCH, MIN_CURVATURE, TINY, StepGradient

_ALL = -1  # stages in one launch
_COLUMNS = 16  # neighbouring sets a program works on where they alternate in memory
_TILE = 1024  # elements
_PROGRAMS_PER_PROCESSOR = 4
_ROUNDS = 4  # tiles that a program goes through at least before a set is shared

_LOG_STRETCH, _MIN_CURVATURE, _TINY = tl.constexpr(LOG_STRETCH), tl.constexpr(MIN_CURVATURE), tl.constexpr(TINY)
_PARTS = 11  # rows of the forward's partial sums
# What is kept of each set, as `formulas.FIELDS` counts it, and the rows of the forward's parts.
_MEAN, _VAR, _RSTD, _STEP, _BY_M1, _BY_M2, _BY_M3, _BY_M45, _BY_V, _SPREAD = map(tl.constexpr, range(FIELDS))
_MEANS, _SQUARES, _M1, _M2, _M3, _M45, _V, _LOW, _HIGH, _CENTRE, _DISTANCES = map(tl.constexpr, range(_PARTS))


@triton.jit
def _log_of(k, m):
    """Log of 2^(k / 2^23) * (1 + m), as normality.cpp has it."""
    p = 0.05413185432553291 * m - 0.12067317217588425
    p = p * m + 0.14983916282653809
    p = p * m - 0.1682281792163849
    p = p * m + 0.19977077841758728
    p = p * m - 0.24993441998958588
    p = p * m + 0.3333354890346527
    p = p * m - 0.5000005960464478
    return k.to(tl.float32) * (0.6931471805599453 / 8388608) + (p * (m * m) + m)


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
    p = 0.0013882494531571865 * r + 0.00836664717644453
    p = p * r + 0.04166720435023308
    p = p * r + 0.16666541993618011
    p = p * r + 0.4999999701976776
    return (p * (r * r) + r) * scale + (scale - 1)


@triton.jit
def _normal(position, Seed):
    """See noise.py."""
    key = position.to(tl.uint32) + tl.load(Seed).to(tl.uint32, bitcast=True)
    key = (key ^ (key >> 17)) * 0xED5AD4BB
    key = ((key ^ (key >> 11)) + tl.load(Seed + 1).to(tl.uint32, bitcast=True)) * 0xAC4C1B51
    key = (key ^ (key >> 15)) * 0x31848BAB
    key = key ^ (key >> 14)
    v = (key & 0x7FFFFFFF).to(tl.int32, bitcast=True).to(tl.float32) * (1 / 2147483648) + (1 / 4294967296)
    q = v * (2 - v)
    k = (q.to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
    w = -_log_of(k, q * (0x3F800000 - k).to(tl.float32, bitcast=True) - 1)
    top = 2.928853064076975e-05 * w + 0.0009993967832997441
    top = top * w + 0.011874854564666748
    top = top * w + 0.08982928842306137
    top = top * w + 0.4523918926715851
    top = top * w + 1.2533142566680908
    bottom = 1.0084270343213575e-06 * w + 0.00016978503845166415
    bottom = bottom * w + 0.0022797624114900827
    bottom = bottom * w + 0.032670583575963974
    bottom = bottom * w + 0.09915989637374878
    bottom = bottom * w + 1.0
    z = (1 - v) * top / bottom
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


class _Sets(NamedTuple):
    """What a program works on: its sets, a tile's columns, and its share of their elements.

    `block` counts the blocks of neighbouring sets, `lane` a set within one. `base` is the offset of a set's first
    element, `column` the set's number in `Stats` and `Parts`, and `there` says whether the lane holds a set at all. The
    share are the elements from `start` up to `stop`.
    """

    block: Any
    lane: Any
    base: Any
    column: Any
    there: Any
    start: Any
    stop: Any


@triton.jit
def _sets(outer_stride, inner, inner_stride, length, elements, share, COLUMNS: tl.constexpr):
    task = tl.program_id(0).to(tl.int64)
    o, i = task // inner, task % inner
    lane = tl.arange(0, COLUMNS).to(tl.int64)
    base = o * outer_stride + i * inner_stride + lane
    column = task + lane if COLUMNS == 1 else o * length + i * inner_stride + lane
    there = lane == 0 if COLUMNS == 1 else i * inner_stride + lane < length
    start = tl.program_id(1) * share
    return _Sets(i, lane, base, column, there, start, tl.minimum(start + share, elements))


@triton.jit
def _elements(e, at, run_stride, length, COLUMNS: tl.constexpr):
    """Return the offsets of elements `e` of the sets, which of them there are, and their run and lane in it."""
    run = (e // length if COLUMNS == 1 else e).to(tl.int64)[:, None]
    lane = (e % length).to(tl.int64)[:, None] if COLUMNS == 1 else at.lane[None, :]
    offset = run * run_stride + at.base[None, :] + (lane if COLUMNS == 1 else 0)
    return offset, (e < at.stop)[:, None] & at.there[None, :], run, lane


@triton.jit
def _values(P, offset, mask):
    return tl.load(P + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _statistic(Stats, FIELD: tl.constexpr, at, sets):
    """Return one number of each set, to be broadcast over its elements."""
    return _values(Stats + FIELD * sets, at.column, at.there)[None, :]


@triton.jit
def _keep(Stats, FIELD: tl.constexpr, at, sets, value):
    """Store one number of each set, by the first of the programs that share it."""
    first = at.there & (at.column * 0 + tl.program_id(1) == 0)
    tl.store(Stats + FIELD * sets + at.column, value, mask=first)


@triton.jit
def _part(Parts, row, s, splits, sets, at):
    """Load what program `s` of those that share a set left in a row."""
    return tl.load(Parts + (row * splits + s) * sets + at.column, mask=at.there, other=0.0)


@triton.jit
def _collect(Parts, row, splits, sets, at):
    """Add up what the programs that share a set left of one sum, in their order."""
    total = _part(Parts, row, 0, splits, sets, at)
    for s in range(1, splits):
        total += _part(Parts, row, s, splits, sets, at)
    return total


@triton.jit
def _leave(Parts, row, splits, sets, at, value):
    tl.store(Parts + (row * splits + tl.program_id(1)) * sets + at.column, value, mask=at.there)


@triton.jit
def _own_mean(X, at, run_stride, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return mean and sum of squared deviations of a program's share, as `formulas.mean_and_variance` corrects them."""
    rows = tl.arange(0, ROWS)
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    total, offset_total, power = zero, zero, zero
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _, _ = _elements(e + rows, at, run_stride, length, COLUMNS)
        total += _values(X, offset, mask)
    mean = tl.sum(total, 0) / (at.stop - at.start)
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _, _ = _elements(e + rows, at, run_stride, length, COLUMNS)
        centred = tl.where(mask, _values(X, offset, mask) - mean[None, :], 0.0)
        offset_total += centred
        power += centred * centred
    shift = tl.sum(offset_total, 0) / (at.stop - at.start)
    squares = tl.sum(power, 0) - shift * shift * (at.stop - at.start)
    return mean + tl.where(shift == shift, shift, 0.0), squares


@triton.jit
def _whole_mean(Parts, at, elements, share, splits, sets, COLUMNS: tl.constexpr):
    """Merge the programs' means and sums of squared deviations."""
    mean = tl.zeros([COLUMNS], tl.float32)
    for s in range(0, splits):
        count = tl.minimum((s + 1) * share, elements) - s * share
        mean += _part(Parts, _MEANS, s, splits, sets, at) * (count / elements)
    squares = tl.zeros([COLUMNS], tl.float32)
    for s in range(0, splits):
        count = tl.minimum((s + 1) * share, elements) - s * share
        apart = _part(Parts, _MEANS, s, splits, sets, at) - mean
        squares += _part(Parts, _SQUARES, s, splits, sets, at) + apart * apart * count
    return mean, squares


class _Moments(NamedTuple):
    """Sums over a set of what `lambda_estimate.first_step` takes means of, and the set's extremes."""

    m1: Any
    m2: Any
    m3: Any
    m45: Any
    v: Any
    low: Any
    high: Any


@triton.jit
def _own_moments(X, at, mean, rstd, run_stride, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    s1, s2, s3, s45, sv, low, high = zero, zero, zero, zero, zero, zero, zero
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _, _ = _elements(e + rows, at, run_stride, length, COLUMNS)
        h = tl.where(mask, (_values(X, offset, mask) - mean[None, :]) * rstd[None, :], 0.0)
        a = tl.abs(h)
        log = _log1p(a)
        grown = log + a * log
        d = grown - a
        s1 += tl.where(h < 0, -log, log)
        s2 += h * d
        s3 += d
        s45 += a * (grown * log - 2 * d) + d * d
        sv += h * h
        low = tl.where(h < low, h, low)
        high = tl.where(h > high, h, high)
    m1, m2, m3, m45, v = tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0), tl.sum(s45, 0), tl.sum(sv, 0)
    return _Moments(m1, m2, m3, m45, v, tl.min(low, 0), tl.max(high, 0))


@triton.jit
def _leave_moments(Parts, splits, sets, at, moments):
    _leave(Parts, _M1, splits, sets, at, moments.m1)
    _leave(Parts, _M2, splits, sets, at, moments.m2)
    _leave(Parts, _M3, splits, sets, at, moments.m3)
    _leave(Parts, _M45, splits, sets, at, moments.m45)
    _leave(Parts, _V, splits, sets, at, moments.v)
    _leave(Parts, _LOW, splits, sets, at, moments.low)
    _leave(Parts, _HIGH, splits, sets, at, moments.high)


@triton.jit
def _whole_moments(Parts, splits, sets, at, COLUMNS: tl.constexpr):
    m1 = _collect(Parts, _M1, splits, sets, at)
    m2 = _collect(Parts, _M2, splits, sets, at)
    m3 = _collect(Parts, _M3, splits, sets, at)
    m45 = _collect(Parts, _M45, splits, sets, at)
    v = _collect(Parts, _V, splits, sets, at)
    low, high = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for s in range(0, splits):
        low = tl.minimum(low, _part(Parts, _LOW, s, splits, sets, at))
        high = tl.maximum(high, _part(Parts, _HIGH, s, splits, sets, at))
    return _Moments(m1, m2, m3, m45, v, low, high)


class _Newton(NamedTuple):
    """The fields of `lambda_estimate.NewtonStep`, and what they are made of: r = m2 / v and b = (m45 - m3^2) / v."""

    step: Any
    free: Any
    curved: Any
    slope: Any
    curvature: Any
    v: Any
    m3: Any
    ratio: Any
    bend: Any


@triton.jit
def _first_step(moments, elements):
    """`lambda_estimate.first_step` and `step_bounds`: L' = r - m1, L'' = b - 2 r^2, lambda - 1 = -L' / L''."""
    m1, m2, m3, m45 = moments.m1 / elements, moments.m2 / elements, moments.m3 / elements, moments.m45 / elements
    v = moments.v / elements
    v = tl.where(v < _TINY, _TINY, v)
    ratio = m2 / v
    slope = ratio - m1
    bend = (m45 - m3 * m3) / v
    raw = bend - 2 * ratio * ratio
    curvature = tl.where(raw < _MIN_CURVATURE, _MIN_CURVATURE, raw)
    step = -slope / curvature
    least = -_LOG_STRETCH / _log1p(tl.where(-moments.low < _TINY, _TINY, -moments.low))
    most = _LOG_STRETCH / _log1p(tl.where(moments.high < _TINY, _TINY, moments.high))
    free = (step >= least) & (step <= most)
    step = tl.where(step < least, least, tl.where(step > most, most, step))
    return _Newton(step, free, raw > _MIN_CURVATURE, slope, curvature, v, m3, ratio, bend)


@triton.jit
def _keep_gradient(Stats, at, sets, newton):
    """Store `NewtonStep.gradient`: its `slope` and `curve` are d step / d L' and d step / d L'' here."""
    slope = tl.where(newton.free, -1 / newton.curvature, 0.0)
    curve = tl.where(newton.free & newton.curved, newton.slope / (newton.curvature * newton.curvature), 0.0)
    ratio, v = newton.ratio, newton.v
    _keep(Stats, _BY_M1, at, sets, -slope)
    _keep(Stats, _BY_M2, at, sets, (slope - 4 * curve * ratio) / v)
    _keep(Stats, _BY_M3, at, sets, -2 * curve * newton.m3 / v)
    _keep(Stats, _BY_M45, at, sets, curve / v)
    _keep(Stats, _BY_V, at, sets, (-slope * ratio - curve * newton.bend + 4 * curve * ratio * ratio) / v)


@triton.jit
def _own_sum(X, at, mean, rstd, change, centre, run_stride, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum psi over a program's share, or its distance from `centre` where that is given."""
    rows = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _, _ = _elements(e + rows, at, run_stride, length, COLUMNS)
        y, _, _, _ = _psi((_values(X, offset, mask) - mean[None, :]) * rstd[None, :], change)
        if centre is not None:
            y = tl.abs(y - centre[None, :])
        total += tl.where(mask, y, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _forward(
    Out,
    X,
    Weight,
    Bias,
    Stats,
    Parts,
    T,
    Factor,
    Seed,
    outer_stride,
    inner,
    inner_stride,
    run_stride,
    length,
    affine_inner,
    affine_run,
    affine_lane,
    sets,
    elements,
    share,
    splits,
    eps,
    STAGE: tl.constexpr,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stage 0 finds mean and variance, 1 the moments, 2 and 3 the noise's scale, 4 writes; -1 is all at once."""
    at = _sets(outer_stride, inner, inner_stride, length, elements, share, COLUMNS)
    rows = tl.arange(0, ROWS)
    t = tl.load(T)

    if STAGE <= 0:
        mean, squares = _own_mean(X, at, run_stride, length, ROWS, COLUMNS)
        if STAGE == 0:
            _leave(Parts, _MEANS, splits, sets, at, mean)
            _leave(Parts, _SQUARES, splits, sets, at, squares)
    if STAGE > 0:
        mean, squares = _whole_mean(Parts, at, elements, share, splits, sets, COLUMNS)
    if STAGE != 0:
        var = squares / elements
        var = tl.where(var < 0, 0.0, var)
        rstd = 1 / tl.sqrt(var + eps)

    if STAGE == -1 or STAGE == 1:
        moments = _own_moments(X, at, mean, rstd, run_stride, length, ROWS, COLUMNS)
        if STAGE == 1:
            _leave_moments(Parts, splits, sets, at, moments)
    if STAGE > 1:
        moments = _whole_moments(Parts, splits, sets, at, COLUMNS)
    if STAGE == -1 or STAGE > 1:
        newton = _first_step(moments, elements)
        change = (t * newton.step)[None, :]

    spread = tl.zeros([COLUMNS], tl.float32)
    if NOISE:
        if STAGE == -1 or STAGE == 2:
            centre = _own_sum(X, at, mean, rstd, change, None, run_stride, length, ROWS, COLUMNS)
            if STAGE == 2:
                _leave(Parts, _CENTRE, splits, sets, at, centre)
        if STAGE > 2:
            centre = _collect(Parts, _CENTRE, splits, sets, at)
        if STAGE == -1 or STAGE > 2:
            centre = centre / elements
        if STAGE == -1 or STAGE == 3:
            spread = _own_sum(X, at, mean, rstd, change, centre, run_stride, length, ROWS, COLUMNS)
            if STAGE == 3:
                _leave(Parts, _DISTANCES, splits, sets, at, spread)
        if STAGE > 3:
            spread = _collect(Parts, _DISTANCES, splits, sets, at)
        if STAGE == -1 or STAGE > 3:
            spread = spread / elements

    if STAGE == -1 or STAGE == 4:
        if NOISE:
            amount = (tl.load(Factor) * spread)[None, :]
        for e in range(at.start, at.stop, ROWS):
            offset, mask, run, lane = _elements(e + rows, at, run_stride, length, COLUMNS)
            y, _, _, _ = _psi((_values(X, offset, mask) - mean[None, :]) * rstd[None, :], change)
            if NOISE:
                y += _normal(offset, Seed) * amount
            parameter = at.block * affine_inner + run * affine_run + lane * affine_lane
            if Weight is not None:
                y *= _values(Weight, parameter, mask)
            if Bias is not None:
                y += _values(Bias, parameter, mask)
            tl.store(Out + offset, y.to(Out.dtype.element_ty), mask=mask)
        _keep(Stats, _MEAN, at, sets, mean)
        _keep(Stats, _VAR, at, sets, var)
        _keep(Stats, _RSTD, at, sets, rstd)
        _keep(Stats, _STEP, at, sets, newton.step)
        _keep_gradient(Stats, at, sets, newton)
        _keep(Stats, _SPREAD, at, sets, spread)


class _Sums(NamedTuple):
    """What the backward reduces: the gradient of lambda, and `formulas.backward`'s direct and shift, plain and by h."""

    to_lmbda: Any
    direct: Any
    direct_h: Any
    shift: Any
    shift_h: Any


@triton.jit
def _leave_sums(Parts, splits, sets, at, sums):
    _leave(Parts, 0, splits, sets, at, sums.to_lmbda)
    _leave(Parts, 1, splits, sets, at, sums.direct)
    _leave(Parts, 2, splits, sets, at, sums.direct_h)
    _leave(Parts, 3, splits, sets, at, sums.shift)
    _leave(Parts, 4, splits, sets, at, sums.shift_h)


@triton.jit
def _whole_sums(Parts, splits, sets, at):
    to_lmbda = _collect(Parts, 0, splits, sets, at)
    direct = _collect(Parts, 1, splits, sets, at)
    direct_h = _collect(Parts, 2, splits, sets, at)
    shift = _collect(Parts, 3, splits, sets, at)
    return _Sums(to_lmbda, direct, direct_h, shift, _collect(Parts, 4, splits, sets, at))


@triton.jit
def _backward(
    GradX,
    X,
    Grad,
    Weight,
    Stats,
    Parts,
    T,
    Factor,
    Seed,
    outer_stride,
    inner,
    inner_stride,
    run_stride,
    length,
    affine_inner,
    affine_run,
    affine_lane,
    sets,
    elements,
    share,
    splits,
    STAGE: tl.constexpr,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stage 0 leaves the sums, those of grad * y and grad among them, 1 writes; -1 does both at once."""
    at = _sets(outer_stride, inner, inner_stride, length, elements, share, COLUMNS)
    rows = tl.arange(0, ROWS)
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    t = tl.load(T)
    mean = _statistic(Stats, _MEAN, at, sets)
    rstd = _statistic(Stats, _RSTD, at, sets)
    change = t * _statistic(Stats, _STEP, at, sets)
    by_m1, by_m2 = _statistic(Stats, _BY_M1, at, sets), _statistic(Stats, _BY_M2, at, sets)
    by_m3, by_m45 = _statistic(Stats, _BY_M3, at, sets), _statistic(Stats, _BY_M45, at, sets)
    by = StepGradient(by_m1, by_m2, by_m3, by_m45, _statistic(Stats, _BY_V, at, sets))

    if STAGE <= 0:
        if NOISE:
            amount = tl.load(Factor) * _statistic(Stats, _SPREAD, at, sets)
        to_lmbda, direct, direct_h, shift, shift_h, to_weight, to_bias = zero, zero, zero, zero, zero, zero, zero
        for e in range(at.start, at.stop, ROWS):
            offset, mask, run, lane = _elements(e + rows, at, run_stride, length, COLUMNS)
            grad = _values(Grad, offset, mask)
            h = tl.where(mask, (_values(X, offset, mask) - mean) * rstd, 0.0)
            y, log, u, growth = _psi(h, change)
            g = grad
            if Weight is not None:
                g *= _values(Weight, at.block * affine_inner + run * affine_run + lane * affine_lane, mask)
            pulled, moved = _pulls(h, log, growth, g, by)
            moved = tl.where(mask, moved, 0.0)
            to_lmbda += g * _lmbda_derivative(u, log, growth)
            direct += pulled
            direct_h += pulled * h
            shift += moved
            shift_h += moved * h
            if NOISE:
                y += _normal(offset, Seed) * amount
            to_weight += grad * y
            to_bias += grad
        sums = _Sums(tl.sum(to_lmbda, 0), tl.sum(direct, 0), tl.sum(direct_h, 0), tl.sum(shift, 0), tl.sum(shift_h, 0))
        _leave(Parts, 5, splits, sets, at, tl.sum(to_weight, 0))
        _leave(Parts, 6, splits, sets, at, tl.sum(to_bias, 0))
        if STAGE == 0:
            _leave_sums(Parts, splits, sets, at, sums)
    if STAGE == 1:
        sums = _whole_sums(Parts, splits, sets, at)
    if STAGE != 0:
        pull = t * (sums.to_lmbda / elements)
        centre = ((sums.direct + pull * sums.shift) / elements)[None, :]
        tilt = ((sums.direct_h + pull * sums.shift_h) / elements)[None, :]
        for e in range(at.start, at.stop, ROWS):
            offset, mask, run, lane = _elements(e + rows, at, run_stride, length, COLUMNS)
            h = (_values(X, offset, mask) - mean) * rstd
            _, log, _, growth = _psi(h, change)
            g = _values(Grad, offset, mask)
            if Weight is not None:
                g *= _values(Weight, at.block * affine_inner + run * affine_run + lane * affine_lane, mask)
            pulled, moved = _pulls(h, log, growth, g, by)
            grad_x = rstd * (pulled + pull[None, :] * moved - centre - h * tilt)
            tl.store(GradX + offset, grad_x.to(GradX.dtype.element_ty), mask=mask)


@triton.jit
def _pulls(h, log, growth, g, by):
    """Return g * d psi / d h, and the set's size times d step / d h (`lambda_estimate.step_derivative`)."""
    a = tl.abs(h)
    inverse = 1 / (1 + a)
    a_log = a * log
    grown = log + a_log
    d = grown - a
    even = by.by_m45 * (grown * log - 2 * d + log * (a_log + 2 * d)) + by.by_m3 * log
    moved = by.by_m1 * inverse + by.by_m2 * (d + a_log) + 2 * by.by_v * h + tl.where(h < 0, -even, even)
    return g * ((growth + 1) * inverse), moved


@triton.jit
def _lmbda_derivative(u, log, growth):
    """`yeo_johnson.lmbda_derivative`, with a shorter series on a smaller radius."""
    near = u * (1 / 5760) + 1 / 840
    near = near * u + 1 / 144
    near = near * u + 1 / 30
    near = near * u + 1 / 8
    near = near * u + 1 / 3
    near = near * u + 1 / 2
    small = tl.abs(u) < 0.3
    w = tl.where(small, 1.0, u)
    return log * log * tl.where(small, near, ((growth + 1) * w - growth) / (w * w))


@triton.jit
def _affine_gradients(
    Parts,
    X,
    Grad,
    Stats,
    T,
    Factor,
    Seed,
    outer_stride,
    inner,
    inner_stride,
    run_stride,
    length,
    sets,
    elements,
    share,
    splits,
    set_outer,
    set_inner,
    set_count,
    normalized,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum grad * y and grad over what one affine parameter multiplies, where that is not one normalized set.

    The normalized set of the element at an offset is (offset // set_outer) * set_count + offset // set_inner %
    set_count, of `normalized` many.
    """
    at = _sets(outer_stride, inner, inner_stride, length, elements, share, COLUMNS)
    rows = tl.arange(0, ROWS)
    to_weight, to_bias = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _, _ = _elements(e + rows, at, run_stride, length, COLUMNS)
        of = (offset // set_outer) * set_count + offset // set_inner % set_count
        grad = _values(Grad, offset, mask)
        mean, rstd = _values(Stats, of, mask), _values(Stats + _RSTD * normalized, of, mask)
        h = (_values(X, offset, mask) - mean) * rstd
        y, _, _, _ = _psi(h, tl.load(T) * _values(Stats + _STEP * normalized, of, mask))
        if NOISE:
            y += _normal(offset, Seed) * (tl.load(Factor) * _values(Stats + _SPREAD * normalized, of, mask))
        to_weight += grad * y
        to_bias += grad
    _leave(Parts, 0, splits, sets, at, tl.sum(to_weight, 0))
    _leave(Parts, 1, splits, sets, at, tl.sum(to_bias, 0))


@triton.jit
def _apply(
    Out,
    X,
    Constants,
    outer_stride,
    inner,
    inner_stride,
    run_stride,
    length,
    sets,
    elements,
    share,
    splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    at = _sets(outer_stride, inner, inner_stride, length, elements, share, COLUMNS)
    rows = tl.arange(0, ROWS)
    mean, rstd = _statistic(Constants, 0, at, sets), _statistic(Constants, 1, at, sets)
    change = _statistic(Constants, 2, at, sets)
    gamma, beta = _statistic(Constants, 3, at, sets), _statistic(Constants, 4, at, sets)
    for e in range(at.start, at.stop, ROWS):
        offset, mask, _, _ = _elements(e + rows, at, run_stride, length, COLUMNS)
        y, _, _, _ = _psi((_values(X, offset, mask) - mean) * rstd, change)
        tl.store(Out + offset, (y * gamma + beta).to(Out.dtype.element_ty), mask=mask)


class _Launch:
    """How the sets of a tensor are shared out to programs."""

    def __init__(self, x: Tensor, geometry: Geometry) -> None:
        self.device = x.device
        outer, inner, runs, lane = geometry.outer, geometry.inner, geometry.runs, geometry.lane
        elements = runs.size * (1 if geometry.columns else lane.size)
        tasks = outer.size * inner.size
        self.columns = _COLUMNS if geometry.columns else 1
        self.rows = min(triton.next_power_of_2(elements), _TILE // self.columns)
        most = triton.cdiv(elements, _ROUNDS * self.rows)
        splits = min(most, triton.cdiv(_programs(x.device), tasks))
        share = triton.cdiv(elements, splits)
        self.splits = triton.cdiv(elements, share)
        self.grid = (tasks, self.splits)
        self.lie = (outer.stride, inner.size, inner.stride, runs.stride, lane.size)
        self.affine = (inner.affine, runs.affine, lane.affine)
        self.size = (geometry.sets, elements, share, self.splits)

    def parts(self, fields: int) -> Tensor:
        """Room for `fields` partial sums of each set."""
        return torch.empty(fields, self.splits, self.size[0], dtype=torch.float32, device=self.device)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    t: Tensor,
    dims: tuple[int, ...],
    eps: float,
    factor: Tensor,
    seed: Tensor | None,
    group: ProcessGroup | None,
) -> Tensor:
    """See `eager.forward`."""
    affine = next((tuple(p.shape) for p in (weight, bias) if p is not None), (1,) * x.ndim)
    geometry = geometry_of(tuple(x.shape), dims, affine, _COLUMNS)
    if geometry is None or group is not None or x.dtype == torch.float64:
        return eager.forward(out, x, weight, bias, t, dims, eps, factor, seed, group)
    launch, noise = _Launch(x, geometry), seed is not None
    kept = (1 if d in dims else n for d, n in enumerate(x.shape))
    stats = torch.empty((FIELDS, *kept), dtype=torch.float32, device=x.device)
    seed, parts = _moved(seed, x), launch.parts(_PARTS)
    pointers = out, x, _flat(weight), _flat(bias), stats, parts, t, _moved(factor, x), seed

    def run(stage: int) -> None:
        _forward[launch.grid](
            *pointers, *launch.lie, *launch.affine, *launch.size, eps, stage, noise, launch.rows, launch.columns
        )

    stages = range(5) if noise else (0, 1, 4)
    for stage in stages if launch.splits > 1 else (_ALL,):
        run(stage)
    return stats


def backward(
    grad_x: Tensor,
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    t: Tensor,
    stats: Tensor,
    dims: tuple[int, ...],
    factor: Tensor,
    seed: Tensor | None,
    affine: tuple[int, ...],
    group: ProcessGroup | None,
) -> Tensor:
    """See `eager.backward`."""
    geometry = geometry_of(tuple(x.shape), dims, affine, _COLUMNS)
    if geometry is None or group is not None or x.dtype == torch.float64:
        return eager.backward(grad_x, x, grad, weight, t, stats, dims, factor, seed, affine, group)
    launch, noise = _Launch(x, geometry), seed is not None
    seed, factor, parts = _moved(seed, x), _moved(factor, x), launch.parts(7)
    pointers = grad_x, x, grad, _flat(weight), stats, parts, t, factor, seed

    def run(stage: int) -> None:
        _backward[launch.grid](
            *pointers, *launch.lie, *launch.affine, *launch.size, stage, noise, launch.rows, launch.columns
        )

    for stage in (0, 1) if launch.splits > 1 else (_ALL,):
        run(stage)
    if all(affine[d] == 1 for d in dims):  # one parameter a set, or several sets
        sums = parts[5:].sum(1).view(2, *stats.shape[1:])
        return sums.sum_to_size(2, *affine)

    runs = [
        (axis, math.prod(n for _, n in run))
        for axis, run in groupby(zip((n == 1 for n in affine), x.shape, strict=True), _first)
    ]
    over = geometry_of(
        tuple(n for _, n in runs), tuple(d for d, (summed, _) in enumerate(runs) if summed), (1,) * len(runs), _COLUMNS
    )
    if over is None:
        raise AssertionError(f"no layer has affine parameters of shape {affine} on sets over {dims}")
    launch = _Launch(x, over)
    shares = launch.parts(2)
    outer, inner = geometry.outer, geometry.lane if geometry.columns else geometry.inner
    found = outer.stride or x.numel(), inner.stride or x.numel(), inner.size, geometry.sets
    _affine_gradients[launch.grid](
        shares, x, grad, stats, t, factor, seed, *launch.lie, *launch.size, *found, noise, launch.rows, launch.columns
    )
    return shares.sum(1).view(2, *affine)


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """See `eager.apply`."""
    geometry = geometry_of(tuple(x.shape), dims, tuple(constants.shape[1:]), _COLUMNS)
    if geometry is None or x.dtype == torch.float64:
        eager.apply(out, x, dims, constants)
        return
    launch = _Launch(x, geometry)
    _apply[launch.grid](out, x, constants, *launch.lie, *launch.size, launch.rows, launch.columns)


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach().contiguous()


def _moved(tensor: Any, x: Tensor) -> Any:
    return None if tensor is None else tensor.to(x.device)


def _first(entry: tuple[bool, int]) -> bool:
    return entry[0]
