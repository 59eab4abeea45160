"""Polynomials in place of the power transform: fitted per channel, on the values that the layer really sees.

A runtime that does not fuse elementwise operations pays one pass over memory for each, and for the logarithm many.
The form here needs two for a parabola:

    y = p * (c1 + c2 * p),    p = clamp(scale * h + shift, low, 1)

p is 0 at the root of the function, so that no constant is left to add, and the limits are the same for every channel,
so that runtimes fuse them into the convolution that also takes in scale and shift. Behind a ReLU only the part above
the root is fitted, and the ReLU is gone. Each further degree costs two more passes.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from retrofit.export.approximation.fit import MAX_SIZE, Fit, LayerFunction
from retrofit.export.power_forms import Clamp, Polynomial

_ROOM = 0.5  # of the data's range, at most, between it and a root below: the polynomial is to see more than a sliver
_SHARES = (1.0, 0.75, 0.56, 0.42, 0.32, 0.24, 0.18, 0.13)  # of that range to try


class _Equations:
    """Normal equations of the polynomials in p = clamp(to_p * h + from_p, low, 1), of all degrees at once."""

    def __init__(self, function: LayerFunction, to_p: Tensor, from_p: Tensor, low: float) -> None:
        self.to_p, self.from_p = to_p, from_p
        self._powers = to_p.new_zeros(2 * MAX_SIZE, len(to_p))  # means of p, p^2, ...
        self._products = to_p.new_zeros(MAX_SIZE, len(to_p))  # of p * value, p^2 * value, ...
        self._target = function.values.square() @ function.weight
        p = torch.addcmul(from_p[:, None], function.h, to_p[:, None]).clamp(low, 1.0)
        power = torch.ones_like(p)
        for k in range(2 * MAX_SIZE):
            power = power * p
            self._powers[k] = power @ function.weight
            if k < MAX_SIZE:
                self._products[k] = (power * function.values) @ function.weight

    def solve(self, degree: int) -> tuple[Tensor, Tensor]:
        """Return the coefficients, (degree, C), and the mean squared error, (C,)."""
        k = torch.arange(degree, device=self.to_p.device)
        gram, products = self._powers.T[:, k[:, None] + k + 1], self._products[:degree].T
        ridge = 1e-12 * gram.diagonal(dim1=1, dim2=2).sum(1) + 1e-30  # dead channels have no data at all
        gram = gram + torch.eye(degree, dtype=gram.dtype, device=gram.device) * ridge[:, None, None]
        coefficients = torch.linalg.solve(gram, products[..., None])[..., 0]
        return coefficients.T.contiguous(), self._target - (coefficients * products).sum(1)


class PolynomialFitter:
    """Polynomials for one function."""

    def __init__(self, function: LayerFunction) -> None:
        """Find the root and the range of each channel."""
        self.function = function
        h, high, gamma = function.h, function.high, function.found.gamma
        low, top = h.amin(1), h.amax(1)
        self.root = self._root(low, top)
        if high is not None:
            self.root = self.root.maximum(low - _ROOM * (top - low).clamp_min(1.0))
        reach = top - self.root if high is not None else torch.maximum(top - self.root, self.root - low)
        if high is not None and high < float("inf"):  # beyond it nothing rises
            reach = torch.minimum(reach, function.inverse(high, self.root + reach) - self.root)
        self.reach = torch.where((reach > 0) & self.root.isfinite() & (gamma > 0), reach, 0.0)
        self.low = -1.0 if high is None else 0.0

    def fit(self, size: int) -> Fit:
        """Fit by least squares on the data.

        Each channel is limited to as much of its range as serves it best: a few values far out would bend a polynomial
        of low degree for all the others.
        """
        found = [equations.solve(size) for equations in self._equations]
        best = torch.stack([error for _, error in found]).argmin(0)

        def pick(values: list[Tensor]) -> Tensor:
            return torch.stack(values).take_along_dim(best.expand_as(values[0])[None], 0)[0]

        scale, shift = (pick([getattr(one, name) for one in self._equations]) for name in ("to_p", "from_p"))
        coefficients, low = pick([values for values, _ in found]), self.low
        return self.function.measured(
            Fit(
                "polynomial",
                size,
                scale,
                shift,
                lambda: [Clamp(low, 1.0), Polynomial(coefficients)],
                has_activation=low == 0,
            )
        )

    @cached_property
    def _equations(self) -> list[_Equations]:
        live, dead = self.reach > 0, (self.function.found.gamma == 0).double()
        found = []
        for share in _SHARES:
            to_p = torch.where(live, 1 / (share * self.reach), 0.0)
            from_p = torch.where(live, -self.root * to_p, dead)
            found.append(_Equations(self.function, to_p, from_p, self.low))
        return found

    def _root(self, low: Tensor, top: Tensor) -> Tensor:
        """Return where each channel is 0, or where its tangent at the end of the range would be."""

        def value(h: Tensor) -> Tensor:
            return self.function.unlimited(h[:, None])[:, 0]

        def tangent(h: Tensor) -> Tensor:
            return h - value(h) / self.function.slope(h[:, None])[:, 0]

        root = self.function.inverse(0.0, low)
        root = torch.where(value(low) > 0, tangent(low), root)
        return torch.where(value(top) < 0, tangent(top) if self.function.high is None else top, root)
