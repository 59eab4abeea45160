"""How a layer's power splits over scales, and over channels (Labatie et al. 2021, section 3), gathered image by image.

Where a channel's power lies mostly in its mean over the data set (`P1` near 1), the activation that follows sees hardly
more than a constant and acts almost linearly: the channel has collapsed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Power:
    """Shares of a layer's power, each averaged over channels; they sum to 1 (eq. 5 over its left side).

    Attributes:
        p1: Power of the mean over the data set.
        p2: Variance between images of their means.
        p3: Power of the mean over images of their standard deviations.
        p4: Variance between images of their standard deviations.
        balance: (sum of channel powers)^2 / (C * sum of their squares): 1 if all channels have equal power, 1/C if one
            channel has all of it.
    """

    p1: float
    p2: float
    p3: float
    p4: float
    balance: float


class PowerMeter:
    """Gathers a layer's moments: one number a channel and moment, whatever the number of images."""

    def __init__(self) -> None:
        """Start empty."""
        self._images = 0
        self._sums: Tensor | None = None

    def update(self, y: Tensor) -> None:
        """Add images.

        Args:
            y: What the layer passes on, of shape (N, C, positions).
        """
        mean = y.mean(2, keepdim=True)
        std = torch.linalg.vector_norm(y - mean, dim=2).double() / y.shape[2] ** 0.5  # many times as fast as torch.std
        mean = mean.squeeze(2).double()
        sums = torch.stack([mean, mean.square(), std, std.square()]).sum(1)
        self._sums = sums if self._sums is None else self._sums + sums
        self._images += len(y)

    def result(self) -> Power:
        """Return the shares over all images so far.

        Raises:
            ValueError: If there were no images.
        """
        if self._sums is None:
            raise ValueError("no images were measured")
        mean, square, std, variance = self._sums / self._images
        terms = torch.stack([mean.square(), square - mean.square(), std.square(), variance - std.square()])
        power = terms.clamp_min(0).sum(0)
        total = power.sum().clamp_min(torch.finfo(power.dtype).tiny)
        p1, p2, p3, p4 = (terms.clamp_min(0).sum(1) / total).cpu().tolist()
        squares = power.square().sum().clamp_min(torch.finfo(power.dtype).tiny)
        return Power(p1, p2, p3, p4, balance=float(power.sum().square() / (len(power) * squares)))
