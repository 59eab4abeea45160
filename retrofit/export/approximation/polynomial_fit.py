"""Polynomials in place of the power transform, fitted per channel on the values that a layer really
sees.

A runtime that does not fuse elementwise operations pays one pass over memory for each, and for the
logarithm many. The polynomials here need two passes for a parabola, and two more for each further
degree:

    y = p * (c1 + c2 * p),    p = clamp(scale * h + shift, low, 1)

p is 0 at the root of the function, so that no constant is left to add, and the limits are the same
for every channel, so that runtimes fuse them into the convolution that also takes in scale and
shift. Behind a ReLU only the part above the root is fitted, and the ReLU is gone.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from retrofit.export.approximation.observed_values import WeightedSample
from retrofit.export.power_operator import INF, Polynomial, Replacement, Transform
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.inference_forms import FunctionModule
from retrofit.layers.power_transform import yeo_johnson

# Largest degree of a polynomial
MAX_DEGREE = 8
# Largest distance of a root below the data, as a share of the data's range: a polynomial is to see
# more than a sliver
_ROOT_DISTANCE = 0.5
# Shares of that range to try
_SHARES = (1.0, 0.75, 0.56, 0.42, 0.32, 0.24, 0.18, 0.13)


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
        self._prepare_polynomials()

    def _prepare_polynomials(self) -> None:
        """Find the root and the range of each channel, and compute the moments that least squares
        need for every share of the range.
        """
        root = self._root()
        reach = self._reach(root)
        self.limit = -1.0 if self.high is None else 0.0
        shares = torch.tensor(_SHARES, dtype=reach.dtype, device=reach.device)
        self.scales = (1 / (shares[:, None] * reach)).masked_fill(reach == 0, 0.0)
        constant = (self.gamma == 0).double()
        self.shifts = torch.where(reach > 0, -root * self.scales, constant)
        moments = map(self._moments, self.scales, self.shifts)
        powers, products = zip(*moments, strict=True)
        self.powers = torch.stack(powers)
        self.products = torch.stack(products)

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
        exponent = torch.where(value < 0, 2 - self.lmbda, self.lmbda)
        base = 1 + exponent * value.abs()
        power = (base.pow(1 / exponent) - 1).where(exponent != 0, value.abs().expm1())
        h = power.copysign(value).where(base > 0, torch.nan)
        return torch.where(h.isfinite(), h, fallback)

    def affine(self) -> Replacement:
        """Return the least-squares line, which leaves a ReLU to itself."""
        value = self.unlimited(self.h)
        centre = self.h @ self.weight
        centred = self.h - centre[:, None]
        power = centred.square() @ self.weight
        slope = torch.where(power > 0, (centred * value) @ self.weight / power, 0.0)
        shift = value @ self.weight - slope * centre
        return self.measured(Replacement("affine", 1, slope, shift, []))

    def measured(self, fit: Replacement) -> Replacement:
        """Return a fit with its errors."""
        # In the precision of a folded network
        samples = self.h.T.float()
        values = fit.module()(samples).T.to(self.h)
        if not fit.has_activation:
            values = self.limited(values)
        error = (values - self.values) / self.scale
        largest = float(error[:, : self.data.seen].abs().max())
        return replace(fit, max_error=largest, rms_error=self._rms(error))

    def _rms(self, values: Tensor) -> float:
        return float((values.square() @ self.weight).mean().sqrt())

    def _root(self) -> Tensor:
        """Return the root of the function, (C,), or of its tangent at the end of the data if the
        root lies beyond.
        """
        ends = torch.stack([self.low, self.top], 1)
        values = self.unlimited(ends)
        tangents = ends - values / self.slope(ends)
        is_above = values[:, 0] > 0
        is_below = values[:, 1] < 0
        root = self.inverse(0.0, self.low)
        root = torch.where(is_above, tangents[:, 0], root)
        if self.high is None:
            return torch.where(is_below, tangents[:, 1], root)
        root = torch.where(is_below, self.top, root)
        # One far below the data is moved up
        reach = (self.top - self.low).clamp_min(1.0)
        return root.maximum(self.low - _ROOT_DISTANCE * reach)

    def _reach(self, root: Tensor) -> Tensor:
        """Return how far from the root the function is fitted, (C,); 0 for a constant channel."""
        reach = self.top - root
        if self.high is None:
            reach = torch.maximum(reach, root - self.low)
        # Beyond its upper limit nothing rises
        elif self.high < INF:
            limit = self.inverse(self.high, self.top)
            reach = torch.minimum(reach, limit - root)
        is_live = (reach > 0) & root.isfinite() & (self.gamma > 0)
        return reach.where(is_live, 0.0)

    def polynomial(self, degree: int) -> Replacement:
        """Return the least-squares polynomial in p = clamp(scale * h + shift, low, 1). Each channel
        is limited to as much of its range as
        serves it best: a few values far out would bend a polynomial of low degree for all the
        others.
        """
        coefficients = self._coefficients(degree)
        products = self.products[..., :degree]
        explained = (coefficients * products).sum(-1)
        # The squared error is what is not explained.
        best = explained.argmax(0)
        channels = torch.arange(len(best), device=best.device)
        chosen = (best, channels)
        chosen_coefficients = coefficients[chosen].T.contiguous()
        polynomial = Polynomial(chosen_coefficients)
        bounds = FunctionModule(partial(torch.clamp, min=self.limit, max=1.0))
        fit = Replacement(
            "polynomial",
            degree,
            scale=self.scales[chosen],
            shift=self.shifts[chosen],
            parts=[bounds, polynomial],
            has_activation=self.limit == 0,
        )
        return self.measured(fit)

    def _coefficients(self, degree: int) -> Tensor:
        """Return those of the least-squares polynomials, (shares, C, degree)."""
        k = torch.arange(degree, device=self.scales.device)
        gram = self.powers[..., k[:, None] + k + 1]
        # Dead channels have no data at all
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        ridge = (1e-12 * trace + 1e-30)[..., None, None]
        identity = torch.eye(degree, dtype=gram.dtype, device=gram.device)
        products = self.products[..., :degree, None]
        coefficients: Tensor = torch.linalg.solve(gram + ridge * identity, products)
        return coefficients.squeeze(-1)

    def _moments(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of p, p^2, ..., (C, K), and of their products with the function's
        values.
        """
        weight = self.weight
        h = torch.addcmul(shift[:, None], self.h, scale[:, None])
        p = h.clamp(self.limit, 1.0)
        power = p
        powers = []
        products = []
        for _ in range(2 * MAX_DEGREE):
            powers.append(power @ weight)
            products.append((power * self.values) @ weight)
            power = power * p
        return torch.stack(powers, 1), torch.stack(products, 1)
