"""A layer with trained-looking statistics for the export tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.layers import BatchNormalNorm2d


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
