"""ZCA whitening by scipy, in float64, one group at a time."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import fractional_matrix_power
from torch import Tensor


def root(covariance: np.ndarray, eps: float) -> np.ndarray:
    """(S + eps)^(-1/2)."""
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
