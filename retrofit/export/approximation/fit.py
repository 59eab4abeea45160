"""What is approximated, the function of one layer on the values that it really sees, and what an approximation is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from retrofit.export.approximation.calibration import WeightedSample
from retrofit.export.nodes import Transform
from retrofit.layers.channel_map import ChannelMap
from retrofit.layers.yeo_johnson import yeo_johnson

MAX_SIZE = 8
"""Largest degree of a polynomial, and largest number of lines."""


@dataclass(frozen=True)
class Fit:
    """An approximation of one layer, with gamma >= 0: an affine map of h and what follows it.

    Attributes:
        form: "affine", "polynomial" or "lines".
        size: Degree of the polynomial, or number of lines; 1 is affine.
        scale: (C,) in float64; the parts take scale * h + shift.
        shift: (C,).
        parts: Makes what follows.
        has_activation: Whether a ReLU behind the layer is included; else it stays.
        max_error: Largest error on what was seen, as a share of the standard deviation of the layer's output.
        rms_error: Root mean square of the same, what may follow included.
    """

    form: str
    size: int
    scale: Tensor
    shift: Tensor
    parts: Callable[[], list[nn.Module]]
    has_activation: bool = False
    max_error: float = 0.0
    rms_error: float = 0.0

    def __call__(self, h: Tensor) -> Tensor:
        """Evaluate for h, (C, S), in the precision of a folded network."""
        y = torch.addcmul(self.shift[:, None], h, self.scale[:, None]).T.float()
        for part in self.parts():
            y = part(y)
        return y.T.to(h)


class Fitter(Protocol):
    """Fits of all sizes to one function."""

    def __init__(self, function: LayerFunction) -> None:
        """Prepare what they share."""

    def fit(self, size: int) -> Fit:
        """Return the fit of a size from 2 to `MAX_SIZE`."""


class LayerFunction:
    """The function of one layer.

    Args:
        found: Its constants.
        data: What it sees, standardised.
        high: Upper limit of a ReLU (inf) or ReLU6 behind it; None if there is none.
    """

    def __init__(self, found: ChannelMap | Transform, data: WeightedSample, high: float | None) -> None:
        """Evaluate the function."""
        self.found, self.data, self.high = found, data, high
        self.h, self.weight = data.h, data.weight / data.weight.sum()
        self.values = self.limited(self.h)
        spread = self.values - (self.values @ self.weight)[:, None]
        self.scale = max(self._rms(spread), 1e-30)

    def unlimited(self, h: Tensor) -> Tensor:
        """Return the layer's output for h, (C, S)."""
        found = self.found
        return found.gamma[:, None] * yeo_johnson(h, found.lmbda[:, None]) + found.beta[:, None]

    def limited(self, h: Tensor) -> Tensor:
        """Return the same behind the ReLU."""
        y = self.unlimited(h)
        return y if self.high is None else y.clamp(0.0, self.high)

    def slope(self, h: Tensor) -> Tensor:
        """Return the derivative of the layer's output at h, (C, S)."""
        s = torch.where(h < 0, -1.0, 1.0).to(h)
        return self.found.gamma[:, None] * torch.exp(s * (self.found.lmbda[:, None] - 1) * torch.log1p(h.abs()))

    def inverse(self, y: float, fallback: Tensor) -> Tensor:
        """Return h where the layer's output is y, (C,); `fallback` where it never is."""
        lmbda = self.found.lmbda
        value = (y - self.found.beta) / self.found.gamma
        s = torch.where(value < 0, -1.0, 1.0).to(value)
        p = 1 + s * (lmbda - 1)
        base = 1 + p * value.abs()
        a = torch.where(p == 0, value.abs().expm1(), base.pow(1 / torch.where(p == 0, 1.0, p)) - 1)
        found = torch.where(base > 0, s * a, torch.nan)
        return torch.where(found.isfinite(), found, fallback)

    def affine(self) -> Fit:
        """Return the least-squares line, which leaves a ReLU to itself."""
        value, weight = self.unlimited(self.h), self.weight
        centre, mean = self.h @ weight, value @ weight
        centred = self.h - centre[:, None]
        power = centred.square() @ weight
        slope = torch.where(power > 0, (centred * value) @ weight / power, 0.0)
        return self.measured(Fit("affine", 1, slope, mean - slope * centre, list))

    def measured(self, fit: Fit) -> Fit:
        """Return a fit with its errors."""
        values = fit(self.h)
        if self.high is not None and not fit.has_activation:
            values = values.clamp(0.0, self.high)
        error = (values - self.values) / self.scale
        return replace(fit, max_error=float(error[:, : self.data.seen].abs().max()), rms_error=self._rms(error))

    def _rms(self, values: Tensor) -> float:
        return float((values.square() @ self.weight).mean().sqrt())
