"""Polynomials and lines in place of the power transform, fitted per channel on the values that a layer really sees.

A runtime that does not fuse elementwise operations pays one pass over memory for each, and for the logarithm many. The
polynomials here need two passes for a parabola, and two more for each further degree:

    y = p * (c1 + c2 * p),    p = clamp(scale * h + shift, low, 1)

p is 0 at the root of the function, so that no constant is left to add, and the limits are the same for every channel,
so that runtimes fuse them into the convolution that also takes in scale and shift. Behind a ReLU only the part above
the root is fitted, and the ReLU is gone.

A runtime that fuses per-channel constants and PReLU into the convolution before them needs no pass over memory for
lines, continuous and piecewise linear. With slopes m_0 ... m_K between divisions at t_1 < ... < t_K,

    y = m_K * (h - t_K);    for k = K ... 1:  y = prelu(y; m_(k-1) / m_k) + what lifts t_(k-1) to 0

as PReLU changes the slope below 0 and leaves what is above. The transform is convex throughout for lambda > 1, concave
for lambda < 1. The least-squares lines of adjacent intervals therefore meet where the best division between them is:
fitting lines and moving divisions to where they meet, in turns, finds both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from retrofit.export.approximation.sample import WeightedSample
from retrofit.export.nodes import Transform
from retrofit.export.power_forms import Polynomial, limits
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.forms import ChannelAffine
from retrofit.layers.power_transform import yeo_johnson

MAX_SIZE = 8  # largest degree of a polynomial, and largest number of lines
_ROOM = 0.5  # of the data's range, at most, between it and a root below: a polynomial is to see more than a sliver
_SHARES = (1.0, 0.75, 0.56, 0.42, 0.32, 0.24, 0.18, 0.13)  # of that range to try
_ROUNDS = 50
_FLAT = 1e-6  # slope, of the channel's largest, below which it counts as that


@dataclass(frozen=True)
class Fit:
    """An approximation of one layer, with gamma >= 0: scale * h + shift, (C,) in float64, and the parts that follow."""

    form: str  # "affine", "polynomial" or "lines"
    size: int  # the degree, or the number of lines
    scale: Tensor
    shift: Tensor
    parts: list[nn.Module]
    has_activation: bool = False  # whether a ReLU behind the layer is included; else it stays
    max_error: float = 0.0  # on what was seen, as a share of the standard deviation of the layer's output
    rms_error: float = 0.0  # root mean square, on guessed values too

    def __call__(self, h: Tensor) -> Tensor:
        """Evaluate for h, (C, S), in the precision of a folded network."""
        y = torch.addcmul(self.shift[:, None], h, self.scale[:, None]).T.float()
        for part in self.parts:
            y = part(y)
        return y.T.to(h)


class LayerFunction:
    """The function of one layer, gamma >= 0, on standardised data; `high` limits a ReLU (inf) or ReLU6 behind it."""

    def __init__(self, transform: ChannelMap | Transform, data: WeightedSample, high: float | None) -> None:
        self.lmbda, self.gamma, self.beta = transform.lmbda, transform.gamma, transform.beta
        self.data, self.high = data, high
        self.h, self.weight = data.h, data.weight / data.weight.sum()
        self.low, self.top = data.h.amin(1), data.h.amax(1)
        self.values = self.limited(self.unlimited(self.h))
        spread = self.values - (self.values @ self.weight)[:, None]
        self.scale = max(self._rms(spread), 1e-30)

    def unlimited(self, h: Tensor) -> Tensor:
        """Return the layer's output for h, (C, S)."""
        return self.gamma[:, None] * yeo_johnson(h, self.lmbda[:, None]) + self.beta[:, None]

    def limited(self, y: Tensor) -> Tensor:
        """Apply the ReLU behind the layer, if there is one."""
        return y if self.high is None else y.clamp(0.0, self.high)

    def slope(self, h: Tensor) -> Tensor:
        """Return the derivative of the layer's output at h, (C, S)."""
        s = torch.where(h < 0, -1.0, 1.0).to(h)
        return self.gamma[:, None] * torch.exp(s * (self.lmbda[:, None] - 1) * torch.log1p(h.abs()))

    def inverse(self, y: float, fallback: Tensor) -> Tensor:
        """Return h where the layer's output is y, (C,); `fallback` where it never is."""
        value = (y - self.beta) / self.gamma
        s = torch.where(value < 0, -1.0, 1.0).to(value)
        p = 1 + s * (self.lmbda - 1)
        base = 1 + p * value.abs()
        a = torch.where(p == 0, value.abs().expm1(), base.pow(1 / torch.where(p == 0, 1.0, p)) - 1)
        h = torch.where(base > 0, s * a, torch.nan)
        return torch.where(h.isfinite(), h, fallback)

    def affine(self) -> Fit:
        """Return the least-squares line, which leaves a ReLU to itself."""
        value, weight = self.unlimited(self.h), self.weight
        centre, mean = self.h @ weight, value @ weight
        centred = self.h - centre[:, None]
        power = centred.square() @ weight
        slope = torch.where(power > 0, (centred * value) @ weight / power, 0.0)
        return self.measured(Fit("affine", 1, slope, mean - slope * centre, []))

    def measured(self, fit: Fit) -> Fit:
        """Return a fit with its errors."""
        values = fit(self.h)
        error = ((values if fit.has_activation else self.limited(values)) - self.values) / self.scale
        return replace(fit, max_error=float(error[:, : self.data.seen].abs().max()), rms_error=self._rms(error))

    def _rms(self, values: Tensor) -> float:
        return float((values.square() @ self.weight).mean().sqrt())


class PolynomialFitter:
    """Polynomials for one function."""

    def __init__(self, function: LayerFunction) -> None:
        """Find the root and the range of each channel."""
        self.function = function
        high, low, top = function.high, function.low, function.top
        self.root = self._root()
        if high is not None:
            self.root = self.root.maximum(low - _ROOM * (top - low).clamp_min(1.0))
        reach = top - self.root if high is not None else torch.maximum(top - self.root, self.root - low)
        if high is not None and high < float("inf"):  # beyond it nothing rises
            reach = torch.minimum(reach, function.inverse(high, self.root + reach) - self.root)
        self.reach = torch.where((reach > 0) & self.root.isfinite() & (function.gamma > 0), reach, 0.0)
        self.limit = -1.0 if high is None else 0.0

    def fit(self, size: int) -> Fit:
        """Fit by least squares on the data. Each channel is limited to as much of its range as serves it best: a few
        values far out would bend a polynomial of low degree for all the others.
        """
        solutions = [equations.solve(size) for equations in self._equations]
        best = torch.stack([error for _, error in solutions]).argmin(0)

        def pick(values: list[Tensor]) -> Tensor:
            return torch.stack(values).take_along_dim(best.expand_as(values[0])[None], 0)[0]

        scale, shift = (pick([getattr(one, name) for one in self._equations]) for name in ("to_p", "from_p"))
        parts = [limits(self.limit, 1.0), Polynomial(pick([values for values, _ in solutions]))]
        return self.function.measured(Fit("polynomial", size, scale, shift, parts, has_activation=self.limit == 0))

    @cached_property
    def _equations(self) -> list[_Equations]:
        dead = (self.function.gamma == 0).double()
        scales = [torch.where(self.reach > 0, 1 / (share * self.reach), 0.0) for share in _SHARES]
        shifts = [torch.where(self.reach > 0, -self.root * scale, dead) for scale in scales]
        return [_Equations(self.function, *line, self.limit) for line in zip(scales, shifts, strict=True)]

    def _root(self) -> Tensor:
        """Return where each channel is 0, or where its tangent at the end of the range would be."""
        function, low, top = self.function, self.function.low, self.function.top

        def value(h: Tensor) -> Tensor:
            return function.unlimited(h[:, None])[:, 0]

        def tangent(h: Tensor) -> Tensor:
            return h - value(h) / function.slope(h[:, None])[:, 0]

        root = torch.where(value(low) > 0, tangent(low), function.inverse(0.0, low))
        return torch.where(value(top) < 0, tangent(top) if function.high is None else top, root)


class _Equations:
    """Normal equations of the polynomials in p = clamp(to_p * h + from_p, low, 1), of all degrees at once."""

    def __init__(self, function: LayerFunction, to_p: Tensor, from_p: Tensor, low: float) -> None:
        self.to_p, self.from_p = to_p, from_p
        p = torch.addcmul(from_p[:, None], function.h, to_p[:, None]).clamp(low, 1.0)
        power, powers, products = p, [], []
        for k in range(2 * MAX_SIZE):
            powers.append(power @ function.weight)
            if k < MAX_SIZE:
                products.append((power * function.values) @ function.weight)
            power = power * p
        self._powers, self._products = torch.stack(powers), torch.stack(products)
        self._target = function.values.square() @ function.weight

    def solve(self, degree: int) -> tuple[Tensor, Tensor]:
        """Return the coefficients, (degree, C), and the mean squared error, (C,)."""
        k = torch.arange(degree, device=self.to_p.device)
        gram, products = self._powers.T[:, k[:, None] + k + 1], self._products[:degree].T
        ridge = 1e-12 * gram.diagonal(dim1=1, dim2=2).sum(1) + 1e-30  # dead channels have no data at all
        gram = gram + torch.eye(degree, dtype=gram.dtype, device=gram.device) * ridge[:, None, None]
        coefficients = torch.linalg.solve(gram, products[..., None])[..., 0]
        return coefficients.T.contiguous(), self._target - (coefficients * products).sum(1)


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
        data = sums[0] / sums[0, :, -1:].clamp_min(1e-30)
        slope = function.slope(self.h.clamp(self.start[:, None], self.end[:, None])).clamp_min(1e-30).log()
        turned = (slope - slope[:, :1]).abs()
        self.rank = data + turned / turned[:, -1:].clamp_min(1e-12)  # of the data, and of the slope's change

    def fit(self, size: int) -> Fit:
        """Fit so many lines by least squares on the data."""
        knots = self._knots(size)
        is_line, slope, height = self._only_line(knots[:, :1])
        live = self.function.gamma[:, None] > 0
        slopes = torch.where(is_line, slope, self._segments(knots)[0])
        slopes = torch.where(live, slopes.maximum(_FLAT * slopes.amax(1, keepdim=True)), 1.0)  # m_0 ... m_K
        lifts = nn.functional.pad(slopes[:, 1:-1] * knots.diff(dim=1), (1, 0))  # m_k * (t_(k+1) - t_k); first, y(t_1)
        lifts[:, :1] = torch.where(is_line, height, self._offset(knots, slopes, lifts.cumsum(1)))
        lifts = torch.where(live, lifts, nn.functional.pad(self.function.beta[:, None], (0, size - 2)))
        last, bends = torch.where(live, slopes, 0.0)[:, -1], slopes[:, :-1] / slopes[:, 1:]  # m_K, m_(k-1) / m_k
        pairs = zip(bends.T.flip(0), lifts.T.flip(0), strict=True)
        parts = [part for bend, lift in pairs for part in (_prelu(bend), ChannelAffine(torch.ones_like(lift), lift))]
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
        """Return what is missing, on average, of a function with these heights at its divisions, (C, 1); where no data
        lies in what the ReLU lets through, the layer's output at the first division.
        """
        before = torch.searchsorted(knots, self.h).sub_(1).clamp_min_(0)
        line = before + (self.h > knots[:, :1])
        y = heights.gather(1, before) + (self.h - knots.gather(1, before)) * slopes.gather(1, line)
        total = self.weight.sum(1, keepdim=True)
        missing = (self.weight * (self.values - y)).sum(1, keepdim=True) / total.clamp_min(1e-30)
        return torch.where(total > 0, missing, self.function.unlimited(knots[:, :1]))

    def _domain(self) -> tuple[Tensor, Tensor]:
        """Return the ends of what is fitted, (C,) each: the data, as far as a ReLU lets it through."""
        function, low, top = self.function, self.function.low, self.function.top
        if function.high is None:
            return low, top
        root = function.inverse(0.0, low)
        start = torch.where(root < top, root.maximum(low), low)
        end = torch.minimum(function.inverse(function.high, top), top) if function.high < float("inf") else top
        return start, torch.where(end > start, end, top)

    def _only_line(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the channels that a ReLU makes constant on all data, and their line: slope and height at `x`, (C, 1).
        It is the tangent where the data is nearest to what the ReLU lets through: it has no error on the data, and
        behind the data it leaves the limit where the layer does.
        """
        function, low, top = self.function, self.function.low[:, None], self.function.top[:, None]
        if function.high is None:
            return torch.zeros_like(x, dtype=torch.bool), x, x
        dead, full = function.unlimited(top) <= 0, function.unlimited(low) >= function.high
        nearest = torch.where(dead, top, low)
        slope = function.slope(nearest)
        return dead | full, slope, function.unlimited(nearest) + slope * (x - nearest)

    def _quantiles(self, size: int) -> Tensor:
        """Return divisions to begin with, (C, size - 1)."""
        ranks = self.rank[:, -1:] * torch.arange(1, size, dtype=self.rank.dtype, device=self.rank.device) / size
        return self.h.gather(1, torch.searchsorted(self.rank, ranks).clamp_max(self.h.shape[1] - 1))

    def _segments(self, knots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the least-squares line of each interval, or the chord where data is too little: (C, size) slopes, and
        x and y of a point that it goes through.
        """
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
        return slope.clamp(torch.minimum(a, b), torch.maximum(a, b)), x, y


def _prelu(slopes: Tensor) -> nn.Module:
    layer = nn.PReLU(len(slopes), device=slopes.device, dtype=torch.float32).requires_grad_(False)
    layer.weight.copy_(slopes)
    return layer
