"""Lines in place of the power transform: continuous and piecewise linear, per channel, on values that the layer sees.

A runtime that fuses per-channel constants and PReLU into the convolution before them needs no pass over memory. With
slopes m_0 ... m_K between divisions at t_1 < ... < t_K,

    y = m_K * (h - t_K);    for k = K ... 1:  y = prelu(y; m_(k-1) / m_k) + what lifts t_(k-1) to 0

as PReLU changes the slope below 0 and leaves what is above. The transform is convex throughout for lambda > 1, concave
for lambda < 1. The least-squares lines of adjacent intervals therefore meet where the best division between them is:
fitting lines and moving divisions to where they meet, in turns, finds both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from retrofit.export.approximation.fit import Fit, LayerFunction
from retrofit.layers.forms import ChannelAffine

_ROUNDS = 50
_FLAT = 1e-6  # slope, of the channel's largest, below which it counts as that


class _Segments(NamedTuple):
    """A line for each interval, (C, size): its slope, and a point that it goes through."""

    slope: Tensor
    x: Tensor
    y: Tensor


class _OnlyLine(NamedTuple):
    """The one line of channels that need no more, (C,) each: which these are, its slope, and its height somewhere."""

    is_all: Tensor
    slope: Tensor
    height: Tensor


class LineFitter:
    """Piecewise-linear functions for one function."""

    def __init__(self, function: LayerFunction) -> None:
        """Sort the values of each channel on which a ReLU leaves something, and sum up what least squares need."""
        self.function = function
        self.start, self.end = self._domain()
        self.h, order = function.h.sort(1)
        inside = (self.h >= self.start[:, None]) & (self.h <= self.end[:, None])
        self.weight, self.values = function.weight[order] * inside, function.unlimited(self.h)
        w, x, y = self.weight, self.h, self.values
        sums = torch.stack([w, w * x, w * y, w * x * x, w * x * y]).cumsum(2)
        self.sums = nn.functional.pad(sums, (1, 0))
        self.rank = self._ranks()

    def fit(self, size: int) -> Fit:
        """Fit so many lines by least squares on the data."""
        knots = self._knots(size)
        only = self._only_line(knots[:, 0])
        live = self.function.found.gamma[:, None] > 0
        slopes = torch.where(only.is_all[:, None], only.slope[:, None], self._segments(knots).slope)
        slopes = torch.where(live, slopes.maximum(_FLAT * slopes.amax(1, keepdim=True)), 1.0)  # m_0 ... m_K
        lifts = nn.functional.pad(slopes[:, 1:-1] * knots.diff(dim=1), (1, 0))  # m_k * (t_(k+1) - t_k); first, y(t_1)
        lifts[:, 0] = torch.where(only.is_all, only.height, self._offset(knots, slopes, lifts.cumsum(1)))
        lifts = torch.where(live, lifts, nn.functional.pad(self.function.found.beta[:, None], (0, size - 2)))
        last, bends = torch.where(live, slopes, 0.0)[:, -1], slopes[:, :-1] / slopes[:, 1:]  # m_K, m_(k-1) / m_k

        def parts() -> list[nn.Module]:
            pairs = zip(bends.T.flip(0), lifts.T.flip(0), strict=True)
            return [part for bend, lift in pairs for part in (_prelu(bend), ChannelAffine(torch.ones_like(lift), lift))]

        return self.function.measured(Fit("lines", size, last, -last * knots[:, -1], parts))

    def _knots(self, size: int) -> Tensor:
        """Return the best divisions, (C, size - 1): each where the lines on either side of it meet."""
        knots = self._quantiles(size)
        for _ in range(_ROUNDS):
            slope, x, y = self._segments(knots)
            turn = slope.diff(dim=1)
            meet = -(y - slope * x).diff(dim=1) / torch.where(turn == 0, 1.0, turn)
            knots = torch.where(turn == 0, knots, meet).clamp(x[:, :-1], x[:, 1:])
        return knots

    def _offset(self, knots: Tensor, slopes: Tensor, heights: Tensor) -> Tensor:
        """Return what is missing, on average, of a function with these heights at its divisions, (C,).

        Where no data lies in what the ReLU lets through, it is the layer's output at the first division.
        """
        before = torch.searchsorted(knots, self.h).sub_(1).clamp_min_(0)
        line = before + (self.h > knots[:, :1])
        y = heights.gather(1, before) + (self.h - knots.gather(1, before)) * slopes.gather(1, line)
        total = self.weight.sum(1)
        missing = (self.weight * (self.values - y)).sum(1) / total.clamp_min(1e-30)
        return torch.where(total > 0, missing, self.function.unlimited(knots[:, :1])[:, 0])

    def _domain(self) -> tuple[Tensor, Tensor]:
        """Return the ends of what is fitted, (C,) each: the data, as far as a ReLU lets it through."""
        function = self.function
        low, top = function.h.amin(1), function.h.amax(1)
        if function.high is None:
            return low, top
        root = function.inverse(0.0, low)
        start = torch.where(root < top, root.maximum(low), low)
        end = torch.minimum(function.inverse(function.high, top), top) if function.high < float("inf") else top
        return start, torch.where(end > start, end, top)

    def _only_line(self, x: Tensor) -> _OnlyLine:
        """Return the channels that a ReLU makes constant on all data, and their line, its height at `x`.

        It is the tangent where the data is nearest to what the ReLU lets through. On the data it has no error, and it
        leaves the channel behind the data where the layer does.
        """
        function = self.function
        if function.high is None:
            return _OnlyLine(torch.zeros_like(x, dtype=torch.bool), x, x)
        low, top = function.h.amin(1, keepdim=True), function.h.amax(1, keepdim=True)
        dead, full = function.unlimited(top) <= 0, function.unlimited(low) >= function.high
        nearest = torch.where(dead, top, low)
        slope = function.slope(nearest)
        height = function.unlimited(nearest) + slope * (x[:, None] - nearest)
        return _OnlyLine((dead | full)[:, 0], slope[:, 0], height[:, 0])

    def _ranks(self) -> Tensor:
        """Return what of the data and of the slope's change is left behind at each value, (C, S)."""
        data = self.sums[0, :, 1:] / self.sums[0, :, -1:].clamp_min(1e-30)
        slope = self.function.slope(self.h.clamp(self.start[:, None], self.end[:, None])).clamp_min(1e-30).log()
        turned = (slope - slope[:, :1]).abs()
        return data + turned / turned[:, -1:].clamp_min(1e-12)

    def _quantiles(self, size: int) -> Tensor:
        """Return divisions to begin with, (C, size - 1)."""
        rank = self.rank
        wanted = rank[:, -1:] * torch.arange(1, size, dtype=rank.dtype, device=rank.device) / size
        return self.h.gather(1, torch.searchsorted(rank, wanted).clamp_max(self.h.shape[1] - 1))

    def _segments(self, knots: Tensor) -> _Segments:
        """Return the least-squares line of each interval; the chord where data is too little for one."""
        ends = torch.cat([self.start[:, None], knots, self.end[:, None]], 1)
        first = torch.zeros_like(ends[:, :1], dtype=torch.int64)
        indices = torch.cat([first, torch.searchsorted(self.h, knots), first + self.h.shape[1]], 1)
        w, wx, wy, wxx, wxy = self.sums.take_along_dim(indices.expand(5, -1, -1), 2).diff(dim=2)
        total = w.clamp_min(1e-30)
        width = ends.diff(dim=1).clamp_min(1e-12)
        spread = wxx - wx * wx / total
        known = spread > 1e-8 * w.clamp_min(1e-6) * width * width
        values, steep = self.function.unlimited(ends), self.function.slope(ends)
        slope = torch.where(known, (wxy - wx * wy / total) / spread, values.diff(dim=1) / width)
        x = torch.where(known, wx / total, (ends[:, :-1] + ends[:, 1:]) / 2)
        y = torch.where(known, wy / total, (values[:, :-1] + values[:, 1:]) / 2)
        a, b = steep[:, :-1], steep[:, 1:]  # no line is steeper, or flatter, than the function within its interval
        return _Segments(slope.clamp(torch.minimum(a, b), torch.maximum(a, b)), x, y)


def _prelu(slopes: Tensor) -> nn.Module:
    found = nn.PReLU(len(slopes), device=slopes.device, dtype=torch.float32).requires_grad_(False)
    found.weight.copy_(slopes)
    return found
