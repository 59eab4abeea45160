"""Algorithm 1 of Eftekhari & Papyan (2025) on a whole tensor, the closed form of its backward, and its noise.

The one definition that eager torch runs and that a compiler traces; normality.cpp and the Triton kernels mirror it.
Nothing here is seen by autograd. Everything is computed in float32 (float64 for float64 input).

Noise is a function of position and seed, so that it needs no storing and no order. Element i of seed (s0, s1) is a hash
of i, mapped through the normal quantile: whoever computes it, on whatever device and in whatever order, gets the same
number (to the rounding of a logarithm). Tails reach 6.3 standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retrofit.layers.power_transform import Reductions, StepGradient, first_step, lmbda_derivative, step_derivative

_NEAR_ZERO = 1e-20  # stands for p = 0: expm1(p * l) / p is then l, to the bit

FIELDS = 10
"""Numbers kept of each set, stacked: mean, variance, 1 / std, lambda's step, its `StepGradient`, the noise's scale."""

# Noise: |z| = (1 - v) * P(w) / Q(w), with v the two-sided tail probability and w = -log(v * (2 - v)); 1e-7 relative
NUMERATOR = (
    *(2.928853064076975e-05, 0.0009993967832997441, 0.011874854564666748),
    *(0.08982928842306137, 0.4523918926715851, 1.2533142566680908),
)
DENOMINATOR = (
    *(1.0084270343213575e-06, 0.00016978503845166415, 0.0022797624114900827),
    *(0.032670583575963974, 0.09915989637374878, 1.0),
)
# Shifts and multipliers of an integer finaliser with full avalanche ("triple32" of Wellons' hash-prospector)
_ROUNDS = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))

Noise = Callable[[Tensor], Tensor]  # the noise to add, of the input's shape, by the spread of each set


def compute_dtype(x: Tensor) -> torch.dtype:
    """Float64 stays; everything else is computed in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, t: Tensor, eps: float, noise: Noise | None, over: Reductions
) -> tuple[Tensor, Tensor]:
    """Return the result in `x`'s dtype and `FIELDS` numbers of each set; `weight` and `bias` broadcast to `x`."""
    values = x.to(compute_dtype(x))
    mean, var = _mean_and_variance(values, over)
    rstd = torch.rsqrt(var + eps)
    y, step, gradient = gaussianized((values - mean) * rstd, t, over)
    spread = torch.zeros_like(mean)
    if noise is not None:
        (centre,) = over.means([y])
        (spread,) = over.means([(y - centre).abs()])
        y = y + noise(spread)
    stats = torch.stack([mean, var, rstd, step, *gradient, spread])
    return affine(y, weight, bias).to(x.dtype), stats


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, t: Tensor, stats: Tensor, noise: Noise | None, over: Reductions
) -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to `x`, in its dtype, and y with its noise, which gamma multiplied."""
    values, grad = x.to(compute_dtype(x)), grad.to(compute_dtype(x))
    mean, _, rstd, step, *gradient, spread = stats.unbind()
    h = (values - mean) * rstd
    g = grad if weight is None else grad * weight.to(values.dtype)
    y, direct, to_lmbda, shift = pulls(g, h, t, step, StepGradient(*gradient))
    # d psi / d h is linear in the mean gradient of lambda, so one reduction serves all three projections.
    to_lmbda, d0, dh, s0, sh = over.means([to_lmbda, direct, direct * h, shift, shift * h])
    to_lmbda = t * to_lmbda
    pull = direct + to_lmbda * shift
    grad_x = rstd * (pull - (d0 + to_lmbda * s0) - h * (dh + to_lmbda * sh))
    if noise is not None:
        y = y + noise(spread)
    return grad_x.to(x.dtype), y


def gaussianized(h: Tensor, t: Tensor, over: Reductions) -> tuple[Tensor, Tensor, StepGradient]:
    """Return psi of standardised values by t times their step, the step of each set, and its gradient."""
    log = torch.log1p(h.abs())
    step, gradient = first_step(h, over, log)
    return transform(h, log, t * step)[0], step, gradient


def pulls(
    grad: Tensor, h: Tensor, t: Tensor, step: Tensor, gradient: StepGradient
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return psi, `grad` times its derivatives by h and by lambda, and the set's size times d step / d h."""
    a = h.abs()
    log, inverse = torch.log1p(a), 1 / (1 + a)
    y, u, growth = transform(h, log, t * step)
    direct = grad * ((growth + 1) * inverse)  # psi' = exp(u) / (1 + a)
    return y, direct, grad * lmbda_derivative(u, log, growth), step_derivative(h, a, log, inverse, gradient)


def apply(x: Tensor, constants: Tensor) -> Tensor:
    """Return the affine of the transform of `x` by five numbers a set: mean, 1 / std, lambda - 1, gamma and beta."""
    mean, rstd, change, gamma, beta = constants.unbind()
    h = (x.to(constants.dtype) - mean) * rstd
    y, _, _ = transform(h, torch.log1p(h.abs()), change)
    return (y * gamma + beta).to(x.dtype)


def _mean_and_variance(x: Tensor, over: Reductions) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, the mean corrected once so that a large constant set has neither offset nor spread."""
    (mean,) = over.means([x])
    centred = x - mean
    offset, power = over.means([centred, centred * centred])
    return mean + offset.nan_to_num(0.0), (power - offset * offset).clamp_min(0)


def transform(h: Tensor, log: Tensor, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return psi(h; 1 + change), u = p * l and expm1(u), of which psi is s / p times; `log` is log(1 + |h|)."""
    positive, negative = (torch.where(p == 0, _NEAR_ZERO, p) for p in (1 + change, 1 - change))
    below = h < 0
    u = log * torch.where(below, negative, positive)
    growth = torch.expm1(u)
    return growth * torch.where(below, -1 / negative, 1 / positive), u, growth


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return y * weight + bias, either of which may be None, in `y`'s dtype."""
    if weight is None:
        return y if bias is None else y + bias.to(y.dtype)
    scaled = y * weight.to(y.dtype)
    return scaled if bias is None else scaled + bias.to(y.dtype)


def normal(shape: Sequence[int], seed: Tensor, strides: Sequence[int] | None = None, first: int = 0) -> Tensor:
    """Return standard normal float32 numbers of `shape` by a seed of two int32 words. An element's position (modulo
    2^32) is `first` plus its indices times `strides`, those of a contiguous tensor if None.
    """
    if strides is None:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    key = seed[0] + ((first + 2**31) % 2**32 - 2**31)
    for axis, stride in enumerate(strides):
        steps = torch.arange(shape[axis], dtype=torch.int32, device=seed.device) * stride
        key = key + steps.view(-1, *(1,) * (len(shape) - axis - 1))
    for place, (shift, multiplier) in enumerate(_ROUNDS):
        key = (_mix(key, shift) + (seed[1] if place == 1 else 0)) * multiplier
    key = _mix(key, 14)
    v = (key & 0x7FFFFFFF).to(torch.float32) * 2.0**-31 + 2.0**-32
    w = -torch.log(v * (2 - v))
    numerator, denominator = torch.zeros_like(w), torch.zeros_like(w)
    for p, q in zip(NUMERATOR, DENOMINATOR, strict=True):  # highest power first
        numerator, denominator = numerator * w + p, denominator * w + q
    z = (1 - v) * numerator / denominator
    return torch.where(key < 0, -z, z)


def _mix(key: Tensor, shift: int) -> Tensor:
    return key ^ ((key >> shift) & ((1 << (32 - shift)) - 1))  # a logical shift
