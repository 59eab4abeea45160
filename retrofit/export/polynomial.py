"""Polynomials in place of the power transform: fitted per channel, on the values that the layer really sees.

A runtime that does not fuse elementwise operations pays one pass over memory for each, and for the logarithm many.
The form here needs two for a parabola:

    y = p * (c1 + c2 * p),    p = clamp(scale * h + shift, low, 1)

p is 0 at the root of the function, so that no constant is left to add, and the limits are the same for every channel,
so that runtimes fuse them into the convolution that also takes in scale and shift. Behind a ReLU only the part above
the root is fitted, and the ReLU is gone. Each further degree costs two more passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from retrofit.export.layers import ChannelMap
from retrofit.layers.transform import yeo_johnson

MAX_DEGREE = 8
GAUSSIAN = 511  # quantiles of h where there are no images
_MARGIN = 1.2  # of the clamped range over that of the data, which others will exceed
_ROOM = 0.5  # of the data's range, at most, between it and a root below: the polynomial is to see more than a sliver
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)  # of that range to try
_GRID = 64  # points over the whole clamped range, which keep the polynomial sane where there is no data
_GRID_WEIGHT = 1e-3  # of all of them together, against the data's 1


@dataclass(frozen=True)
class Fit:
    """A polynomial of one degree for one layer, behind `ChannelMap.upright`.

    Attributes:
        scale: (C,) in float64; p = scale * h + shift.
        shift: (C,).
        low: Lower limit of p: 0 with the ReLU included, else -1.
        coefficients: (degree, C): of p, p^2, ...
        max_error: Largest error on the data, as a share of the standard deviation of the layer's output.
        rms_error: Root mean square of the same.
    """

    scale: Tensor
    shift: Tensor
    low: float
    coefficients: Tensor
    max_error: float
    rms_error: float

    @property
    def degree(self) -> int:
        """Of the polynomial; 1 is an affine map of h, without limits."""
        return len(self.coefficients)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return scale and shift of the map from h, of a fit of degree 1."""
        return self.coefficients[0] * self.scale, self.coefficients[0] * self.shift

    def __call__(self, h: Tensor) -> Tensor:
        """Evaluate for h, (C, S)."""
        p = torch.addcmul(self.shift[:, None].to(h), h, self.scale[:, None].to(h))
        if self.degree > 1:
            p = p.clamp(self.low, 1.0)
        y = torch.zeros_like(p)
        for c in self.coefficients.flip(0).to(h):
            y = (y + c[:, None]) * p
        return y


def gaussian_values(channels: int) -> Tensor:
    """Return what running statistics alone say about h: the quantiles of a standard normal, (C, S)."""
    ranks = (torch.arange(GAUSSIAN, dtype=torch.float64) + 0.5) / GAUSSIAN
    return torch.special.ndtri(ranks).expand(channels, -1)


class _Equations:
    """Normal equations of the polynomials in p = to_p * h + from_p, of all degrees at once."""

    def __init__(self, to_p: Tensor, from_p: Tensor) -> None:
        self.to_p, self.from_p = to_p, from_p
        self._powers = to_p.new_zeros(2 * MAX_DEGREE, len(to_p))  # sums of p, p^2, ...
        self._products = to_p.new_zeros(MAX_DEGREE, len(to_p))  # of p * target, p^2 * target, ...
        self._target = torch.zeros_like(to_p)

    def add(self, p: Tensor, target: Tensor, weight: float) -> None:
        """Add data, (C, S) each."""
        power = torch.ones_like(p)
        for k in range(2 * MAX_DEGREE):
            power = power * p
            self._powers[k] += weight * power.sum(1)
            if k < MAX_DEGREE:
                self._products[k] += weight * torch.linalg.vecdot(power, target)
        self._target += weight * target.square().sum(1)

    def solve(self, degree: int) -> tuple[Tensor, Tensor]:
        """Return the coefficients, (degree, C), and the sum of squared errors, (C,)."""
        k = torch.arange(degree, device=self.to_p.device)
        gram, products = self._powers.T[:, k[:, None] + k + 1], self._products[:degree].T
        ridge = 1e-12 * gram.diagonal(dim1=1, dim2=2).sum(1) + 1e-30  # dead channels have no data at all
        gram = gram + torch.eye(degree, dtype=gram.dtype, device=gram.device) * ridge[:, None, None]
        coefficients = torch.linalg.solve(gram, products[..., None])[..., 0]
        return coefficients.T.contiguous(), self._target - (coefficients * products).sum(1)


class Fitter:
    """All that the fits of one layer share.

    Args:
        found: The layer, upright.
        h: Values that it sees, standardised, (C, S) in float64.
        high: Upper limit of a ReLU (inf) or ReLU6 behind it that the polynomial takes in; None if there is none.
    """

    def __init__(self, found: ChannelMap, h: Tensor, high: float | None) -> None:
        """Find the root and the range of each channel."""
        self.found, self.h, self.high = found, h, high
        self.target = self._function(h)
        spread = self.target - self.target.mean(1, keepdim=True)
        self.scale = max(float(spread.square().mean().sqrt()), 1e-30)
        low, top = h.amin(1), h.amax(1)
        self.root = self._root(low, top)
        if high is not None:
            self.root = self.root.maximum(low - _ROOM * (top - low).clamp_min(1.0))
        reach = _MARGIN * (top - self.root if high is not None else torch.maximum(top - self.root, self.root - low))
        if high is not None and high < float("inf"):  # beyond it nothing rises
            reach = torch.minimum(reach, self._inverse(torch.full_like(top, high), self.root + reach) - self.root)
        self.reach = torch.where((reach > 0) & self.root.isfinite() & (found.gamma > 0), reach, 0.0)
        self.low = -1.0 if high is None else 0.0

    def fit(self, degree: int) -> Fit:
        """Fit by least squares on the data; degree 1 has no limits and leaves a ReLU to itself.

        Each channel is limited to as much of its range as serves it best: a few values far out would bend a polynomial
        of low degree for all the others.
        """
        if degree == 1:
            return self._affine()
        found = [equations.solve(degree) for equations in self._equations]
        best = torch.stack([error for _, error in found]).argmin(0)

        def pick(values: list[Tensor]) -> Tensor:
            return torch.stack(values).take_along_dim(best.expand_as(values[0])[None], 0)[0]

        to_p, from_p = (pick([getattr(one, name) for one in self._equations]) for name in ("to_p", "from_p"))
        return self._measured(Fit(to_p, from_p, self.low, pick([values for values, _ in found]), 0.0, 0.0))

    @cached_property
    def _equations(self) -> list[_Equations]:
        live, dead = self.reach > 0, (self.found.gamma == 0).double()
        grid = torch.linspace(self.low, 1.0, _GRID, dtype=self.h.dtype, device=self.h.device).expand(len(self.h), -1)
        weight = _GRID_WEIGHT * self.h.shape[1] / _GRID
        found = []
        for share in _SHARES:
            to_p = torch.where(live, 1 / (share * self.reach), 0.0)
            from_p = torch.where(live, -self.root * to_p, dead)
            h = torch.where(live[:, None], self.root[:, None] + grid * (share * self.reach)[:, None], 0.0)
            equations = _Equations(to_p, from_p)
            for values, target, amount in ((self.h, self.target, 1.0), (h, self._function(h), weight)):
                p = torch.addcmul(from_p[:, None], values, to_p[:, None]).clamp(self.low, 1.0)
                equations.add(p, target, amount)
            found.append(equations)
        return found

    def _affine(self) -> Fit:
        """Return slope * h + offset, as slope * (h + offset / slope)."""
        value = self._unlimited(self.h)
        centre, mean = self.h.mean(1), value.mean(1)
        centred = self.h - centre[:, None]
        power = centred.square().sum(1)
        slope = torch.where(power > 0, (centred * value).sum(1) / power, 0.0)
        ones = torch.ones_like(slope)
        fit = Fit(slope, mean - slope * centre, -1.0, ones[None], 0.0, 0.0)
        return self._measured(fit)

    def _measured(self, fit: Fit) -> Fit:
        values = fit(self.h)
        if self.high is not None and fit.degree == 1:
            values = values.clamp(0.0, self.high)
        error = (values - self.target) / self.scale
        return replace(fit, max_error=float(error.abs().max()), rms_error=float(error.square().mean().sqrt()))

    def _unlimited(self, h: Tensor) -> Tensor:
        found = self.found
        return found.gamma[:, None] * yeo_johnson(h, found.lmbda[:, None]) + found.beta[:, None]

    def _function(self, h: Tensor) -> Tensor:
        y = self._unlimited(h)
        return y if self.high is None else y.clamp(0.0, self.high)

    def _inverse(self, y: Tensor, fallback: Tensor) -> Tensor:
        """Return h where the function is y, (C,); `fallback` where it never is."""
        lmbda = self.found.lmbda
        value = (y - self.found.beta) / self.found.gamma
        s = torch.where(value < 0, -1.0, 1.0).to(value)
        p = 1 + s * (lmbda - 1)
        base = 1 + p * value.abs()
        a = torch.where(p == 0, value.abs().expm1(), base.pow(1 / torch.where(p == 0, 1.0, p)) - 1)
        found = torch.where(base > 0, s * a, torch.nan)
        return torch.where(found.isfinite(), found, fallback)

    def _root(self, low: Tensor, top: Tensor) -> Tensor:
        """Return where each channel is 0, or where its tangent at the end of the range would be."""

        def tangent(h: Tensor) -> Tensor:
            s = torch.where(h < 0, -1.0, 1.0).to(h)
            slope = self.found.gamma * torch.exp(s * (self.found.lmbda - 1) * torch.log1p(h.abs()))
            return h - self._unlimited(h[:, None])[:, 0] / slope

        root = self._inverse(torch.zeros_like(low), low)
        root = torch.where(self._unlimited(low[:, None])[:, 0] > 0, tangent(low), root)
        return torch.where(self._unlimited(top[:, None])[:, 0] < 0, tangent(top) if self.high is None else top, root)
