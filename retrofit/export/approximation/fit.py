"""Polynomials and lines in place of the power transform, fitted per channel on the values that a
layer really sees.

A runtime that does not fuse elementwise operations pays one pass over memory for each, and for the
logarithm many. The polynomials here need two passes for a parabola, and two more for each further
degree:

    y = p * (c1 + c2 * p),    p = clamp(scale * h + shift, low, 1)

p is 0 at the root of the function, so that no constant is left to add, and the limits are the same
for every channel, so that runtimes fuse them into the convolution that also takes in scale and
shift. Behind a ReLU only the part above the root is fitted, and the ReLU is gone.

A runtime that fuses per-channel constants and PReLU into the convolution before them needs no pass
over memory for lines, continuous and piecewise linear. With slopes m_0 ... m_K between divisions at
t_1 < ... < t_K,

    y = m_K * (h - t_K);    for k = K ... 1:  y = prelu(y; m_(k-1) / m_k) + what lifts t_(k-1) to 0

as PReLU changes the slope below 0 and leaves what is above. The transform is convex throughout for
lambda > 1, concave for lambda < 1. The least-squares lines of adjacent intervals therefore meet
where the best division between them is: fitting lines and moving divisions to where they meet, in
turns, finds both.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from retrofit.export.approximation.samples import WeightedSample
from retrofit.export.power import INF, Fit, Polynomial, Transform, limits
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.forms import ChannelAffine
from retrofit.layers.power_transform import yeo_johnson

# Largest degree of a polynomial, and largest number of lines
MAX_SIZE = 8
# Largest distance of a root below the data, as a share of the data's range: a polynomial is to see
# more than a sliver
_ROOM = 0.5
# Shares of that range to try
_SHARES = (1.0, 0.75, 0.56, 0.42, 0.32, 0.24, 0.18, 0.13)
_ROUNDS = 50
# Smallest slope, as a share of the channel's largest
_FLAT = 1e-6


class LayerFunction:
    """The function of one layer, gamma >= 0, on standardized data; `high` limits a ReLU (inf) or
    ReLU6 behind it.
    """

    def __init__(
        self, transform: ChannelMap | Transform, data: WeightedSample, high: float | None
    ) -> None:
        self.lmbda = transform.lmbda
        self.gamma = transform.gamma
        self.beta = transform.beta
        self.data = data
        self.high = high
        self.h = data.h
        self.weight = data.weight / data.weight.sum()
        self.low = data.h.amin(1)
        self.top = data.h.amax(1)
        self.values = self.limited(self.unlimited(self.h))
        spread = self.values - (self.values @ self.weight)[:, None]
        self.scale = max(self._rms(spread), 1e-30)

    def unlimited(self, h: Tensor) -> Tensor:
        """Return the layer's output for h, (C, S)."""
        return self.gamma[:, None] * yeo_johnson(h, self.lmbda[:, None]) + self.beta[:, None]

    def limited(self, y: Tensor) -> Tensor:
        """Apply the ReLU behind the layer, if there is one."""
        if self.high is None:
            return y
        return y.clamp(0.0, self.high)

    def slope(self, h: Tensor) -> Tensor:
        """Return the derivative of the layer's output at h, (C, S)."""
        sign = torch.where(h < 0, -1.0, 1.0).to(h)
        curvature = self.lmbda[:, None] - 1
        growth = torch.exp(sign * curvature * torch.log1p(h.abs()))
        return self.gamma[:, None] * growth

    def inverse(self, y: float, fallback: Tensor) -> Tensor:
        """Return h where the layer's output is y, (C,); `fallback` where it never is."""
        value = (y - self.beta) / self.gamma
        size = value.abs()
        sign = torch.where(value < 0, -1.0, 1.0).to(value)
        exponent = 1 + sign * (self.lmbda - 1)
        is_logarithm = exponent == 0
        base = 1 + exponent * size
        root = base.pow(1 / torch.where(is_logarithm, 1.0, exponent))
        distance = torch.where(is_logarithm, size.expm1(), root - 1)
        h = torch.where(base > 0, sign * distance, torch.nan)
        return torch.where(h.isfinite(), h, fallback)

    def affine(self) -> Fit:
        """Return the least-squares line, which leaves a ReLU to itself."""
        value = self.unlimited(self.h)
        weight = self.weight
        centre = self.h @ weight
        mean = value @ weight
        centred = self.h - centre[:, None]
        power = centred.square() @ weight
        slope = torch.where(power > 0, (centred * value) @ weight / power, 0.0)
        return self.measured(Fit("affine", 1, slope, mean - slope * centre, []))

    def measured(self, fit: Fit) -> Fit:
        """Return a fit with its errors."""
        values = fit(self.h)
        if not fit.has_activation:
            values = self.limited(values)
        error = (values - self.values) / self.scale
        largest = float(error[:, : self.data.seen].abs().max())
        return replace(fit, max_error=largest, rms_error=self._rms(error))

    def _rms(self, values: Tensor) -> float:
        return float((values.square() @ self.weight).mean().sqrt())


class PolynomialFitter:
    """Polynomials in p = clamp(scale * h + shift, low, 1) for one function."""

    def __init__(self, function: LayerFunction) -> None:
        """Find the root and the range of each channel, and sum up what least squares need, for all
        shares of it.
        """
        self.function = function
        root = self._root()
        reach = self._reach(root)
        self.limit = -1.0 if function.high is None else 0.0
        is_live = reach > 0
        scales = [torch.where(is_live, 1 / (share * reach), 0.0) for share in _SHARES]
        self.scales = torch.stack(scales)
        constant = (function.gamma == 0).double()
        self.shifts = torch.where(is_live, -root * self.scales, constant)
        moments = map(self._moments, self.scales, self.shifts)
        powers, products = zip(*moments, strict=True)
        self.powers = torch.stack(powers)
        self.products = torch.stack(products)

    def _root(self) -> Tensor:
        """Return where the function is 0, or would be: beyond the data, where its tangent is."""
        function = self.function
        ends = torch.stack([function.low, function.top], 1)
        values = function.unlimited(ends)
        tangents = ends - values / function.slope(ends)
        is_above = values[:, 0] > 0
        is_below = values[:, 1] < 0
        within = function.inverse(0.0, function.low)
        root = torch.where(is_above, tangents[:, 0], within)
        if function.high is None:
            return torch.where(is_below, tangents[:, 1], root)
        root = torch.where(is_below, function.top, root)
        room = _ROOM * (function.top - function.low).clamp_min(1.0)
        return root.maximum(function.low - room)

    def _reach(self, root: Tensor) -> Tensor:
        """Return how far from the root the function is fitted; 0 for a channel that is constant."""
        function = self.function
        reach = function.top - root
        if function.high is None:
            reach = torch.maximum(reach, root - function.low)
        # Beyond its upper limit nothing rises
        elif function.high < INF:
            limit = function.inverse(function.high, root + reach)
            reach = torch.minimum(reach, limit - root)
        is_live = (reach > 0) & root.isfinite() & (function.gamma > 0)
        return torch.where(is_live, reach, 0.0)

    def fit(self, size: int) -> Fit:
        """Fit by least squares on the data. Each channel is limited to as much of its range as
        serves it best: a few values far out would bend a polynomial of low degree for all the
        others.
        """
        k = torch.arange(size, device=self.scales.device)
        gram = self.powers[..., k[:, None] + k + 1]
        products = self.products[..., :size]
        # Dead channels have no data at all
        ridge = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).sum(-1) + 1e-30
        identity = torch.eye(size, dtype=gram.dtype, device=gram.device)
        regular = gram + identity * ridge[..., None, None]
        solution = torch.linalg.solve(regular, products[..., None])
        coefficients = solution[..., 0]
        power = self.function.values.square() @ self.function.weight
        explained = (coefficients * products).sum(-1)
        left = power - explained
        best = left.argmin(0)
        channels = torch.arange(left.shape[1], device=left.device)
        polynomial = Polynomial(coefficients[best, channels].T.contiguous())
        fit = Fit(
            "polynomial",
            size,
            scale=self.scales[best, channels],
            shift=self.shifts[best, channels],
            parts=[limits(self.limit, 1.0), polynomial],
            has_activation=self.limit == 0,
        )
        return self.function.measured(fit)

    def _moments(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of p, p^2, ..., (C, K), and of their products with the function's
        values.
        """
        function = self.function
        powers = []
        products = []
        p = torch.addcmul(shift[:, None], function.h, scale[:, None]).clamp(self.limit, 1.0)
        power = p
        for k in range(2 * MAX_SIZE):
            powers.append(power @ function.weight)
            if k < MAX_SIZE:
                products.append((power * function.values) @ function.weight)
            power = power * p
        return torch.stack(powers, 1), torch.stack(products, 1)


class LineFitter:
    """Piecewise-linear functions for one function."""

    def __init__(self, function: LayerFunction) -> None:
        """Sort the values of each channel on which a ReLU leaves something, and sum up what least
        squares need.
        """
        self.function = function
        self.start, self.end = self._range()
        self.h, order = function.h.sort(1)
        within = self.h.clamp(self.start[:, None], self.end[:, None])
        is_fitted = self.h == within
        self.weight = function.weight[order] * is_fitted
        self.values = function.unlimited(self.h)
        self.sums = self._running_sums()
        self.rank = self._ranks(within)

    def _running_sums(self) -> Tensor:
        """Return the weighted sums of 1, h, y, h^2 and h * y before each value, (5, C, S + 1)."""
        weighted = self.weight * self.h
        moments = [
            self.weight,
            weighted,
            self.weight * self.values,
            weighted * self.h,
            weighted * self.values,
        ]
        sums = torch.stack(moments).cumsum(2)
        return nn.functional.pad(sums, (1, 0))

    def _ranks(self, within: Tensor) -> Tensor:
        """Return the share of the data, and of the function's turn, that comes before each value,
        (C, S).
        """
        data = self.sums[0, :, 1:]
        slope = self.function.slope(within).clamp_min(1e-30).log()
        turned = (slope - slope[:, :1]).abs()
        share_of_data = data / data[:, -1:].clamp_min(1e-30)
        share_of_turn = turned / turned[:, -1:].clamp_min(1e-12)
        return share_of_data + share_of_turn

    def _range(self) -> tuple[Tensor, Tensor]:
        """Return the ends of what is fitted, (C,): the data, as far as a ReLU lets it through."""
        function = self.function
        low = function.low
        top = function.top
        if function.high is None:
            return low, top
        root = function.inverse(0.0, low)
        start = torch.where(root < top, root.maximum(low), low)
        end = top
        if function.high < INF:
            end = torch.minimum(function.inverse(function.high, top), top)
        return start, torch.where(end > start, end, top)

    def fit(self, size: int) -> Fit:
        """Fit so many lines by least squares on the data."""
        function = self.function
        knots = self._knots(size)
        is_line, slope, height = self._only_line(knots[:, :1])
        is_live = function.gamma[:, None] > 0
        # The slopes m_0 ... m_K of the segments.
        slopes = torch.where(is_line, slope, self._segments(knots)[0])
        flattest = _FLAT * slopes.amax(1, keepdim=True)
        slopes = torch.where(is_live, slopes.maximum(flattest), 1.0)
        # What the function rises by in each segment, m_k * (t_(k+1) - t_k); the first is y(t_1).
        rises = slopes[:, 1:-1] * knots.diff(dim=1)
        lifts = nn.functional.pad(rises, (1, 0))
        offset = self._offset(knots, slopes, lifts.cumsum(1))
        lifts[:, :1] = torch.where(is_line, height, offset)
        constant = nn.functional.pad(function.beta[:, None], (0, size - 2))
        lifts = torch.where(is_live, lifts, constant)
        last = torch.where(is_live[:, 0], slopes[:, -1], 0.0)
        shift = -last * knots[:, -1]
        return function.measured(Fit("lines", size, last, shift, _bends(slopes, lifts)))

    def _knots(self, size: int) -> Tensor:
        """Return the best divisions, (C, size - 1): each where the lines beside it meet."""
        steps = torch.arange(1, size, dtype=self.rank.dtype, device=self.rank.device)
        ranks = self.rank[:, -1:] * steps / size
        last = self.h.shape[1] - 1
        places = torch.searchsorted(self.rank, ranks).clamp_max(last)
        knots = self.h.gather(1, places)
        for _ in range(_ROUNDS):
            slope, x, y = self._segments(knots)
            intercept = y - slope * x
            turn = slope.diff(dim=1)
            is_straight = turn == 0
            meet = -intercept.diff(dim=1) / torch.where(is_straight, 1.0, turn)
            knots = torch.where(is_straight, knots, meet)
            knots = knots.clamp(x[:, :-1], x[:, 1:])
        return knots

    def _offset(self, knots: Tensor, slopes: Tensor, heights: Tensor) -> Tensor:
        """Return what is missing, on average, of a function with these heights at its divisions,
        (C, 1); where no data lies in what the ReLU lets through, the layer's output at the first
        division.
        """
        before = torch.searchsorted(knots, self.h).sub_(1).clamp_min_(0)
        first = knots[:, :1]
        line = before + (self.h > first)
        distance = self.h - knots.gather(1, before)
        y = heights.gather(1, before) + distance * slopes.gather(1, line)
        missing = self.weight * (self.values - y)
        total = self.weight.sum(1, keepdim=True)
        mean = missing.sum(1, keepdim=True) / total.clamp_min(1e-30)
        return torch.where(total > 0, mean, self.function.unlimited(first))

    def _only_line(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the channels that a ReLU makes constant on all data, and their line: slope and
        height at `x`, (C, 1). It is the tangent where the data is nearest to what the ReLU lets
        through: it has no error on the data, and behind the data it leaves the limit where the
        layer does.
        """
        function = self.function
        if function.high is None:
            return torch.zeros_like(x, dtype=torch.bool), x, x
        low = function.low[:, None]
        top = function.top[:, None]
        is_dead = function.unlimited(top) <= 0
        is_full = function.unlimited(low) >= function.high
        nearest = torch.where(is_dead, top, low)
        slope = function.slope(nearest)
        height = function.unlimited(nearest) + slope * (x - nearest)
        return is_dead | is_full, slope, height

    def _segments(self, knots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the least-squares line of each interval, or the chord where data is too little:
        (C, size) slopes, and x and y of a point that it goes through.
        """
        ends = torch.cat([self.start[:, None], knots, self.end[:, None]], 1)
        width = ends.diff(dim=1).clamp_min(1e-12)
        w, wx, wy, wxx, wxy = self._sums_between(knots)
        total = w.clamp_min(1e-30)
        spread = wxx - wx * wx / total
        least_spread = 1e-8 * w.clamp_min(1e-6) * width * width
        known = spread > least_spread
        regression = (wxy - wx * wy / total) / spread
        values = self.function.unlimited(ends)
        chord = values.diff(dim=1) / width
        slope = torch.where(known, regression, chord)
        x = torch.where(known, wx / total, _middles(ends))
        y = torch.where(known, wy / total, _middles(values))
        # No line is steeper, or flatter, than the function within its interval
        steep = self.function.slope(ends)
        before = steep[:, :-1]
        behind = steep[:, 1:]
        flattest = torch.minimum(before, behind)
        steepest = torch.maximum(before, behind)
        return slope.clamp(flattest, steepest), x, y

    def _sums_between(self, knots: Tensor) -> Tensor:
        """Return the sums of `_running_sums` over each interval, (5, C, size)."""
        first = torch.zeros_like(knots[:, :1], dtype=torch.int64)
        last = first + self.h.shape[1]
        divisions = torch.searchsorted(self.h, knots)
        places = torch.cat([first, divisions, last], 1)
        sums = self.sums.take_along_dim(places.expand(5, -1, -1), 2)
        return sums.diff(dim=2)


def _middles(ends: Tensor) -> Tensor:
    return (ends[:, :-1] + ends[:, 1:]) / 2


def _bends(slopes: Tensor, lifts: Tensor) -> list[nn.Module]:
    """Return the PReLUs between the segments, the last first, and the lift behind each."""
    # m_(k-1) / m_k
    ratios = slopes[:, :-1] / slopes[:, 1:]
    parts: list[nn.Module] = []
    for ratio, lift in zip(ratios.T.flip(0), lifts.T.flip(0), strict=True):
        parts += [_prelu(ratio), ChannelAffine(torch.ones_like(lift), lift)]
    return parts


def _prelu(bend: Tensor) -> nn.Module:
    prelu = nn.PReLU(len(bend), device=bend.device, dtype=torch.float32)
    prelu.requires_grad_(False).weight.copy_(bend)
    return prelu
