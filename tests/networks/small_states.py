"""A small network, and its tensors, for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def small_net(width: int = 4, classes: int = 3, channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width * 4, classes)
    )


def small_state(**options: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(small_net(**options).state_dict())


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
