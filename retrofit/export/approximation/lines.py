"""Lines in place of the power transform: continuous and piecewise linear, per channel, on values that the layer sees.

A runtime that fuses per-channel constants and PReLU into the convolution before them needs no pass over memory. With
slopes m_0 ... m_K between divisions at t_1 < ... < t_K,

    y = m_K * (h - t_K);    for k = K ... 1:  y = prelu(y; m_(k-1) / m_k) + what lifts t_(k-1) to 0

as PReLU changes the slope below 0 and leaves what is above. The transform is convex throughout for lambda > 1, concave
for lambda < 1. The least-squares lines of adjacent intervals therefore meet where the best division between them is:
fitting lines and moving divisions to where they meet, in turns, finds both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retrofit.export.approximation.fit import Fit, LayerFunction
from retrofit.export.forms.operations import ChannelAffine

_ROUNDS = 50
_FLAT = 1e-6  # slope, of the channel's largest, below which it counts as that


class LineFitter:
    """Piecewise-linear functions for one target."""

    def __init__(self, target: LayerFunction) -> None:
        """Sort the values of each channel on which a ReLU leaves something, and sum up what least squares need."""
        self.target = target
        self.start, self.end = self._domain()
        self.h, order = target.h.sort(1)
        inside = (self.h >= self.start[:, None]) & (self.h <= self.end[:, None])
        self.weight, self.values = target.weight[order] * inside, target.unlimited(self.h)
        w, x, y = self.weight, self.h, self.values
        sums = torch.stack([w, w * x, w * y, w * x * x, w * x * y]).cumsum(2)
        self.sums = nn.functional.pad(sums, (1, 0))
        self.rank = self._ranks()

    def fit(self, size: int) -> Fit:
        """Fit so many lines by least squares on the data."""
        knots = self._quantiles(size)
        for _ in range(_ROUNDS):
            slopes, x, y = self._lines(knots)
            turn = slopes.diff(dim=1)
            meet = -(y - slopes * x).diff(dim=1) / torch.where(turn == 0, 1.0, turn)
            knots = torch.where(turn == 0, knots, meet).clamp(x[:, :-1], x[:, 1:])
        one, steep, height = self._tangents(knots[:, 0])
        slopes = torch.where(one[:, None], steep[:, None], self._lines(knots)[0])
        live = self.target.found.gamma[:, None] > 0
        slopes = torch.where(live, slopes.maximum(_FLAT * slopes.amax(1, keepdim=True)), 1.0)
        rises = nn.functional.pad(slopes[:, 1:-1] * knots.diff(dim=1), (1, 0))  # to each division from the one before
        rises[:, 0] = torch.where(one, height, self._offset(knots, slopes, rises.cumsum(1)))
        rises = torch.where(live, rises, nn.functional.pad(self.target.found.beta[:, None], (0, size - 2)))
        last, bends = torch.where(live, slopes, 0.0)[:, -1], slopes[:, :-1] / slopes[:, 1:]
        return self.target.measured(
            Fit(
                "lines",
                size,
                last,
                -last * knots[:, -1],
                lambda _: [
                    part
                    for bend, rise in zip(bends.T.flip(0), rises.T.flip(0), strict=True)
                    for part in (_prelu(bend), ChannelAffine(torch.ones_like(rise), rise))
                ],
            )
        )

    def _offset(self, knots: Tensor, slopes: Tensor, heights: Tensor) -> Tensor:
        """Return what is missing, on average, of a function with these heights at its divisions, (C,)."""
        before = torch.searchsorted(knots, self.h).sub_(1).clamp_min_(0)
        line = before + (self.h > knots[:, :1])
        y = heights.gather(1, before) + (self.h - knots.gather(1, before)) * slopes.gather(1, line)
        return (self.weight * (self.values - y)).sum(1) / self.weight.sum(1)

    def _domain(self) -> tuple[Tensor, Tensor]:
        """Return the ends of what is fitted, (C,) each: the data, as far as a ReLU lets it through."""
        target = self.target
        low, top = target.h.amin(1), target.h.amax(1)
        if target.high is None:
            return low, top
        root = target.inverse(0.0, low)
        start = torch.where(root < top, root.maximum(low), low)
        end = torch.minimum(target.inverse(target.high, top), top) if target.high < float("inf") else top
        return start, torch.where(end > start, end, top)

    def _tangents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which channels a ReLU makes constant on all data, and their one line: slope and height at `x`, (C,).

        It is the tangent where the data is nearest to what the ReLU lets through. On the data it has no error, and it
        leaves the channel behind the data where the layer does.
        """
        target = self.target
        if target.high is None:
            return torch.zeros_like(x, dtype=torch.bool), x, x
        low, top = target.h.amin(1, keepdim=True), target.h.amax(1, keepdim=True)
        dead, full = target.unlimited(top) <= 0, target.unlimited(low) >= target.high
        place = torch.where(dead, top, low)
        steep = target.slope(place)
        height = target.unlimited(place) + steep * (x[:, None] - place)
        return (dead | full)[:, 0], steep[:, 0], height[:, 0]

    def _ranks(self) -> Tensor:
        """Return what of the data and of the slope's change is left behind at each value, (C, S)."""
        data = self.sums[0, :, 1:] / self.sums[0, :, -1:]
        slope = self.target.slope(self.h.clamp(self.start[:, None], self.end[:, None])).clamp_min(1e-30).log()
        turned = (slope - slope[:, :1]).abs()
        return data + turned / turned[:, -1:].clamp_min(1e-12)

    def _quantiles(self, size: int) -> Tensor:
        """Return divisions to begin with, (C, size - 1)."""
        rank = self.rank
        wanted = rank[:, -1:] * torch.arange(1, size, dtype=rank.dtype, device=rank.device) / size
        return self.h.gather(1, torch.searchsorted(rank, wanted).clamp_max(self.h.shape[1] - 1))

    def _lines(self, knots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return slope of the line of each interval, (C, size), and the point (x, y) that it goes through."""
        ends = torch.cat([self.start[:, None], knots, self.end[:, None]], 1)
        first = torch.zeros_like(ends[:, :1], dtype=torch.int64)
        places = torch.cat([first, torch.searchsorted(self.h, knots), first + self.h.shape[1]], 1)
        w, wx, wy, wxx, wxy = self.sums.take_along_dim(places.expand(5, -1, -1), 2).diff(dim=2)
        width = ends.diff(dim=1).clamp_min(1e-12)
        spread = wxx - wx * wx / w.clamp_min(1e-30)
        known = spread > 1e-8 * w.clamp_min(1e-6) * width * width  # else the chord
        values, steep = self.target.unlimited(ends), self.target.slope(ends)
        slope = torch.where(known, (wxy - wx * wy / w.clamp_min(1e-30)) / spread, values.diff(dim=1) / width)
        a, b = steep[:, :-1], steep[:, 1:]
        x = torch.where(known, wx / w.clamp_min(1e-30), (ends[:, :-1] + ends[:, 1:]) / 2)
        y = torch.where(known, wy / w.clamp_min(1e-30), (values[:, :-1] + values[:, 1:]) / 2)
        return slope.clamp(torch.minimum(a, b), torch.maximum(a, b)), x, y


def _prelu(slopes: Tensor) -> nn.Module:
    found = nn.PReLU(len(slopes), device=slopes.device, dtype=torch.float32).requires_grad_(False)
    found.weight.copy_(slopes)
    return found
