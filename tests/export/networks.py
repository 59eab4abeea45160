"""Small hand-made networks and trained-looking statistics for the export tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import retrofit
from retrofit.layers import BatchNormalNorm2d, StrengthMixin


def norm(channels: int, **changes: Any) -> BatchNormalNorm2d:
    """A BatchNormalNorm2d whose statistics look trained: lambda from -0.5 to 2.4, gamma and beta of both signs."""
    generator = torch.Generator().manual_seed(channels)

    def spread(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(channels, generator=generator)

    layer = BatchNormalNorm2d(channels, noise=0.0).eval()
    values = {
        "running_mean": spread(-1, 1),
        "running_var": spread(0.3, 3),
        "running_lambda": spread(-0.5, 2.4),
        "weight": spread(-1.5, 1.5),
        "bias": spread(-1, 1),
    }
    with torch.no_grad():
        for name, value in {**values, **changes}.items():
            getattr(layer, name).copy_(torch.as_tensor(value))
    return layer


def train_a_little(model: nn.Module, size: int, strength: float, steps: int = 2, batch: int = 4) -> nn.Module:
    """Make statistics, lambdas and affine parameters real by a few training steps, at a strength."""
    if any(isinstance(module, StrengthMixin) for module in model.modules()):
        retrofit.set_strength(model, strength)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model.train()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        out = model(torch.randn(batch, 3, size, size, generator=generator).exp())
        (out - out.mean().detach()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # at strength 0 nothing normalizes a random network
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
