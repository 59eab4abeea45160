"""The formulas of the normality normalization paper, written plainly in float64 and left to autograd.

Independent of the package: the transform is scipy's, the likelihood's derivatives are finite differences of scipy's,
and the layer is algorithm 1 line by line.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import yeojohnson, yeojohnson_llf
from torch import Tensor


def psi(h: np.ndarray, lmbda: float) -> np.ndarray:
    """The Yeo-Johnson transform."""
    return np.asarray(yeojohnson(h, lmbda))


def likelihood_derivatives(h: np.ndarray, step: float = 1e-3) -> tuple[float, float]:
    """L' and L'' of the mean negative log-likelihood (eq. 4) at lambda = 1, by five-point finite differences."""
    low2, low, mid, high, high2 = (-yeojohnson_llf(1 + k * step, h) / len(h) for k in (-2, -1, 0, 1, 2))
    first = (low2 - 8 * low + 8 * high - high2) / (12 * step)
    second = (-low2 + 16 * low - 30 * mid + 16 * high - high2) / (12 * step**2)
    return float(first), float(second)


def power_transform(h: Tensor, lmbda: Tensor) -> Tensor:
    """Eq. 3, branch by branch, for lambda away from 0 and 2."""
    positive = ((1 + h.clamp_min(0)) ** lmbda - 1) / lmbda
    negative = -((1 - h.clamp_max(0)) ** (2 - lmbda) - 1) / (2 - lmbda)
    return torch.where(h >= 0, positive, negative)


def newton_estimate(h: Tensor, dim: tuple[int, ...]) -> Tensor:
    """One Newton step from lambda = 1 with L' and L'' as derivatives of eq. 4, taken by hand and left unsimplified."""
    a, s = h.abs(), torch.where(h < 0, -1.0, 1.0)
    log = torch.log1p(a)
    first = (1 + a) * log - a
    second = s * ((1 + a) * log**2 - 2 * ((1 + a) * log - a))

    def mean(x: Tensor) -> Tensor:
        return x.mean(dim, keepdim=True)

    variance = mean((h - mean(h)) ** 2)
    d_variance = 2 * mean((h - mean(h)) * (first - mean(first)))
    d2_variance = 2 * mean((first - mean(first)) ** 2) + 2 * mean((h - mean(h)) * (second - mean(second)))
    slope = d_variance / (2 * variance) - mean(s * log)
    curvature = d2_variance / (2 * variance) - d_variance**2 / (2 * variance**2)
    return 1 - slope / curvature


def newton_iterations(h: Tensor, steps: int) -> float:
    """Newton's method on the likelihood of one set, (N,), from lambda = 1, differentiated by torch."""

    def loss(lmbda: Tensor) -> Tensor:
        psi = power_transform(h, lmbda)
        return (psi - psi.mean()).square().mean().log() / 2 - (lmbda - 1) * (h.sign() * h.abs().log1p()).mean()

    lmbda = torch.ones((), dtype=h.dtype)
    for _ in range(steps):
        lmbda = lmbda - torch.func.grad(loss)(lmbda) / torch.func.grad(torch.func.grad(loss))(lmbda)
    return float(lmbda)


def normality_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dim: tuple[int, ...], eps: float, strength: float
) -> Tensor:
    """Algorithm 1 without noise; `weight` and `bias` broadcast."""
    mean = x.mean(dim, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim, keepdim=True)
    h = (x - mean) / torch.sqrt(variance + eps)
    out = power_transform(h, 1 + strength * (newton_estimate(h, dim) - 1))
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias
