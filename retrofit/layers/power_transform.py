"""The Yeo-Johnson power transform, and the estimate of its lambda (Eftekhari & Papyan 2025, eq. 3
and section 4.1).

lambda is the maximum-likelihood estimate by Newton's method from lambda = 1. The paper's single
step divides by L'', which trained channels can make tiny or negative, and takes the set's variance
to be one, which it is not where eps is comparable to it. Here L' and L'' hold for any variance, L''
is floored, and the step is bounded so that no value of the set is stretched by more than
exp(`LOG_STRETCH`). On well-behaved sets (a Gaussian has L'' = 0.58) neither bound acts, and the
estimate is the paper's.

Throughout, with s = sign(h), a = |h|, l = log(1 + a) and p = 1 + s * (lambda - 1), both branches of
eq. 3 read

    psi = s * (exp(p * l) - 1) / p        s * l at p = 0

and at lambda = 1

    d = (1 + a) * l - a           d psi / d lambda
    e = (1 + a) * l^2 - 2 * d     d^2 psi / d lambda^2, but for its sign s
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers.function_transforms import transformed

# floor of L''
MIN_CURVATURE = 0.1
# log of the most that the step may stretch a value of the set
LOG_STRETCH = 4.0
# stands for zero where it is divided by
TINY = 1e-30
# stands for p = 0: expm1(p * l) / p is then l, to the bit
_NEAR_ZERO = 1e-20
_SERIES_RADIUS = 0.5
# Of expm1(u) / u and of its derivative, the highest power first. What is left out is below
# 0.5**12 / (12! * 14) < 1e-13 of the leading 1/2: exact in float32, and near so in float64.
_GROWTH = [1 / math.factorial(k + 1) for k in range(12, -1, -1)]
_DERIVATIVE = [1 / (math.factorial(k) * (k + 2)) for k in range(12, -1, -1)]


def yeo_johnson(h: Tensor, lmbda: Tensor) -> Tensor:
    """Apply the Yeo-Johnson power transform.

    `expm1` and `log1p` keep it exact near lmbda = 0 and 2, where the formula would divide by 0, and
    the identity (up to rounding) at lmbda = 1. It is twice continuously differentiable in h and
    strictly increasing in both arguments.

    `h` holds standardized values of any shape; `lmbda`, the parameter, broadcasts to it. The result
    has the shape and dtype that the two broadcast to.
    """
    if transformed():
        s, p, log = _power_and_log(h, lmbda)
        return s * log * _relative_growth(p * log)
    out: Tensor = _YeoJohnson.apply(h, lmbda)
    return out


def transform(h: Tensor, log: Tensor, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return psi(h; 1 + change), u = p * l and expm1(u), of which psi is s / p times; `log` is
    log(1 + |h|).
    """
    up = 1 + change
    down = 1 - change
    up = torch.where(up == 0, _NEAR_ZERO, up)
    down = torch.where(down == 0, _NEAR_ZERO, down)
    below = h < 0
    u = log * torch.where(below, down, up)
    growth = torch.expm1(u)
    by_power = torch.where(below, -1 / down, 1 / up)
    return growth * by_power, u, growth


def _power_and_log(h: Tensor, lmbda: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return s (+1 at zero), p and l."""
    s = torch.where(h < 0, -1.0, 1.0).to(h.dtype)
    # s * h is |h| with a derivative at zero
    return s, 1 + s * (lmbda - 1), torch.log1p(s * h)


def _relative_growth(u: Tensor) -> Tensor:
    """Return expm1(u) / u, by series near 0, so that autograd differentiates it there too, as often
    as asked.
    """
    small = u.abs() < _SERIES_RADIUS
    w = torch.where(small, 1.0, u)
    return torch.where(small, _series(u, small, _GROWTH), torch.expm1(w) / w)


def _series(u: Tensor, small: Tensor, coefficients: list[float]) -> Tensor:
    """Return the power series of some coefficients, the last of them first, where `u` is small."""
    v = torch.where(small, u, 0.0)
    series = torch.full_like(v, coefficients[0])
    for coefficient in coefficients[1:]:
        series = series * v + coefficient
    return series


def lmbda_derivative(u: Tensor, log: Tensor, growth: Tensor) -> Tensor:
    """Return d psi / d lmbda = l^2 * (exp(u) * (u - 1) + 1) / u^2, u = p * l, growth = expm1(u); by
    series near 0.
    """
    small = u.abs() < _SERIES_RADIUS
    series = _series(u, small, _DERIVATIVE)
    w = torch.where(small, 1.0, u)
    return log * log * torch.where(small, series, ((growth + 1) * w - growth) / (w * w))


class _YeoJohnson(torch.autograd.Function):
    """psi with its closed-form derivatives: only h and lmbda are saved."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, lmbda: Tensor) -> Tensor:
        ctx.save_for_backward(h, lmbda)
        return transform(h, torch.log1p(h.abs()), lmbda - 1)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        h, lmbda = ctx.saved_tensors
        _, p, log = _power_and_log(h, lmbda)
        (grad,) = grads
        grad_h = grad_lmbda = None
        if ctx.needs_input_grad[0]:
            by_h = torch.exp((p - 1) * log)
            grad_h = (grad * by_h).sum_to_size(h.shape)
        if ctx.needs_input_grad[1]:
            u = p * log
            by_lmbda = lmbda_derivative(u, log, torch.expm1(u))
            grad_lmbda = (grad * by_lmbda).sum_to_size(lmbda.shape)
        return grad_h, grad_lmbda


@dataclass(frozen=True)
class Reductions:
    """Reduce over `dims`, kept as size one, and the ranks of `group`, whose shares of a set may be
    unequal.
    """

    dims: tuple[int, ...]
    group: ProcessGroup | None = None

    def means(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.group is None:
            return [tensor.mean(self.dims, True) for tensor in tensors]
        sums = torch.stack([tensor.sum(self.dims, True) for tensor in tensors])
        packed = torch.cat([sums, torch.full_like(sums[:1], self._count(tensors[0]))])
        dist.all_reduce(packed, group=self.group)
        return list(packed[:-1] / packed[-1])

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.group is None:
            return x.amin(self.dims, True), x.amax(self.dims, True)
        if x.numel():
            packed = torch.stack([-x.amin(self.dims, True), x.amax(self.dims, True)])
        else:
            # A rank without values has no extremes
            shape = [1 if i in self.dims else size for i, size in enumerate(x.shape)]
            packed = x.new_full((2, *shape), -torch.inf)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=self.group)
        return -packed[0], packed[1]

    def size(self, x: Tensor) -> Tensor | int:
        if self.group is None:
            return self._count(x)
        count = torch.tensor(self._count(x), dtype=torch.int64, device=x.device)
        dist.all_reduce(count, group=self.group)
        return count

    def _count(self, x: Tensor) -> int:
        return math.prod([x.shape[axis] for axis in self.dims])


class StepGradient(NamedTuple):
    """Derivatives of the step with respect to a set's moments, which are the means m1 of s * l, m2
    of h * d, m3 of d, m45 of a * e + d^2, and v of h^2.
    """

    by_m1: Tensor
    by_m2: Tensor
    by_m3: Tensor
    by_m45: Tensor
    by_v: Tensor


def first_step(
    h: Tensor, over: Reductions, log: Tensor | None = None
) -> tuple[Tensor, StepGradient]:
    """Return the Newton step from lambda = 1 in closed form (paper's appendix D, for any variance),
    within its bounds, and its derivatives, zero where a bound holds it.

    With r = m2 / v and b = (m45 - m3^2) / v, L' = r - m1, L'' = b - 2 * r^2 and step = -L' / L''.
    `h` has mean zero and variance at most one over each set, and `log` is log(1 + |h|). Autograd
    may follow, at h = 0 too, if it is left out.
    """
    if log is None:
        a = torch.where(h < 0, -h, h)
        log = torch.log1p(a)
        signed = torch.where(h < 0, -log, log)
    else:
        a, signed = h.abs(), torch.copysign(log, h)
    grown = (1 + a) * log
    d = grown - a
    e = grown * log - 2 * d
    bounds = step_bounds(*over.extremes(h.detach()))
    m1, m2, m3, m45, v = over.means([signed, h * d, d, torch.addcmul(a * e, d, d), h * h])
    v = v.clamp_min(TINY)
    r = m2 / v
    b = (m45 - m3 * m3) / v
    slope = r - m1
    bend = b - 2 * r**2
    curvature = bend.clamp_min(MIN_CURVATURE)
    unbounded = -slope / curvature
    step = unbounded.clamp(*bounds)
    free = (unbounded == step).to(h.dtype)
    curved = (bend > MIN_CURVATURE).to(h.dtype)
    # d step / d L' = -1 / L''
    by_slope = -free / curvature
    # d step / d L'' = L' / L''^2
    by_curvature = free * curved * slope / curvature**2
    return step, StepGradient(
        by_m1=-by_slope,
        by_m2=(by_slope - 4 * by_curvature * r) / v,
        by_m3=-2 * by_curvature * m3 / v,
        by_m45=by_curvature / v,
        by_v=(-by_slope * r - by_curvature * b + 4 * by_curvature * r**2) / v,
    )


def step_bounds(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of lambda - 1 that keep d psi / d h = exp(s * (lambda - 1) * l) below
    exp(`LOG_STRETCH`) on [low, high]: lambda > 1 stretches the positive side, lambda < 1 the
    negative one.
    """
    down = torch.log1p((-low).clamp_min(TINY))
    up = torch.log1p(high.clamp_min(TINY))
    return -LOG_STRETCH / down, LOG_STRETCH / up


def step_derivative(h: Tensor, a: Tensor, log: Tensor, inverse: Tensor, by: StepGradient) -> Tensor:
    """Return N * d step / d h for every element of sets of N values, h's own dependence on the
    input aside: the chain rule over the moments. Each derivative below is of what its moment is the
    mean of; `log` is log(1 + a), and `inverse`, 1 / (1 + a), is d (s * l) / d h.
    """
    a_log = a * log
    # (1 + a) * l
    grown = log + a_log
    d = grown - a
    # d (h * d) / d h
    dm2 = d + a_log
    # d (a * e + d^2) / d a
    dm45 = grown * log - 2 * d + log * (a_log + 2 * d)
    # Of even functions of h, whose derivatives take its sign; d d / d a = l
    even = by.by_m45 * dm45 + by.by_m3 * log
    odd = by.by_m1 * inverse + by.by_m2 * dm2 + 2 * by.by_v * h
    return odd + torch.where(h < 0, -even, even)
