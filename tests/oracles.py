"""The papers' formulas, written plainly in float64 and left to autograd.

Independent of the package: the transform and the whitening are scipy's, the likelihood's
derivatives are finite differences of scipy's, the proxy's moments those of the samples, and the
normality layer is algorithm 1 line by line.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import fractional_matrix_power
from scipy.stats import norm, yeojohnson, yeojohnson_llf
from torch import Tensor


def psi(h: np.ndarray, lmbda: float) -> np.ndarray:  # the Yeo-Johnson transform
    return np.asarray(yeojohnson(h, lmbda))


def likelihood_derivatives(h: np.ndarray, step: float = 1e-3) -> tuple[float, float]:
    """L' and L'' of the mean negative log-likelihood (eq. 4) at lambda = 1, by five-point finite
    differences.
    """
    low2, low, mid, high, high2 = (
        -yeojohnson_llf(1 + k * step, h) / len(h) for k in (-2, -1, 0, 1, 2)
    )
    first = (low2 - 8 * low + 8 * high - high2) / (12 * step)
    second = (-low2 + 16 * low - 30 * mid + 16 * high - high2) / (12 * step**2)
    return float(first), float(second)


def power_transform(h: Tensor, lmbda: Tensor) -> Tensor:
    """Eq. 3, branch by branch, for lambda away from 0 and 2."""
    positive = ((1 + h.clamp_min(0)) ** lmbda - 1) / lmbda
    negative = -((1 - h.clamp_max(0)) ** (2 - lmbda) - 1) / (2 - lmbda)
    return torch.where(h >= 0, positive, negative)


def newton_estimate(h: Tensor, dim: tuple[int, ...]) -> Tensor:
    """One Newton step from lambda = 1 with L' and L'' as derivatives of eq. 4, taken by hand and
    left unsimplified.
    """
    a, s = h.abs(), torch.where(h < 0, -1.0, 1.0)
    log = torch.log1p(a)
    first = (1 + a) * log - a
    second = s * ((1 + a) * log**2 - 2 * ((1 + a) * log - a))

    def mean(x: Tensor) -> Tensor:
        return x.mean(dim, keepdim=True)

    variance = mean((h - mean(h)) ** 2)
    d_variance = 2 * mean((h - mean(h)) * (first - mean(first)))
    d2_variance = 2 * mean((first - mean(first)) ** 2) + 2 * mean(
        (h - mean(h)) * (second - mean(second))
    )
    slope = d_variance / (2 * variance) - mean(s * log)
    curvature = d2_variance / (2 * variance) - d_variance**2 / (2 * variance**2)
    return 1 - slope / curvature


def normality_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dim: tuple[int, ...],
    eps: float,
    strength: float,
) -> Tensor:
    """Algorithm 1 without noise; `weight` and `bias` broadcast."""
    mean = x.mean(dim, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim, keepdim=True)
    h = (x - mean) / torch.sqrt(variance + eps)
    out = power_transform(h, 1 + strength * (newton_estimate(h, dim) - 1))
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias


def sample_moments(
    phi: Callable[..., np.ndarray], mean: float, std: float, samples: int = 256
) -> tuple[float, float]:
    """Mean and variance of phi over the paper's samples of N(mean, std^2), uniform in
    probability.
    """
    values = phi(mean + std * norm.ppf((np.arange(samples) + 0.5) / samples))
    return float(np.mean(values)), float(np.var(values))


def migrated_group_norm(
    x: Tensor,
    groups: int,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    t: float,
    eps: float,
    source_eps: float,
    gain: Tensor,
) -> Tensor:
    """Standardize with torch's BatchNorm, then blend the group moments one sample and one group at
    a time.
    """

    def blended(g: Tensor) -> Tensor:
        return (g - t * g.mean()) / (1 - t + t * (g.var(correction=0) + eps)).sqrt()

    shape = (1, -1) + (1,) * (x.ndim - 2)
    x = F.batch_norm(x, mean, var, eps=source_eps) * gain.view(shape)
    out = torch.stack([torch.cat([*map(blended, sample.chunk(groups))]) for sample in x])
    return out * (weight / gain).view(shape) + bias.view(shape)


def root(covariance: np.ndarray, eps: float) -> np.ndarray:  # (S + eps)^(-1/2)
    return np.real(fractional_matrix_power(covariance + eps * np.eye(len(covariance)), -0.5))


def decorrelate(x: Tensor, size: int, eps: float, strength: float) -> Tensor:
    """Return what decorrelated batch normalization makes of (N, C, *), without an affine."""
    rows = x.double().movedim(1, 0).flatten(1).numpy()
    out = np.empty_like(rows)
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        covariance = np.cov(group, bias=True).reshape(size, size)
        scaling = np.diag(1 / np.sqrt(np.diag(covariance) + eps))
        matrix = (1 - strength) * scaling + strength * root(covariance, eps)
        out[start : start + size] = matrix @ (group - group.mean(1, keepdims=True))
    return torch.from_numpy(out).view(x.movedim(1, 0).shape).movedim(0, 1)
