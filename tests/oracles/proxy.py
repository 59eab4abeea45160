"""The moments of a Gaussian proxy behind an activation, and migrated group normalization, plainly in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor

Function = Callable[[np.ndarray], np.ndarray]


def sample_moments(phi: Function, mean: float, std: float, samples: int = 256) -> tuple[float, float]:
    """Mean and variance of phi over the paper's samples of N(mean, std^2), uniform in probability."""
    values = phi(mean + std * norm.ppf((np.arange(samples) + 0.5) / samples))
    return float(np.mean(values)), float(np.var(values))


def exact_moments(phi: Function, mean: float, std: float, kinks: tuple[float, ...] = (0.0,)) -> tuple[float, float]:
    """Mean and variance of phi over N(mean, std^2) by quadrature over 12 standard deviations, split at the kinks."""
    edges = [mean - 12 * abs(std), *(k for k in sorted(kinks) if abs(k - mean) < 12 * abs(std)), mean + 12 * abs(std)]

    def integral(f: Function) -> float:
        pieces = pairwise(edges)
        return sum(
            quad(lambda u: f(u) * norm.pdf(u, mean, abs(std)), a, b, epsabs=1e-13, limit=200)[0] for a, b in pieces
        )

    first = integral(phi)
    return first, integral(lambda u: (phi(u) - first) ** 2)


def relu_moments(mean: float, std: float) -> tuple[float, float]:
    """Mean and variance of the rectified Gaussian in closed form."""
    z = mean / std
    first = mean * norm.cdf(z) + std * norm.pdf(z)
    second = (mean**2 + std**2) * norm.cdf(z) + mean * std * norm.pdf(z)
    return float(first), float(second - first**2)


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
    """Standardise with torch's BatchNorm, then blend the group moments one sample and one group at a time."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    x = F.batch_norm(x, mean, var, eps=source_eps) * gain.view(shape)
    out = torch.stack(
        [
            torch.cat(
                [(g - t * g.mean()) / (1 - t + t * (g.var(correction=0) + eps)).sqrt() for g in sample.chunk(groups)]
            )
            for sample in x
        ]
    )
    return out * (weight / gain).view(shape) + bias.view(shape)
