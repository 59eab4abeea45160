"""How close to linear an activation acts on what it gets, after Labatie et al. 2021, appendix A.2.1.

The measure of a channel is the squared correlation of the activation's input and output: the share of the output's
variance that a straight line explains, 1 where the channel never reaches the bend. The paper's own fits a line too
(eqs. 8 and 9), but its powers are moments about zero, in which a constant counts as explained; here variation counts.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LinearityMeter:
    """Gathers, for each channel, the moments of an activation's input and output; its size is that of the channels."""

    def __init__(self) -> None:
        """Start empty."""
        self._images = 0
        self._sums: Tensor | None = None

    def update(self, x: Tensor, z: Tensor) -> None:
        """Add the activation's input and output, each of shape (N, C, positions)."""
        mean_x, mean_z = x.mean(2, keepdim=True), z.mean(2, keepdim=True)
        x, z = x - mean_x, z - mean_z
        aa, bb, ab = (torch.linalg.vecdot(u, v).double() / x.shape[2] for u, v in ((x, x), (z, z), (x, z)))
        a, b = mean_x.squeeze(2).double(), mean_z.squeeze(2).double()
        sums = torch.stack([a, b, aa + a * a, bb + b * b, ab + a * b]).sum(1)
        self._sums = sums if self._sums is None else self._sums + sums
        self._images += len(x)

    def result(self) -> float:
        """Return the measure averaged over channels; one whose output does not vary counts as linear.

        Raises:
            ValueError: If nothing was measured.
        """
        if self._sums is None:
            raise ValueError("no images were measured")
        a, b, aa, bb, ab = self._sums / self._images
        var_a, var_b = (aa - a * a).clamp_min(0), (bb - b * b).clamp_min(0)
        tiny = torch.finfo(var_a.dtype).tiny
        constant = var_b <= 1e-12 * bb
        share = (ab - a * b).square() / (var_a * var_b).clamp_min(tiny)
        return float(torch.where(constant, 1.0, share).clamp_max(1).mean())
