"""The formulas as Triton kernels: for CUDA, and for Triton's interpreter on the CPU (TRITON_INTERPRET=1).

A program works on one set, or on a block of neighbouring sets where these alternate in memory; a tile has elements of
a set along its first axis and sets along its second. Where sets are few and large, several programs share one: each
stage then leaves partial sums, which every program of the next stage adds up in the same order. No result depends on
which program comes first. Offsets are 64-bit.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers.kernels import eager, ranks
from retrofit.layers.kernels.formulas import FIELDS
from retrofit.layers.kernels.layout import Geometry, geometry

_ALL = -1  # stages in one launch
_COLUMNS = 16  # neighbouring sets a program works on where they alternate in memory
_TILE = 1024  # elements
_PROGRAMS_PER_PROCESSOR = 4
_ROUNDS = 4  # tiles that a program goes through at least before a set is shared


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


@triton.jit
def _sets(outer_stride, inner, inner_stride, length, COLUMNS: tl.constexpr):
    """Return a program's block, its sets' lanes, where each starts, its column in `stats`, and whether it is one."""
    task = tl.program_id(0).to(tl.int64)
    o, i = task // inner, task % inner
    lane = tl.arange(0, COLUMNS).to(tl.int64)
    base = o * outer_stride + i * inner_stride + lane
    column = task + lane if COLUMNS == 1 else o * length + i * inner_stride + lane
    there = lane == 0 if COLUMNS == 1 else i * inner_stride + lane < length
    return i, lane, base, column, there


@triton.jit
def _elements(e, stop, lane, base, there, run_stride, length, COLUMNS: tl.constexpr):
    """Return the offsets of elements `e` of the sets, which of them there are, and their run and place in it."""
    run = (e // length if COLUMNS == 1 else e).to(tl.int64)[:, None]
    place = (e % length).to(tl.int64)[:, None] if COLUMNS == 1 else lane[None, :]
    offset = run * run_stride + base[None, :] + (place if COLUMNS == 1 else 0)
    return offset, (e < stop)[:, None] & there[None, :], run, place


@triton.jit
def _values(P, offset, mask):
    return tl.load(P + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _collect(Parts, field, splits, sets, column, there):
    """Add up what the programs that share a set left of one sum, in their order."""
    total = tl.load(Parts + field * splits * sets + column, mask=there, other=0.0)
    for s in range(1, splits):
        total += tl.load(Parts + (field * splits + s) * sets + column, mask=there, other=0.0)
    return total


@triton.jit
def _leave(Parts, field, splits, sets, column, there, value):
    tl.store(Parts + (field * splits + tl.program_id(1)) * sets + column, value, mask=there)


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
    i, lane, base, column, there = _sets(outer_stride, inner, inner_stride, length, COLUMNS)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, elements)
    rows = tl.arange(0, ROWS)
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    t = tl.load(T)

    if STAGE <= 0:
        total, offset_total, power = zero, zero, zero
        for e in range(start, stop, ROWS):
            offset, mask, _, _ = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
            total += _values(X, offset, mask)
        mean = tl.sum(total, 0) / (stop - start)
        for e in range(start, stop, ROWS):
            offset, mask, _, _ = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
            centred = tl.where(mask, _values(X, offset, mask) - mean[None, :], 0.0)
            offset_total += centred
            power += centred * centred
        shift = tl.sum(offset_total, 0) / (stop - start)
        squares = tl.sum(power, 0) - shift * shift * (stop - start)
        mean += tl.where(shift == shift, shift, 0.0)
        if STAGE == 0:
            _leave(Parts, 0, splits, sets, column, there, mean)
            _leave(Parts, 1, splits, sets, column, there, squares)
    if STAGE > 0:
        mean = tl.zeros([COLUMNS], tl.float32)
        for s in range(0, splits):
            count = tl.minimum((s + 1) * share, elements) - s * share
            mean += tl.load(Parts + s * sets + column, mask=there, other=0.0) * (count / elements)
        squares = tl.zeros([COLUMNS], tl.float32)
        for s in range(0, splits):
            count = tl.minimum((s + 1) * share, elements) - s * share
            apart = tl.load(Parts + s * sets + column, mask=there, other=0.0) - mean
            squares += tl.load(Parts + (splits + s) * sets + column, mask=there, other=0.0) + apart * apart * count
    if STAGE != 0:
        var = squares / elements
        var = tl.where(var < 0, 0.0, var)
        rstd = 1 / tl.sqrt(var + eps)

    if STAGE == -1 or STAGE == 1:
        s1, s2, s3, s45, sv, low, high = zero, zero, zero, zero, zero, zero, zero
        for e in range(start, stop, ROWS):
            offset, mask, _, _ = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
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
        least, most = tl.min(low, 0), tl.max(high, 0)
        if STAGE == 1:
            _leave(Parts, 2, splits, sets, column, there, m1)
            _leave(Parts, 3, splits, sets, column, there, m2)
            _leave(Parts, 4, splits, sets, column, there, m3)
            _leave(Parts, 5, splits, sets, column, there, m45)
            _leave(Parts, 6, splits, sets, column, there, v)
            _leave(Parts, 7, splits, sets, column, there, least)
            _leave(Parts, 8, splits, sets, column, there, most)
    if STAGE > 1:
        m1 = _collect(Parts, 2, splits, sets, column, there)
        m2 = _collect(Parts, 3, splits, sets, column, there)
        m3 = _collect(Parts, 4, splits, sets, column, there)
        m45 = _collect(Parts, 5, splits, sets, column, there)
        v = _collect(Parts, 6, splits, sets, column, there)
        least, most = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
        for s in range(0, splits):
            least = tl.minimum(least, tl.load(Parts + (7 * splits + s) * sets + column, mask=there, other=0.0))
            most = tl.maximum(most, tl.load(Parts + (8 * splits + s) * sets + column, mask=there, other=0.0))
    if STAGE == -1 or STAGE > 1:
        m1, m2, m3, m45, v = m1 / elements, m2 / elements, m3 / elements, m45 / elements, v / elements
        v = tl.where(v < 1e-30, 1e-30, v)
        ratio = m2 / v
        slope = ratio - m1
        bend = (m45 - m3 * m3) / v
        raw = bend - 2 * ratio * ratio
        curvature = tl.where(raw < 0.1, 0.1, raw)
        step = -slope / curvature
        least = -4 / _log1p(tl.where(-least < 1e-30, 1e-30, -least))
        most = 4 / _log1p(tl.where(most < 1e-30, 1e-30, most))
        free = (step >= least) & (step <= most)
        step = tl.where(step < least, least, tl.where(step > most, most, step))
        change = (t * step)[None, :]

    spread = tl.zeros([COLUMNS], tl.float32)
    if NOISE:
        if STAGE == -1 or STAGE == 2:
            total = zero
            for e in range(start, stop, ROWS):
                offset, mask, _, _ = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
                y, _, _, _ = _psi((_values(X, offset, mask) - mean[None, :]) * rstd[None, :], change)
                total += tl.where(mask, y, 0.0)
            centre = tl.sum(total, 0)
            if STAGE == 2:
                _leave(Parts, 9, splits, sets, column, there, centre)
        if STAGE > 2:
            centre = _collect(Parts, 9, splits, sets, column, there)
        if STAGE == -1 or STAGE > 2:
            centre = centre / elements
        if STAGE == -1 or STAGE == 3:
            total = zero
            for e in range(start, stop, ROWS):
                offset, mask, _, _ = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
                y, _, _, _ = _psi((_values(X, offset, mask) - mean[None, :]) * rstd[None, :], change)
                total += tl.where(mask, tl.abs(y - centre[None, :]), 0.0)
            spread = tl.sum(total, 0)
            if STAGE == 3:
                _leave(Parts, 10, splits, sets, column, there, spread)
        if STAGE > 3:
            spread = _collect(Parts, 10, splits, sets, column, there)
        if STAGE == -1 or STAGE > 3:
            spread = spread / elements

    if STAGE == -1 or STAGE == 4:
        if NOISE:
            amount = (tl.load(Factor) * spread)[None, :]
        for e in range(start, stop, ROWS):
            offset, mask, run, place = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
            y, _, _, _ = _psi((_values(X, offset, mask) - mean[None, :]) * rstd[None, :], change)
            if NOISE:
                y += _normal(offset, Seed) * amount
            at = i * affine_inner + run * affine_run + place * affine_lane
            if Weight is not None:
                y *= _values(Weight, at, mask)
            if Bias is not None:
                y += _values(Bias, at, mask)
            tl.store(Out + offset, y.to(Out.dtype.element_ty), mask=mask)
        first = there & (column * 0 + tl.program_id(1) == 0)
        slopes = tl.where(free, -1 / curvature, 0.0)
        curves = tl.where(free & (raw > 0.1), slope / (curvature * curvature), 0.0)
        tl.store(Stats + column, mean, mask=first)
        tl.store(Stats + sets + column, var, mask=first)
        tl.store(Stats + 2 * sets + column, rstd, mask=first)
        tl.store(Stats + 3 * sets + column, step, mask=first)
        tl.store(Stats + 4 * sets + column, -slopes, mask=first)
        tl.store(Stats + 5 * sets + column, (slopes - 4 * curves * ratio) / v, mask=first)
        tl.store(Stats + 6 * sets + column, -2 * curves * m3 / v, mask=first)
        tl.store(Stats + 7 * sets + column, curves / v, mask=first)
        gradient_v = (-slopes * ratio - curves * bend + 4 * curves * ratio * ratio) / v
        tl.store(Stats + 8 * sets + column, gradient_v, mask=first)
        tl.store(Stats + 9 * sets + column, spread, mask=first)


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
    i, lane, base, column, there = _sets(outer_stride, inner, inner_stride, length, COLUMNS)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, elements)
    rows = tl.arange(0, ROWS)
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    t = tl.load(T)
    mean = _values(Stats, column, there)[None, :]
    rstd = _values(Stats + 2 * sets, column, there)[None, :]
    change = t * _values(Stats + 3 * sets, column, there)[None, :]
    c1 = _values(Stats + 4 * sets, column, there)[None, :]
    c2 = _values(Stats + 5 * sets, column, there)[None, :]
    c3 = _values(Stats + 6 * sets, column, there)[None, :]
    c45 = _values(Stats + 7 * sets, column, there)[None, :]
    cv = 2 * _values(Stats + 8 * sets, column, there)[None, :]

    if STAGE <= 0:
        if NOISE:
            amount = tl.load(Factor) * _values(Stats + 9 * sets, column, there)[None, :]
        q, q0, qh, r0, rh, w, b = zero, zero, zero, zero, zero, zero, zero
        for e in range(start, stop, ROWS):
            offset, mask, run, place = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
            grad = _values(Grad, offset, mask)
            h = tl.where(mask, (_values(X, offset, mask) - mean) * rstd, 0.0)
            y, log, u, growth = _psi(h, change)
            g = grad
            if Weight is not None:
                g *= _values(Weight, i * affine_inner + run * affine_run + place * affine_lane, mask)
            direct, shift = _pulls(h, log, growth, g, c1, c2, c3, c45, cv)
            shift = tl.where(mask, shift, 0.0)
            q += g * _lmbda_derivative(u, log, growth)
            q0 += direct
            qh += direct * h
            r0 += shift
            rh += shift * h
            if NOISE:
                y += _normal(offset, Seed) * amount
            w += grad * y
            b += grad
        to_lmbda, d0, dh, s0, sh = tl.sum(q, 0), tl.sum(q0, 0), tl.sum(qh, 0), tl.sum(r0, 0), tl.sum(rh, 0)
        _leave(Parts, 5, splits, sets, column, there, tl.sum(w, 0))
        _leave(Parts, 6, splits, sets, column, there, tl.sum(b, 0))
        if STAGE == 0:
            _leave(Parts, 0, splits, sets, column, there, to_lmbda)
            _leave(Parts, 1, splits, sets, column, there, d0)
            _leave(Parts, 2, splits, sets, column, there, dh)
            _leave(Parts, 3, splits, sets, column, there, s0)
            _leave(Parts, 4, splits, sets, column, there, sh)
    if STAGE == 1:
        to_lmbda = _collect(Parts, 0, splits, sets, column, there)
        d0 = _collect(Parts, 1, splits, sets, column, there)
        dh = _collect(Parts, 2, splits, sets, column, there)
        s0 = _collect(Parts, 3, splits, sets, column, there)
        sh = _collect(Parts, 4, splits, sets, column, there)
    if STAGE != 0:
        pull = t * (to_lmbda / elements)
        centre = ((d0 + pull * s0) / elements)[None, :]
        tilt = ((dh + pull * sh) / elements)[None, :]
        for e in range(start, stop, ROWS):
            offset, mask, run, place = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
            h = (_values(X, offset, mask) - mean) * rstd
            _, log, _, growth = _psi(h, change)
            g = _values(Grad, offset, mask)
            if Weight is not None:
                g *= _values(Weight, i * affine_inner + run * affine_run + place * affine_lane, mask)
            direct, shift = _pulls(h, log, growth, g, c1, c2, c3, c45, cv)
            grad_x = rstd * (direct + pull[None, :] * shift - centre - h * tilt)
            tl.store(GradX + offset, grad_x.to(GradX.dtype.element_ty), mask=mask)


@triton.jit
def _pulls(h, log, growth, g, c1, c2, c3, c45, cv):
    """Return g * d psi / d h, and the set's size times d step / d h (`estimate.step_derivative`)."""
    a = tl.abs(h)
    inverse = 1 / (1 + a)
    both = a * log
    grown = log + both
    d = grown - a
    odd = c45 * (grown * log - 2 * d + log * (both + 2 * d)) + c3 * log
    shift = c1 * inverse + c2 * (d + both) + cv * h + tl.where(h < 0, -odd, odd)
    return g * ((growth + 1) * inverse), shift


@triton.jit
def _lmbda_derivative(u, log, growth):
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
    _index, lane, base, column, there = _sets(outer_stride, inner, inner_stride, length, COLUMNS)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, elements)
    rows = tl.arange(0, ROWS)
    w, b = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for e in range(start, stop, ROWS):
        offset, mask, _, _ = _elements(e + rows, stop, lane, base, there, run_stride, length, COLUMNS)
        of = (offset // set_outer) * set_count + offset // set_inner % set_count
        grad = _values(Grad, offset, mask)
        h = (_values(X, offset, mask) - _values(Stats, of, mask)) * _values(Stats + 2 * normalized, of, mask)
        y, _, _, _ = _psi(h, tl.load(T) * _values(Stats + 3 * normalized, of, mask))
        if NOISE:
            y += _normal(offset, Seed) * (tl.load(Factor) * _values(Stats + 9 * normalized, of, mask))
        w += grad * y
        b += grad
    _leave(Parts, 0, splits, sets, column, there, tl.sum(w, 0))
    _leave(Parts, 1, splits, sets, column, there, tl.sum(b, 0))


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
    _index, lane, base, column, there = _sets(outer_stride, inner, inner_stride, length, COLUMNS)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, elements)
    mean = _values(Constants, column, there)[None, :]
    rstd = _values(Constants + sets, column, there)[None, :]
    change = _values(Constants + 2 * sets, column, there)[None, :]
    gamma = _values(Constants + 3 * sets, column, there)[None, :]
    beta = _values(Constants + 4 * sets, column, there)[None, :]
    for e in range(start, stop, ROWS):
        rows = e + tl.arange(0, ROWS)
        offset, mask, _, _ = _elements(rows, stop, lane, base, there, run_stride, length, COLUMNS)
        y, _, _, _ = _psi((_values(X, offset, mask) - mean) * rstd, change)
        tl.store(Out + offset, (y * gamma + beta).to(Out.dtype.element_ty), mask=mask)


class _Launch:
    """How the sets of a tensor are shared out to programs."""

    def __init__(self, x: Tensor, place: Geometry) -> None:
        self.device = x.device
        elements = place.runs * (1 if place.columns else place.length)
        tasks = place.outer * place.inner
        self.columns = _COLUMNS if place.columns else 1
        self.rows = min(triton.next_power_of_2(elements), _TILE // self.columns)
        most = triton.cdiv(elements, _ROUNDS * self.rows)
        splits = min(most, triton.cdiv(_programs(x.device), tasks))
        share = triton.cdiv(elements, splits)
        self.splits = triton.cdiv(elements, share)
        self.grid = (tasks, self.splits)
        self.place = (place.outer_stride, place.inner, place.inner_stride, place.run_stride, place.length)
        self.affine = (place.affine_inner, place.affine_run, place.affine_lane)
        self.count = elements
        self.size = (place.sets, elements, share, self.splits)

    def parts(self, fields: int) -> Tensor:
        """Room for `fields` partial sums of each set."""
        return torch.empty(fields, self.splits, self.size[0], dtype=torch.float32, device=self.device)

    def own(self, parts: Tensor, rows: slice) -> Tensor:
        """What the programs left in `rows`, (rows, sets): means over this rank's values, or extremes."""
        found = parts[rows]
        if rows == ranks.MEAN_AND_VARIANCE:
            mean = (found[0] * self._counts).sum(0) / self.count
            return torch.stack([mean, (found[1] + self._counts * (found[0] - mean) ** 2).sum(0) / self.count])
        if rows == ranks.MOMENTS:
            return torch.stack([*found[:5].sum(1) / self.count, found[5].amin(0), found[6].amax(0)])
        return found.sum(1) / self.count

    def put(self, parts: Tensor, rows: slice, whole: Tensor) -> None:
        """Undo `own`, for the next stage to add up."""
        found = parts[rows]
        if rows == ranks.MEAN_AND_VARIANCE:
            found[0], found[1] = whole[0], whole[1] * self._counts
            return
        found.zero_()[:, 0] = whole * self.count
        if rows == ranks.MOMENTS:
            found[5:] = whole[5:, None]

    @cached_property
    def _counts(self) -> Tensor:
        """Values a set of each program, (splits, 1)."""
        share = self.size[2]
        return torch.tensor(
            [[min((s + 1) * share, self.count) - s * share] for s in range(self.splits)],
            dtype=torch.int64,
            device=self.device,
        )


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
    place = geometry(tuple(x.shape), dims, affine, _COLUMNS)
    if place is None or x.dtype == torch.float64:
        return eager.forward(out, x, weight, bias, t, dims, eps, factor, seed, group)
    launch, noise = _Launch(x, place), seed is not None
    kept = (1 if d in dims else n for d, n in enumerate(x.shape))
    stats = torch.empty((FIELDS, *kept), dtype=torch.float32, device=x.device)
    seed, parts = _moved(seed, x), launch.parts(ranks.ROWS)
    pointers = out, x, _flat(weight), _flat(bias), stats, parts, t, _moved(factor, x), seed

    def run(stage: int) -> None:
        _forward[launch.grid](
            *pointers, *launch.place, *launch.affine, *launch.size, eps, stage, noise, launch.rows, launch.columns
        )

    if group is None and launch.splits == 1:
        run(_ALL)
        return stats
    for stage, rows in ranks.forward_stages(noise):
        run(stage)
        if group is not None:
            launch.put(parts, rows, ranks.share_forward(stage, launch.own(parts, rows), launch.count, group))
    run(ranks.LAST)
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
) -> tuple[Tensor, Tensor]:
    """See `eager.backward`."""
    place = geometry(tuple(x.shape), dims, affine, _COLUMNS)
    if place is None or x.dtype == torch.float64:
        return eager.backward(grad_x, x, grad, weight, t, stats, dims, factor, seed, affine, group)
    launch, noise = _Launch(x, place), seed is not None
    seed, factor, parts = _moved(seed, x), _moved(factor, x), launch.parts(7)
    pointers = grad_x, x, grad, _flat(weight), stats, parts, t, factor, seed

    def run(stage: int) -> None:
        _backward[launch.grid](
            *pointers, *launch.place, *launch.affine, *launch.size, stage, noise, launch.rows, launch.columns
        )

    if group is None and launch.splits == 1:
        run(_ALL)
    else:
        run(0)
        if group is not None:
            rows = ranks.BACKWARD
            launch.put(parts, rows, ranks.average(launch.own(parts, rows), launch.count, group))
        run(1)
    if all(affine[d] == 1 for d in dims):  # one parameter a set, or several sets
        sums = parts[5:].sum(1).view(2, *stats.shape[1:])
        grad_weight, grad_bias = (s.sum_to_size(affine) for s in sums)
        return grad_weight, grad_bias

    runs = [
        (axis, math.prod(n for _, n in run))
        for axis, run in groupby(zip((n == 1 for n in affine), x.shape, strict=True), _first)
    ]
    over = geometry(
        tuple(n for _, n in runs), tuple(d for d, (summed, _) in enumerate(runs) if summed), (1,) * len(runs), _COLUMNS
    )
    if over is None:
        raise AssertionError(f"no layer has affine parameters of shape {affine} on sets over {dims}")
    launch = _Launch(x, over)
    shares = launch.parts(2)
    width = place.length if place.columns else place.inner
    found = place.outer_stride or x.numel(), 1 if place.columns else place.inner_stride or x.numel(), width, place.sets
    _affine_gradients[launch.grid](
        shares, x, grad, stats, t, factor, seed, *launch.place, *launch.size, *found, noise, launch.rows, launch.columns
    )
    grad_weight, grad_bias = shares.sum(1).view(2, *affine)
    return grad_weight, grad_bias


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """See `eager.apply`."""
    place = geometry(tuple(x.shape), dims, tuple(constants.shape[1:]), _COLUMNS)
    if place is None or x.dtype == torch.float64:
        eager.apply(out, x, dims, constants)
        return
    launch = _Launch(x, place)
    _apply[launch.grid](out, x, constants, *launch.place, *launch.size, launch.rows, launch.columns)


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach().contiguous()


def _moved(tensor: Any, x: Tensor) -> Any:
    return None if tensor is None else tensor.to(x.device)


def _first(entry: tuple[bool, int]) -> bool:
    return entry[0]
