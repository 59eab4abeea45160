"""Arithmetic of single numbers: polynomials, logarithms and powers that take one instruction each,
and the normal numbers of the noise.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from retrofit.layers.kernels.normal_numbers import DENOMINATOR, NUMERATOR

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LN2 = tl.constexpr(0.6931471805599453)
# Coefficients of polynomials, highest power first
_NUMERATOR, _DENOMINATOR = tl.constexpr(NUMERATOR), tl.constexpr(DENOMINATOR)


@triton.jit
def polynomial(x, COEFFICIENTS):
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
def log2(x):
    """One instruction, with an absolute error of 2^-22 beside 1."""
    return tl.log2(x) if _INTERPRETED else _instruction(x, "lg2")


@triton.jit
def exp2(x):
    """One instruction, with a relative error of 2^-22; 1 at 0."""
    return tl.exp2(x) if _INTERPRETED else _instruction(x, "ex2")


@triton.jit
def reciprocal(x):
    """One instruction, with a relative error of 2^-23."""
    return 1 / x if _INTERPRETED else _instruction(x, "rcp")


@triton.jit
def log1p(x):
    """Return log(1 + x) of numbers that are not negative."""
    return tl.where(x < 1e-4, x, tl.log(1 + x))


@triton.jit
def normal(position, Seed):
    """See `normal_numbers.normal`."""
    key = position.to(tl.uint32) + tl.load(Seed).to(tl.uint32, bitcast=True)
    key = (key ^ (key >> 17)) * 0xED5AD4BB
    key = ((key ^ (key >> 11)) + tl.load(Seed + 1).to(tl.uint32, bitcast=True)) * 0xAC4C1B51
    key = (key ^ (key >> 15)) * 0x31848BAB
    key = key ^ (key >> 14)
    whole = (key & 0x7FFFFFFF).to(tl.int32, bitcast=True).to(tl.float32)
    v = whole * (1 / 2147483648) + 1 / 4294967296
    w = -tl.log(v * (2 - v))
    z = (1 - v) * polynomial(w, _NUMERATOR) / polynomial(w, _DENOMINATOR)
    return tl.where(key >= 0x80000000, -z, z)
