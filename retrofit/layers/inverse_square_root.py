"""Inverse square roots of covariance matrices, and the groups of channels that they whiten.

ZCA whitening (Huang et al. 2018, "Decorrelated Batch Normalization") multiplies centred values by S^(-1/2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.layers.transforms import differentiable_once, transformed

GROUP_SIZE = 16


def largest_divisor(channels: int, most: int) -> int:
    """Return the largest divisor of `channels` that is at most `most`."""
    return next(n for n in range(min(channels, most), 0, -1) if channels % n == 0)


def check_group_size(group_size: int) -> int:
    """Return `group_size` if it is at least 1."""
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, not {group_size}; the paper's is {GROUP_SIZE}")
    return int(group_size)


def inverse_square_root(matrix: Tensor, floor: float) -> Tensor:
    """Return the symmetric S^(-1/2) of symmetric positive definite matrices by eigendecomposition.

    The gradient is the closed form for functions of a symmetric matrix (Daleckii & Krein), whose divided differences
    of 1 / sqrt are -1 / (sqrt(a) sqrt(b) (sqrt(a) + sqrt(b))): finite for equal eigenvalues, at which differentiating
    the eigenvectors themselves divides by zero.

    Args:
        matrix: S, (*, g, g).
        floor: Smallest eigenvalue there can be but for rounding. Smaller ones are taken to be that, or what rounding
            leaves of them beside the largest: a direction in which nothing but rounding errors vary is not blown up.

    Returns:
        S^(-1/2), (*, g, g); NaN for a matrix that is not finite.
    """
    out: Tensor = _InverseSquareRoot.apply(matrix, floor)[0]
    return out


class _InverseSquareRoot(torch.autograd.Function):
    """S -> S^(-1/2); the eigenvectors and the roots of the eigenvalues are kept, and returned for torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
        vectors, roots = _eigen(matrix, floor)
        finite = matrix.isfinite().all(-1, True).all(-2, True)
        return torch.where(finite, (vectors / roots.unsqueeze(-2)) @ vectors.mT, torch.nan), vectors, roots

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        matrix, ctx.floor = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(matrix, *output[1:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        matrix, vectors, roots = ctx.saved_tensors
        if transformed():  # which may want a further derivative, through the eigenvectors
            vectors, roots = _eigen(matrix, ctx.floor)
        a, b = roots.unsqueeze(-1), roots.unsqueeze(-2)
        inner = vectors.mT @ ((grads[0] + grads[0].mT) / 2) @ vectors
        return vectors @ (inner / (-a * b * (a + b))) @ vectors.mT, None


def _eigen(matrix: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors of `matrix` and the roots of its eigenvalues; those of the identity if not finite."""
    finite = matrix.isfinite().all(-1, True).all(-2, True)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    values, vectors = torch.linalg.eigh(torch.where(finite, matrix, identity))
    resolved = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * values[..., -1:]
    return vectors, torch.maximum(values.clamp_min(floor), resolved).sqrt()
