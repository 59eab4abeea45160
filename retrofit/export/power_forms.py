"""What folding and approximations leave of a power transform, beside the forms that layers have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.layers.forms import (
    SMALL_POWER,
    ConstantNorm,
    EstimatedTransform,
    Standardize,
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


POWER = torch.ops.retrofit.power.default
"""The transform as one operation, which folding and approximations find."""


class OneBranch(nn.Module):
    """max(0, gamma * psi(h; lambda) + beta) where only h > 0 can be positive.

    It takes u = (1 + h) / (1 + h0), at least 1, where h0 >= 0 is the zero of the function, and gives
    factor * (u^lambda - 1) / lambda: what comes before it can do the rest.

    Args:
        lmbda: (C,) in float64.
        factor: gamma - lambda * beta, (C,).
    """

    lmbda: Tensor
    scale: Tensor | None

    def __init__(self, lmbda: Tensor, factor: Tensor) -> None:
        """Keep float32 constants."""
        super().__init__()
        self.exact = bool((lmbda.abs() < SMALL_POWER).any())
        self.register_buffer("lmbda", lmbda.float())
        self.register_buffer("scale", (factor if self.exact else factor / lmbda).float())

    def take_scale(self) -> Tensor:
        """Leave the constant factor to what follows, and return it, (C,)."""
        assert self.scale is not None
        scale, self.scale = self.scale, None
        return scale.double()

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


class Polynomial(nn.Module):
    """p * (c1 + p * (c2 + ...)) per channel of (N, C, *), for a degree of 2 or more.

    Each multiplication by constants with the addition that follows is a batch normalization, in evaluation: one
    operation, which ONNX Runtime keeps in the layout of its convolutions.
    """

    def __init__(self, coefficients: Tensor) -> None:
        """Keep (degree, C) coefficients of p, p^2, ..."""
        super().__init__()
        *lower, last = coefficients.unbind(0)
        scales = [last, *(torch.ones_like(last) for _ in lower[1:])]
        zeros = torch.zeros_like(last)
        steps = zip(scales, reversed(lower), strict=True)
        self.steps = nn.ModuleList(ConstantNorm(zeros, scale, shift) for scale, shift in steps)

    def forward(self, p: Tensor) -> Tensor:
        """Evaluate."""
        y = p
        for step in self.steps:
            y = step(y) * p
        return y


class FrozenTransform(Standardize):
    """A layer that estimates lambda from its input, with a constant in place of the estimate.

    Args:
        layer: The form of the layer.
        lmbda: lambda, strength included.
    """

    def __init__(self, layer: EstimatedTransform, lmbda: float) -> None:
        super().__init__(layer.sets, layer.eps)
        self.weight, self.bias, self.per_channel = layer.weight, layer.bias, layer.per_channel
        device = next((value.device for value in layer.buffers()), None)
        self.power = TwoBranch(*torch.tensor([[lmbda], [1.0], [0.0]], dtype=torch.float64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`."""
        values, dims = self.viewed(x)
        sizes = values.shape[dims[0] :]
        if dims == tuple(range(dims[0], values.ndim)) and all(isinstance(size, int) for size in sizes):
            h = functional.layer_norm(values, sizes, eps=self.eps)
        else:
            h, *_ = self.standardized(values, dims)
        y = self.power(h).reshape(x.shape)
        for value, apply in ((self.weight, torch.mul), (self.bias, torch.add)):
            if value is not None:
                y = apply(y, channel_view(value, y) if self.per_channel else value)
        return y
