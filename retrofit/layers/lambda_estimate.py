"""The maximum-likelihood estimate of lambda by Newton's method from lambda = 1 (Eftekhari & Papyan 2025, section 4.1).

The paper's single step divides by L'', which trained channels can make tiny or negative, and takes the set's variance
to be one, which it is not where eps is comparable to it. Here L' and L'' hold for any variance, L'' is floored, and the
step is bounded so that no value of the set is stretched by more than exp(`LOG_STRETCH`). On well-behaved sets (a
Gaussian has L'' = 0.58) neither bound acts, and the estimate is the paper's.

Throughout, with s = sign(h), a = |h| and l = log(1 + a), at lambda = 1:

    d = (1 + a) * l - a           d psi / d lambda
    e = (1 + a) * l^2 - 2 * d     d^2 psi / d lambda^2, but for its sign s
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MIN_CURVATURE = 0.1  # floor of L''
LOG_STRETCH = 4.0  # log of the most that the step may stretch a value of the set
TINY = 1e-30  # stands for zero where it is divided by

Reduce = Callable[[list[Tensor]], list[Tensor]]  # means of each tensor over the normalized set, kept broadcastable


class Moments(NamedTuple):
    """Means over a set: s * l, h * d, d, a * e + d^2 and h^2, one value a normalized set."""

    m1: Tensor
    m2: Tensor
    m3: Tensor
    m45: Tensor
    v: Tensor


class StepGradient(NamedTuple):
    """Derivatives of the step with respect to the `Moments`, one value a normalized set."""

    by_m1: Tensor
    by_m2: Tensor
    by_m3: Tensor
    by_m45: Tensor
    by_v: Tensor


@dataclass(frozen=True)
class NewtonStep:
    """One Newton step from lambda = 1, with what its derivative needs; every field has one value a normalized set.

    With r = m2 / v and b = (m45 - m3^2) / v, L' = r - m1, L'' = b - 2 * r^2 and step = -L' / L''.
    """

    step: Tensor  # lambda - 1, within its bounds
    free: Tensor  # 1 where no bound holds the step
    curved: Tensor  # 1 where L'' is above its floor
    slope: Tensor  # L'
    curvature: Tensor  # L'', floored
    moments: Moments  # what all of that is made of, v kept above zero

    def gradient(self) -> StepGradient:
        """Return the step's derivatives; zero where a bound holds the step."""
        _, m2, m3, m45, v = self.moments
        r = m2 / v
        b = (m45 - m3 * m3) / v
        by_slope = -self.free / self.curvature  # d step / d L' = -1 / L''
        by_curvature = self.free * self.curved * self.slope / self.curvature**2  # d step / d L'' = L' / L''^2
        return StepGradient(
            by_m1=-by_slope,
            by_m2=(by_slope - 4 * by_curvature * r) / v,
            by_m3=-2 * by_curvature * m3 / v,
            by_m45=by_curvature / v,
            by_v=(-by_slope * r - by_curvature * b + 4 * by_curvature * r**2) / v,
        )


def first_step(h: Tensor, reduce: Reduce, bound: tuple[Tensor, Tensor], log: Tensor | None = None) -> NewtonStep:
    """Take the Newton step from lambda = 1 in closed form (paper's appendix D, for any variance).

    `h` has mean zero and variance at most one over each set, `bound` is `step_bounds` of the same sets, and `log` is
    log(1 + |h|). Autograd may follow, at h = 0 too, if `log` is left out.
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
    m1, m2, m3, m45, v = reduce([signed, h * d, d, torch.addcmul(a * e, d, d), h * h])
    v = v.clamp_min(TINY)
    slope = m2 / v - m1
    raw_curvature = (m45 - m3 * m3) / v - 2 * (m2 / v) ** 2
    curvature = raw_curvature.clamp_min(MIN_CURVATURE)
    raw_step = -slope / curvature
    step = raw_step.clamp(*bound)
    return NewtonStep(
        step=step,
        free=(raw_step == step).to(h.dtype),
        curved=(raw_curvature > MIN_CURVATURE).to(h.dtype),
        slope=slope,
        curvature=curvature,
        moments=Moments(m1, m2, m3, m45, v),
    )


def step_bounds(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of lambda - 1 that keep d psi / d h = exp(s * (lambda - 1) * l) below exp(`LOG_STRETCH`) on [low, high]:
    lambda > 1 stretches the positive side, lambda < 1 the negative one.
    """
    return -LOG_STRETCH / torch.log1p((-low).clamp_min(TINY)), LOG_STRETCH / torch.log1p(high.clamp_min(TINY))


def step_derivative(h: Tensor, a: Tensor, log: Tensor, inverse: Tensor, by: StepGradient) -> Tensor:
    """Return N * d step / d h for every element of sets of N values, h's own dependence on the input aside: the chain
    rule over `Moments`. Each derivative below is of what its moment is the mean of; `log` is log(1 + a), and `inverse`,
    1 / (1 + a), is d (s * l) / d h.
    """
    a_log = a * log
    grown = log + a_log  # (1 + a) * l
    d = grown - a
    dm2 = d + a_log  # d (h * d) / d h
    dm3 = log  # d d / d a
    dm45 = grown * log - 2 * d + log * (a_log + 2 * d)  # d (a * e + d^2) / d a
    even = by.by_m45 * dm45 + by.by_m3 * dm3  # of even functions of h, whose derivatives take its sign
    return by.by_m1 * inverse + by.by_m2 * dm2 + 2 * by.by_v * h + torch.where(h < 0, -even, even)
