"""The moments of a Gaussian proxy behind an activation, and migrated group normalization, plainly in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import norm
from torch import Tensor

Function = Callable[[np.ndarray], np.ndarray]


def sample_moments(phi: Function, mean: float, std: float, samples: int = 256) -> tuple[float, float]:
    """Mean and variance of phi over the paper's samples of N(mean, std^2), uniform in probability."""
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
