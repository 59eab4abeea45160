"""The Yeo-Johnson power transform, exact near its singular points (Eftekhari & Papyan 2025, eq. 3)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrofit.layers.transforms import transformed

_SERIES_RADIUS = 0.5
_SERIES_TERMS = 12  # 0.5**12 / (12! * 14) < 1e-13 of the leading 1/2: exact in float32, and near so in float64


def yeo_johnson(h: Tensor, lmbda: Tensor) -> Tensor:
    """Apply the Yeo-Johnson power transform.

    With s = sign(h) and p = 1 + s * (lmbda - 1), both branches of eq. 3 read s * ((1 + |h|)^p - 1) / p, with the limit
    s * log(1 + |h|) at p = 0. `expm1` and `log1p` keep it exact near p = 0, and the identity (to rounding) at
    lmbda = 1. It is twice continuously differentiable in h and strictly increasing in both arguments.

    Takes standardised values of any shape and the transform's parameter, broadcastable to them; the result has the
    shape and dtype that the two broadcast to.
    """
    if transformed():
        s, p, log = power_and_log(h, lmbda)
        return s * log * _relative_growth(p * log)
    out: Tensor = _YeoJohnson.apply(h, lmbda)
    return out


def power_and_log(h: Tensor, lmbda: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (s, p, l): the sign of `h` (+1 at zero), p = 1 + s * (lmbda - 1), and l = log(1 + |h|)."""
    s = torch.where(h < 0, -1.0, 1.0).to(h.dtype)
    return s, 1 + s * (lmbda - 1), torch.log1p(s * h)  # s * h is |h| with a derivative at zero


def _relative_growth(u: Tensor) -> Tensor:
    """Return expm1(u) / u, by series near 0, so that autograd differentiates it there too, as often as asked."""
    small = u.abs() < _SERIES_RADIUS
    v, w = torch.where(small, u, 0.0), torch.where(small, 1.0, u)
    series = torch.zeros_like(v)
    for k in reversed(range(_SERIES_TERMS + 1)):
        series = series * v + 1 / math.factorial(k + 1)
    return torch.where(small, series, torch.expm1(w) / w)


def lmbda_derivative(u: Tensor, log: Tensor, growth: Tensor) -> Tensor:
    """Return d psi / d lmbda = l^2 * (exp(u) * (u - 1) + 1) / u^2, u = p * l, growth = expm1(u); by series near 0."""
    small = u.abs() < _SERIES_RADIUS
    v = torch.where(small, u, 0.0)
    series = torch.full_like(v, 1 / (math.factorial(_SERIES_TERMS) * (_SERIES_TERMS + 2)))
    for k in reversed(range(_SERIES_TERMS)):
        series = series * v + 1 / (math.factorial(k) * (k + 2))
    w = torch.where(small, 1.0, u)
    return log * log * torch.where(small, series, ((growth + 1) * w - growth) / (w * w))


class _YeoJohnson(torch.autograd.Function):
    """psi with its closed-form derivatives: only h and lmbda are saved."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, lmbda: Tensor) -> Tensor:
        ctx.save_for_backward(h, lmbda)
        s, p, log = power_and_log(h, lmbda)
        return s * torch.where(p == 0, log, torch.expm1(p * log) / torch.where(p == 0, 1.0, p))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        h, lmbda = ctx.saved_tensors
        _, p, log = power_and_log(h, lmbda)
        grad_h = (grad * torch.exp((p - 1) * log)).sum_to_size(h.shape) if ctx.needs_input_grad[0] else None
        grad_lmbda = None
        if ctx.needs_input_grad[1]:
            u = p * log
            grad_lmbda = (grad * lmbda_derivative(u, log, torch.expm1(u))).sum_to_size(lmbda.shape)
        return grad_h, grad_lmbda
