"""Meters that gather a layer's moments image by image; their size is that of the channels (Labatie et al. 2021).

`PowerMeter` splits a layer's power over scales and channels (section 3). Where a channel's power lies mostly in its
mean over the data set (`P1` near 1), the activation that follows sees hardly more than a constant and acts almost
linearly: the channel has collapsed.

`LinearityMeter` measures how close to linear an activation acts (after appendix A.2.1): the squared correlation of its
input and output, 1 where the channel never reaches the bend. The paper's own measure fits a line too (eqs. 8 and 9),
but its powers are moments about zero, in which a constant counts as explained; here variation counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Power:
    """Shares of a layer's power, each averaged over channels; p1 to p4 sum to 1 (eq. 5 over its left side)."""

    p1: float  # power of the mean over the data set
    p2: float  # variance between images of their means
    p3: float  # power of the mean over images of their standard deviations
    p4: float  # variance between images of their standard deviations
    balance: float  # (sum of channel powers)^2 / (C * sum of their squares): 1 if all are equal, 1/C if one has all


class _Meter:
    """Sums over images of a few numbers a channel."""

    def __init__(self) -> None:
        self._images = 0
        self._sums: Any = 0

    def _add(self, moments: list[Tensor]) -> None:
        """Add moments of shape (N, C) each."""
        self._sums = self._sums + torch.stack(moments).sum(1)
        self._images += len(moments[0])

    def _means(self) -> Any:
        """Return their means over the images, (numbers, C)."""
        return self._sums / self._images


class PowerMeter(_Meter):
    """Measures `Power`."""

    def update(self, y: Tensor) -> None:
        """Add what the layer passes on, of shape (N, C, positions)."""
        mean = y.mean(2, keepdim=True)
        std = torch.linalg.vector_norm(y - mean, dim=2).double() / y.shape[2] ** 0.5  # many times as fast as torch.std
        mean = mean.squeeze(2).double()
        self._add([mean, mean.square(), std, std.square()])

    def result(self) -> Power:
        """Return the shares over all images."""
        mean, square, std, variance = self._means()
        terms = torch.stack([mean.square(), square - mean.square(), std.square(), variance - std.square()]).clamp_min(0)
        power, tiny = terms.sum(0), torch.finfo(terms.dtype).tiny
        p1, p2, p3, p4 = (terms.sum(1) / power.sum().clamp_min(tiny)).cpu().tolist()
        squares = power.square().sum().clamp_min(tiny)
        return Power(p1, p2, p3, p4, balance=float(power.sum().square() / (len(power) * squares)))


class LinearityMeter(_Meter):
    """Measures the squared correlation of an activation's input and output."""

    def update(self, x: Tensor, z: Tensor) -> None:
        """Add the activation's input and output, each of shape (N, C, positions)."""
        mean_x, mean_z = x.mean(2, keepdim=True), z.mean(2, keepdim=True)
        x, z = x - mean_x, z - mean_z
        aa, bb, ab = (torch.linalg.vecdot(u, v).double() / x.shape[2] for u, v in ((x, x), (z, z), (x, z)))
        a, b = mean_x.squeeze(2).double(), mean_z.squeeze(2).double()
        self._add([a, b, aa + a * a, bb + b * b, ab + a * b])

    def result(self) -> float:
        """Return the mean over channels; one whose output does not vary counts as linear."""
        a, b, aa, bb, ab = self._means()
        var_a, var_b = (aa - a * a).clamp_min(0), (bb - b * b).clamp_min(0)
        share = (ab - a * b).square() / (var_a * var_b).clamp_min(torch.finfo(var_a.dtype).tiny)
        return float(torch.where(var_b <= 1e-12 * bb, 1.0, share).clamp_max(1).mean())
