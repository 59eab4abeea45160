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

Of the values that a layer sees a sample is kept, with the largest and the smallest. What it sees in
use goes beyond: of values to come, one in as many as were seen is expected to exceed them all. By
how much is taken from the largest: an exponential tail with the mean excess of those, as of peaks
over a threshold.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.fx import Node

from retrofit.export.capture import INF, Fit, Polynomial, Transform, limits
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.forms import ChannelAffine
from retrofit.layers.power_transform import yeo_johnson

# largest degree of a polynomial, and largest number of lines
MAX_SIZE = 8
# of each channel, over all batches
_SAMPLES = 2048
# largest, and smallest, of each channel in a batch
_EXTREMES = 32
# points in place of what lies beyond
_TAIL = 16
# what new images go beyond the largest values by, over the mean excess of those
_HEAVY = 2.0
_GAUSSIAN, _IMAGINED = (
    511,
    10_000,
)  # quantiles where there are no images, in place of so many values
# of the data's range, at most, between it and a root below: a polynomial is to see more than a
# sliver
_ROOM = 0.5
# of that range to try
_SHARES = (1.0, 0.75, 0.56, 0.42, 0.32, 0.24, 0.18, 0.13)
_ROUNDS = 50
# slope, of the channel's largest, below which it counts as that
_FLAT = 1e-6


@dataclass(frozen=True)
class WeightedSample:
    """Values of each channel, and the share that each value stands for."""

    # (C, S)
    h: Tensor
    # (S,), about 1 together
    weight: Tensor
    # so many were seen, the others behind them are guessed
    seen: int


def with_tails(h: Tensor, weight: Tensor, total: int, few: int) -> WeightedSample:
    """Add what may lie beyond a sample of `total` values: the `few` largest, and smallest, show how
    far it may be.
    """
    few = min(few, h.shape[1])
    ranks = (torch.arange(_TAIL, dtype=h.dtype, device=h.device) + 0.5) / _TAIL
    excess = -_HEAVY * torch.log1p(-ranks)
    tails = []
    for sign in (1.0, -1.0):
        largest = (sign * h).topk(few, 1).values
        tails.append(
            sign * (largest[:, :1] + (largest.mean(1, keepdim=True) - largest[:, -1:]) * excess)
        )
    guessed = torch.full(
        (2 * _TAIL,), 1 / (total * _TAIL), dtype=weight.dtype, device=weight.device
    )
    return WeightedSample(torch.cat([h, *tails], 1), torch.cat([weight, guessed]), h.shape[1])


def gaussian(channels: int, device: torch.device | None = None) -> WeightedSample:
    """Return what running statistics alone say of standardized values: the quantiles of a standard
    normal.
    """
    ranks = (torch.arange(_GAUSSIAN, dtype=torch.float64, device=device or "cpu") + 0.5) / _GAUSSIAN
    h = torch.special.ndtri(ranks).expand(channels, -1)
    return with_tails(h, torch.full_like(ranks, 1 / _GAUSSIAN), _IMAGINED, _EXTREMES)


class Observer:
    """Collects values while a network runs on so many images, in batches of any size."""

    def __init__(self, images: int) -> None:
        self._images, self._generator = images, torch.Generator().manual_seed(0)
        self._parts: dict[Node, list[tuple[Tensor, Tensor, int]]] = {}

    def take(self, node: Node, values: Tensor) -> None:
        """Keep some of the values, (N, C, *), that a node takes in one batch."""
        share = max(1, _SAMPLES * len(values) // self._images)
        values = values.movedim(1, 0).flatten(1)
        count = values.shape[1]
        chosen = torch.randint(count, (share,), generator=self._generator, device="cpu").to(
            values.device
        )
        extremes = [
            values.topk(min(_EXTREMES, count), 1, largest).values for largest in (True, False)
        ]
        self._parts.setdefault(node, []).append((values[:, chosen], torch.cat(extremes, 1), count))

    def sample(self, node: Node, channels: int, device: torch.device) -> WeightedSample:
        """Return what a node took, with what may lie beyond; a Gaussian's quantiles where nothing
        was seen.
        """
        if node not in self._parts:
            return gaussian(channels, device)
        samples, extremes, counts = zip(*self._parts[node], strict=True)
        h = torch.cat([*samples, *extremes], 1).double()
        weight = torch.full((h.shape[1],), 1 / sum(counts), dtype=h.dtype, device=h.device)
        sampled = sum(sample.shape[1] for sample in samples)
        weight[:sampled] = 1 / sampled
        return with_tails(h, weight, sum(counts), extremes[0].shape[1] // 2)


class LayerFunction:
    """The function of one layer, gamma >= 0, on standardized data; `high` limits a ReLU (inf) or
    ReLU6 behind it.
    """

    def __init__(
        self, transform: ChannelMap | Transform, data: WeightedSample, high: float | None
    ) -> None:
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
        error = (
            (values if fit.has_activation else self.limited(values)) - self.values
        ) / self.scale
        return replace(
            fit, max_error=float(error[:, : self.data.seen].abs().max()), rms_error=self._rms(error)
        )

    def _rms(self, values: Tensor) -> float:
        return float((values.square() @ self.weight).mean().sqrt())


class PolynomialFitter:
    """Polynomials in p = clamp(scale * h + shift, low, 1) for one function."""

    def __init__(self, function: LayerFunction) -> None:
        """Find the root and the range of each channel, and sum up what least squares need, for all
        shares of it.
        """
        self.function = function
        high, low, top = function.high, function.low, function.top
        ends = torch.stack([low, top], 1)
        values = function.unlimited(ends)
        before, behind = (ends - values / function.slope(ends)).unbind(
            1
        )  # where the tangents at the ends are 0
        root = torch.where(values[:, 0] > 0, before, function.inverse(0.0, low))
        root = torch.where(values[:, 1] < 0, behind if high is None else top, root)
        if high is not None:
            root = root.maximum(low - _ROOM * (top - low).clamp_min(1.0))
        reach = top - root if high is not None else torch.maximum(top - root, root - low)
        # beyond it nothing rises
        if high is not None and high < INF:
            reach = torch.minimum(reach, function.inverse(high, root + reach) - root)
        reach = torch.where((reach > 0) & root.isfinite() & (function.gamma > 0), reach, 0.0)
        self.limit = -1.0 if high is None else 0.0
        self.scales = torch.stack(
            [torch.where(reach > 0, 1 / (share * reach), 0.0) for share in _SHARES]
        )
        self.shifts = torch.where(reach > 0, -root * self.scales, (function.gamma == 0).double())
        moments = [self._moments(*line) for line in zip(self.scales, self.shifts, strict=True)]
        self.powers, self.products = (torch.stack(sums) for sums in zip(*moments, strict=True))

    def fit(self, size: int) -> Fit:
        """Fit by least squares on the data. Each channel is limited to as much of its range as
        serves it best: a few values far out would bend a polynomial of low degree for all the
        others.
        """
        k = torch.arange(size, device=self.scales.device)
        gram, products = self.powers[..., k[:, None] + k + 1], self.products[..., :size]
        ridge = (
            1e-12 * gram.diagonal(dim1=-2, dim2=-1).sum(-1) + 1e-30
        )  # dead channels have no data at all
        gram = gram + torch.eye(size, dtype=gram.dtype, device=gram.device) * ridge[..., None, None]
        coefficients = torch.linalg.solve(gram, products[..., None])[..., 0]
        left = self.function.values.square() @ self.function.weight - (coefficients * products).sum(
            -1
        )
        best, channels = left.argmin(0), torch.arange(left.shape[1], device=left.device)
        parts = [limits(self.limit, 1.0), Polynomial(coefficients[best, channels].T.contiguous())]
        scale, shift = self.scales[best, channels], self.shifts[best, channels]
        return self.function.measured(
            Fit("polynomial", size, scale, shift, parts, has_activation=self.limit == 0)
        )

    def _moments(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of p, p^2, ..., (C, K), and of their products with the function's
        values.
        """
        function, powers, products = self.function, [], []
        power = p = torch.addcmul(shift[:, None], function.h, scale[:, None]).clamp(self.limit, 1.0)
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
        low, top, high = function.low, function.top, function.high
        self.start, self.end = (
            low,
            top,
        )  # of what is fitted: the data, as far as a ReLU lets it through
        if high is not None:
            root = function.inverse(0.0, low)
            end = top if high == INF else torch.minimum(function.inverse(high, top), top)
            self.start = torch.where(root < top, root.maximum(low), low)
            self.end = torch.where(end > self.start, end, top)
        self.h, order = function.h.sort(1)
        inside = (self.h >= self.start[:, None]) & (self.h <= self.end[:, None])
        self.weight, self.values = function.weight[order] * inside, function.unlimited(self.h)
        w, x, y = self.weight, self.h, self.values
        sums = torch.stack([w, w * x, w * y, w * x * x, w * x * y]).cumsum(2)
        self.sums = nn.functional.pad(sums, (1, 0))
        data = sums[0] / sums[0, :, -1:].clamp_min(1e-30)
        slope = (
            function.slope(self.h.clamp(self.start[:, None], self.end[:, None]))
            .clamp_min(1e-30)
            .log()
        )
        turned = (slope - slope[:, :1]).abs()
        self.rank = data + turned / turned[:, -1:].clamp_min(
            1e-12
        )  # of the data, and of the slope's change

    def fit(self, size: int) -> Fit:
        """Fit so many lines by least squares on the data."""
        knots = self._knots(size)
        is_line, slope, height = self._only_line(knots[:, :1])
        live = self.function.gamma[:, None] > 0
        slopes = torch.where(is_line, slope, self._segments(knots)[0])
        slopes = torch.where(
            live, slopes.maximum(_FLAT * slopes.amax(1, keepdim=True)), 1.0
        )  # m_0 ... m_K
        lifts = nn.functional.pad(
            slopes[:, 1:-1] * knots.diff(dim=1), (1, 0)
        )  # m_k * (t_(k+1) - t_k); first, y(t_1)
        lifts[:, :1] = torch.where(is_line, height, self._offset(knots, slopes, lifts.cumsum(1)))
        lifts = torch.where(
            live, lifts, nn.functional.pad(self.function.beta[:, None], (0, size - 2))
        )
        last, bends = (
            torch.where(live, slopes, 0.0)[:, -1],
            slopes[:, :-1] / slopes[:, 1:],
        )  # m_K, m_(k-1) / m_k
        pairs = zip(bends.T.flip(0), lifts.T.flip(0), strict=True)
        parts: list[nn.Module] = []
        for bend, lift in pairs:
            prelu = nn.PReLU(len(bend), device=bend.device, dtype=torch.float32).requires_grad_(
                False
            )
            prelu.weight.copy_(bend)
            parts += [prelu, ChannelAffine(torch.ones_like(lift), lift)]
        return self.function.measured(Fit("lines", size, last, -last * knots[:, -1], parts))

    def _knots(self, size: int) -> Tensor:
        """Return the best divisions, (C, size - 1): each where the lines on either side of it meet."""
        ranks = (
            self.rank[:, -1:]
            * torch.arange(1, size, dtype=self.rank.dtype, device=self.rank.device)
            / size
        )
        knots = self.h.gather(
            1, torch.searchsorted(self.rank, ranks).clamp_max(self.h.shape[1] - 1)
        )
        for _ in range(_ROUNDS):
            slope, x, y = self._segments(knots)
            turn = slope.diff(dim=1)
            meet = -(y - slope * x).diff(dim=1) / torch.where(turn == 0, 1.0, turn)
            knots = torch.where(turn == 0, knots, meet).clamp(x[:, :-1], x[:, 1:])
        return knots

    def _offset(self, knots: Tensor, slopes: Tensor, heights: Tensor) -> Tensor:
        """Return what is missing, on average, of a function with these heights at its divisions,
        (C, 1); where no data lies in what the ReLU lets through, the layer's output at the first
        division.
        """
        before = torch.searchsorted(knots, self.h).sub_(1).clamp_min_(0)
        line = before + (self.h > knots[:, :1])
        y = heights.gather(1, before) + (self.h - knots.gather(1, before)) * slopes.gather(1, line)
        total = self.weight.sum(1, keepdim=True)
        missing = (self.weight * (self.values - y)).sum(1, keepdim=True) / total.clamp_min(1e-30)
        return torch.where(total > 0, missing, self.function.unlimited(knots[:, :1]))

    def _only_line(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the channels that a ReLU makes constant on all data, and their line: slope and
        height at `x`, (C, 1). It is the tangent where the data is nearest to what the ReLU lets
        through: it has no error on the data, and behind the data it leaves the limit where the
        layer does.
        """
        function, low, top = self.function, self.function.low[:, None], self.function.top[:, None]
        if function.high is None:
            return torch.zeros_like(x, dtype=torch.bool), x, x
        dead, full = function.unlimited(top) <= 0, function.unlimited(low) >= function.high
        nearest = torch.where(dead, top, low)
        slope = function.slope(nearest)
        return dead | full, slope, function.unlimited(nearest) + slope * (x - nearest)

    def _segments(self, knots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the least-squares line of each interval, or the chord where data is too little:
        (C, size) slopes, and x and y of a point that it goes through.
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
        a, b = (
            steep[:, :-1],
            steep[:, 1:],
        )  # no line is steeper, or flatter, than the function within its interval
        return slope.clamp(torch.minimum(a, b), torch.maximum(a, b)), x, y
