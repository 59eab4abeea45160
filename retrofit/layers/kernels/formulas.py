"""Algorithm 1 of Eftekhari & Papyan (2025) on a whole tensor, and the closed form of its backward.

The one definition that eager torch runs and that a compiler traces; normality.cpp and the Triton kernels mirror it.
Nothing here is seen by autograd. Everything is computed in float32 (float64 for float64 input).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from retrofit.layers.power_transform import Reductions, StepGradient, first_step, lmbda_derivative, step_derivative

_NEAR_ZERO = 1e-20  # stands for p = 0: expm1(p * l) / p is then l, to the bit


class Kept(NamedTuple):
    """What is kept of each set for the backward: its statistics, the step, its gradient, and the noise's scale."""

    mean: Tensor
    var: Tensor
    rstd: Tensor
    step: Tensor
    by_m1: Tensor
    by_m2: Tensor
    by_m3: Tensor
    by_m45: Tensor
    by_v: Tensor
    spread: Tensor


FIELDS = len(Kept._fields)  # numbers of `Kept`, stacked in its order


def compute_dtype(x: Tensor) -> torch.dtype:
    """Float64 stays; everything else is computed in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


Noise = Callable[[Tensor], Tensor]  # the noise to add, of the input's shape, by the spread of each set


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, t: Tensor, eps: float, noise: Noise | None, over: Reductions
) -> tuple[Tensor, Tensor]:
    """Return the result in `x`'s dtype and `Kept` of each set, stacked; `weight` and `bias` broadcast to `x`."""
    values = x.to(compute_dtype(x))
    mean, var = _mean_and_variance(values, over)
    rstd = torch.rsqrt(var + eps)
    y, step, gradient = gaussianized((values - mean) * rstd, t, over)
    spread = torch.zeros_like(mean)
    if noise is not None:
        (centre,) = over.means([y])
        (spread,) = over.means([(y - centre).abs()])
        y = y + noise(spread)
    stats = torch.stack(Kept(mean, var, rstd, step, *gradient, spread))
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
    newton = first_step(h, over, log)
    return transform(h, log, t * newton.step)[0], newton.step, newton.gradient()


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
