"""The power transform psi of standardized elements, its derivatives, and the step of its lambda:
`power_transform.py` for a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from retrofit.layers.kernels.triton.arithmetic import LN2, exp2, log1p, log2, polynomial
from retrofit.layers.power_transform import LOG_STRETCH, MIN_CURVATURE, TINY

_LOG_STRETCH, _MIN_CURVATURE, _TINY = map(tl.constexpr, (LOG_STRETCH, MIN_CURVATURE, TINY))
# |p| below which expm1(p * log) / p is not taken as it stands, and |p * log| below which a series
# stands for it
_SMALL_POWER, _SMALL = tl.constexpr(0.5), tl.constexpr(0.2)
# expm1(u) / u, and its derivative, highest power first
_GROWTH = tl.constexpr((1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0))
_SLOPE = tl.constexpr((1 / 144, 1 / 30, 1 / 8, 1 / 3, 1 / 2))


@triton.jit
def powers_of(change):
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
def psi(h, powers):
    """Return psi of h by the powers of lambda, and what its derivatives share."""
    up, down, by_up, by_down = powers[:4]
    a = tl.abs(h)
    negative = h < 0
    log_2 = log2(1 + a)
    log = log_2 * LN2
    exponent = tl.where(negative, down, up)
    inverse = tl.where(negative, by_down, by_up)
    grown = exp2(exponent * log_2)
    signed = tl.where(negative, -log, log)
    u = exponent * log
    if len(powers) == 4:
        growth = a * grown + (grown - 1)
        y = growth * inverse
    else:
        growth = a * powers[4] * grown + (grown - 1)
        y = tl.where(tl.abs(u) < powers[5], signed * polynomial(u, _GROWTH), growth * inverse)
    return _Psi(y, a, log_2, log, signed, negative, grown, growth, inverse, u)


@triton.jit
def _step_derivative(a, log, negative, inverse, slopes):
    """Return the set's size times d step / d h, but for the moment v
    (`power_transform.step_derivative`); `inverse` is 1 / (1 + |h|).
    """
    by_m1, by_m2, by_m3, by_m45 = slopes
    grown = log + a * log
    d = grown - a
    both = grown + d
    even = by_m45 * (log * (2 * both - log) - 2 * d) + by_m3 * log
    return by_m1 * inverse + by_m2 * (both - log) + tl.where(negative, -even, even)


@triton.jit
def pulls(h, g, powers, slopes):
    """Return y, g * d psi / d h, g * d psi / d lambda, and the set's size times d step / d h but
    for the moment v; `slopes` are the step's derivatives.
    """
    value = psi(h, powers)
    inverse = exp2(-value.log2)
    by_lmbda = value.inverse * (value.signed * (value.growth + 1) - value.y)
    if len(powers) == 4:
        direct = g * value.grown
    else:
        direct = g * value.grown * (inverse + powers[4] * (1 - inverse))
        series = value.log * value.log * polynomial(value.u, _SLOPE)
        by_lmbda = tl.where(tl.abs(value.u) < powers[5], series, by_lmbda)
    of_step = _step_derivative(value.a, value.log, value.negative, inverse, slopes)
    return value.y, direct, g * by_lmbda, of_step


@triton.jit
def step_moments(h):
    """Return what `power_transform.first_step` takes means of, but for v."""
    a = tl.abs(h)
    log = log2(1 + a) * LN2
    grown = log + a * log
    d = grown - a
    return tl.where(h < 0, -log, log), h * d, d, a * (grown * log - 2 * d) + d * d


@triton.jit
def first_step(m1, m2, m3, m45, v, low, high):
    """Return the step of `power_transform.first_step`, within `step_bounds`, and its gradient."""
    v = tl.where(v < _TINY, _TINY, v)
    ratio = m2 / v
    slope = ratio - m1
    bend = (m45 - m3 * m3) / v
    raw = bend - 2 * ratio * ratio
    curvature = tl.where(raw < _MIN_CURVATURE, _MIN_CURVATURE, raw)
    step = -slope / curvature
    least = -_LOG_STRETCH / log1p(tl.where(-low < _TINY, _TINY, -low))
    most = _LOG_STRETCH / log1p(tl.where(high < _TINY, _TINY, high))
    free = (step >= least) & (step <= most)
    step = tl.where(step < least, least, tl.where(step > most, most, step))
    by_slope = tl.where(free, -1 / curvature, 0.0)
    by_bend = tl.where(free & (raw > _MIN_CURVATURE), slope / (curvature * curvature), 0.0)
    by_v = (-by_slope * ratio - by_bend * bend + 4 * by_bend * ratio * ratio) / v
    by_m2 = (by_slope - 4 * by_bend * ratio) / v
    return step, -by_slope, by_m2, -2 * by_bend * m3 / v, by_bend / v, by_v
