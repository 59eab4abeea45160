"""Activations and their derivatives, for whatever their argument."""

from __future__ import annotations

import triton
import triton.language as tl

from retrofit.layers.kernels.channelwise import Activation
from retrofit.layers.kernels.triton.arithmetic import exp2, polynomial, reciprocal

# Numbers of activations, as `channelwise.known` has them, and the identity
_CLAMP, _LEAKY, _HARDSWISH, _SILU, _GELU = map(tl.constexpr, range(5))
IDENTITY: Activation = (5, 0.0, 0.0)
# The normal distribution's tail beyond a is exp(-a^2 / 2) * t * polynomial(t), t = 1 / (1 + near * a),
# as in Abramowitz and Stegun 7.1.26; fitted to an error of 1.3e-8 / max(1, a)
_NEAR = tl.constexpr(0.28)
_TAIL = tl.constexpr(
    (
        *(-0.10608119655055692, 0.39107580301510503, -0.23909196522040166),
        *(0.2707263783295853, 0.06671778091327663, 0.11665319951299163),
    )
)


@triton.jit
def phi(x, lower, upper, KIND):
    """Return an activation and its derivative. A clamp takes both bounds; a leaky ReLU takes its
    slope below 0 in the place of the lower one.
    """
    if KIND == _CLAMP:
        y = tl.where(x < lower, lower, tl.where(x > upper, upper, x))
        slope = tl.where((x > lower) & (x < upper), 1.0, 0.0)
    elif KIND == _LEAKY:
        slope = tl.where(x > 0, 1.0, lower)
        y = x * slope
    elif KIND == _HARDSWISH:
        share = x * (1 / 6) + 0.5
        share = tl.where(share < 0, 0.0, tl.where(share > 1, 1.0, share))
        y = x * share
        slope = tl.where(x < -3, 0.0, tl.where(x <= 3, x * (1 / 3) + 0.5, 1.0))
    elif KIND == _SILU:
        share = reciprocal(1 + exp2(x * -1.4426950408889634))
        y = x * share
        slope = share + (x - y) * share
    elif KIND == _GELU:
        density = exp2(x * x * -0.7213475204444817)
        near = reciprocal(1 + _NEAR * tl.abs(x))
        tail = density * (near * polynomial(near, _TAIL))
        share = tl.where(x < 0, tail, 1 - tail)
        y = x * share
        slope = share + x * density * 0.3989422804014327
    else:
        y = x
        slope = tl.zeros_like(x) + 1
    return y, slope
