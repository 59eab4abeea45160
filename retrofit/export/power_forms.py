"""What folding and approximations make of a power transform, beside the forms that layers have."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.export.nodes import Transform
from retrofit.layers.forms import (
    SMALL_POWER,
    ConstantNorm,
    FunctionModule,
    GroupConvolution,
    TwoBranch,
    channel_view,
    relative_growth,
)


@torch.library.custom_op("retrofit::power", mutates_args=())
def power(h: Tensor, lmbda: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return gamma * psi(h; lambda) + beta of standardised values (N, C, *), with (C,) constants."""
    return TwoBranch(lmbda, gamma, beta)(h).contiguous()


@power.register_fake
def _shape_of_power(h: Tensor, _lmbda: Tensor, _gamma: Tensor, _beta: Tensor) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


POWER = torch.ops.retrofit.power.default  # the transform as one operation, which folding and approximations find


class OneBranch(nn.Module):
    """max(0, gamma * psi(h; lambda) + beta), (N, C, *), where this is 0 for all h <= 0.

    It takes u = (1 + h) / (1 + h0), at least 1, where h0 >= 0 is the zero of the function, and gives
    scale * (u^lambda - 1), or scale * (u^lambda - 1) / lambda if lambda is near 0; what surrounds it can do the rest.
    """

    lmbda: Tensor
    scale: Tensor | None

    def __init__(self, lmbda: Tensor, scale: Tensor | None, near_0: bool) -> None:
        super().__init__()
        self.near_0 = near_0
        self.register_buffer("lmbda", lmbda.float())
        self.register_buffer("scale", None if scale is None else scale.float())

    def forward(self, u: Tensor) -> Tensor:
        """Transform (N, C, *)."""
        log = torch.log(u)
        power = log * channel_view(self.lmbda, u)
        y = relative_growth(power) * log if self.near_0 else torch.exp(power) - 1.0
        return y if self.scale is None else y * channel_view(self.scale, u)


def limits(low: float | None, high: float | None = None) -> nn.Module:
    """Return limits by constants of the whole layer, which runtimes fuse into the convolution before it."""
    return FunctionModule(partial(torch.clamp, min=low, max=high))


class Polynomial(nn.Module):
    """p * (c1 + p * (c2 + ...)) per channel of (N, C, *), for a degree of 2 or more. Each multiplication by constants
    with the addition that follows is a batch normalization, in evaluation: one operation, which ONNX Runtime keeps in
    the layout of its convolutions.
    """

    def __init__(self, coefficients: Tensor) -> None:
        """Keep (degree, C) coefficients of p, p^2, ..."""
        super().__init__()
        *lower, scale = coefficients.unbind(0)
        self.steps = nn.ModuleList()
        for shift in reversed(lower):
            self.steps.append(ConstantNorm(torch.zeros_like(scale), scale, shift))
            scale = torch.ones_like(scale)

    def to_convolutions(self) -> None:
        """Make a depthwise convolution of each batch normalization, for which ONNX Runtime has integer kernels in INT8.
        Degrees above 3 stay: of the 8 bits of each step little is left in the end.
        """
        norms: list[Any] = list(self.steps)
        if len(norms) <= 2:
            self.steps = nn.ModuleList(GroupConvolution(norm.scale.view(-1, 1, 1), norm.shift) for norm in norms)

    def forward(self, p: Tensor) -> Tensor:
        """Evaluate."""
        y = p
        for step in self.steps:
            y = step(y) * p
        return y


def one_branch(transform: Transform) -> tuple[Tensor, Tensor, list[nn.Module], Tensor] | None:
    """Return a transform whose negative branch the ReLU behind it makes dead, with that ReLU: scale and shift of what
    the forms take, the forms, and the scale of what they give. None where both branches live.
    """
    lmbda, gamma, beta, high = transform.lmbda, transform.gamma, transform.beta, transform.high
    if high is None or bool((beta > 0).any()) or lmbda.numel() == 1:
        return None
    ratio = -beta / torch.where(gamma > 0, gamma, 1.0)
    root = torch.where(lmbda == 0, ratio, torch.log1p(lmbda * ratio) / torch.where(lmbda == 0, 1.0, lmbda))
    live = (gamma > 0) & root.isfinite() & root.exp().isfinite()  # root is log(1 + h0), where h0 is the function's zero
    to_u = torch.where(live, torch.exp(-root), 0.0)
    near_0 = bool((lmbda.abs() < SMALL_POWER).any())
    scale = torch.where(live, gamma - lmbda * beta, 0.0) / (1.0 if near_0 else lmbda)
    if high < float("inf"):
        parts, after = [limits(1.0), OneBranch(lmbda, scale, near_0), limits(None, high)], torch.ones_like(scale)
    else:
        parts, after = [limits(1.0), OneBranch(lmbda, None, near_0)], scale
    return transform.sign * to_u, torch.where(live, to_u, 1.0), parts, after
