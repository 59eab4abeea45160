"""What only folding puts in the place of a layer: forms that take in the activation behind it, or approximate it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers.forms import (
    NORM_EPS,
    ChannelAffine,
    EstimatedTransform,
    FunctionModule,
    Standardize,
    TwoBranch,
    channel_view,
    in_sequence,
    relative_growth,
)

__all__ = [
    "ChannelAffine",
    "Clamp",
    "EstimatedTransform",
    "FunctionModule",
    "OneBranch",
    "Polynomial",
    "TwoBranch",
    "channel_view",
    "constant_norm",
    "estimated",
    "in_sequence",
]


class OneBranch(nn.Module):
    """max(0, gamma * psi(h; lambda) + beta) where only h > 0 can be positive.

    It takes u = (1 + h) / (1 + h0), at least 1, where h0 >= 0 is the zero of the function, and gives
    scale * (u^lambda - 1), divided by lambda if `exact`, for any lambda: what comes before it can do the rest.
    """

    lmbda: Tensor
    scale: Tensor | None

    def __init__(self, lmbda: Tensor, scale: Tensor, exact: bool) -> None:
        """Keep (C,) constants; `scale` of ones is left out."""
        super().__init__()
        self.exact = exact
        self.register_buffer("lmbda", lmbda.float())
        self.register_buffer("scale", None if bool((scale == 1).all()) else scale.float())

    def forward(self, u: Tensor) -> Tensor:
        """Transform (N, C, *)."""
        log = torch.log(u)
        power = log * channel_view(self.lmbda, u)
        y = relative_growth(power) * log if self.exact else torch.exp(power) - 1.0
        return y if self.scale is None else y * channel_view(self.scale, u)


class Clamp(nn.Module):
    """Limits by constants of the whole layer, which runtimes fuse into the convolution before it."""

    def __init__(self, low: float | None, high: float | None = None) -> None:
        """Keep the limits."""
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        """Clamp."""
        return torch.clamp(x, self.low, self.high)


def estimated(layer: Any, affine: bool = True, frozen: float | None = None) -> list[nn.Module]:
    """Return the form of a layer that estimates lambda from its input.

    Args:
        layer: The layer, at a strength above 0.
        affine: Whether to apply gamma and beta.
        frozen: lambda (strength included) to use for every sample instead of an estimate.
    """
    weight, bias = (layer.weight, layer.bias) if affine else (None, None)
    if frozen is None:
        options = vars(layer)["eps"], float(layer.effective_alpha), weight, bias
        return [EstimatedTransform(layer._sets(), *options, layer._per_channel())]
    one = torch.ones(1, dtype=torch.float64, device=layer.strength.device)
    parts: list[nn.Module] = [Standardize(layer._sets(), vars(layer)["eps"]), TwoBranch(frozen * one, one, 0 * one)]
    if weight is not None:
        shift = torch.zeros_like(weight) if bias is None else bias
        parts.append(ChannelAffine(weight.detach(), shift.detach(), last=not layer._per_channel()))
    return parts


class Polynomial(nn.Module):
    """p * (c1 + p * (c2 + ...)) per channel of (N, C, *), for a degree of 2 or more.

    Each multiplication by constants with the addition that follows is a batch normalization, in evaluation: one
    operation, which ONNX Runtime keeps in the layout of its convolutions.
    """

    def __init__(self, coefficients: Tensor, ndim: int) -> None:
        """Keep (degree, C) coefficients of p, p^2, ... for input of `ndim` dimensions."""
        super().__init__()
        *lower, last = coefficients.unbind(0)
        ones = torch.ones_like(last)
        scales = [last, *(ones for _ in lower[1:])]
        self.steps = nn.ModuleList(
            constant_norm(scale, shift, ndim) for scale, shift in zip(scales, reversed(lower), strict=True)
        )

    def forward(self, p: Tensor) -> Tensor:
        """Evaluate."""
        y = p
        for step in self.steps:
            y = step(y) * p
        return y


def constant_norm(scale: Tensor, shift: Tensor, ndim: int) -> nn.Module:
    """Return torch's BatchNorm, in evaluation, that computes x * scale + shift of (N, C, *) in one operation."""
    cls = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(ndim, nn.BatchNorm1d)
    norm = cls(len(scale), eps=NORM_EPS, device=scale.device)
    norm.requires_grad_(False)
    assert norm.running_var is not None
    norm.running_var.fill_(1 - NORM_EPS)
    norm.weight.copy_(scale)
    norm.bias.copy_(shift)
    return norm.eval()
