"""Group normalization as one scale and one shift per sample and channel, with its closed-form derivative."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrofit.layers.transforms import differentiable_once, transformed


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `x` (N, C, *) per sample and channel, (N, C) each, without cancellation."""
    dims = tuple(range(2, x.ndim))
    if not (transformed() or x.is_cpu or x.numel() == 0):  # on CPU var_mean takes several times as long
        var, mean = torch.var_mean(x, dims, correction=0)
        return mean, var
    mean = x.mean(dims, keepdim=True)
    if transformed():  # whose further derivatives the norm does not have everywhere
        return mean.flatten(1), (x - mean).square().mean(dims)
    var = torch.linalg.vector_norm(x - mean, dim=dims).square() / max(1, math.prod(x.shape[2:]))
    return mean.flatten(1), var


def group_affine(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    running_mean: Tensor,
    rstd: Tensor,
    gain: Tensor,
    gamma: Tensor,
    beta: Tensor,
    t: Tensor,
    num_groups: int,
    eps: Tensor | float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and, (N, C) each, the group's mean over the channel's gain and k of `GroupAffine`."""
    n, channels = mean.shape
    groups = n, num_groups, channels // num_groups
    mean = ((mean - running_mean) * (rstd * gain)).reshape(groups)
    m = mean.mean(2, keepdim=True)
    v = ((var * (rstd * gain).square()).reshape(groups) + (mean - m).square()).mean(2, keepdim=True)
    # At t = 0 the moments do not count, not even where they overflow.
    m, v = torch.where(t > 0, m, 0.0), torch.where(t > 0, v, 1.0)
    k = torch.rsqrt(torch.lerp(torch.ones_like(v), v + eps, t))
    m, k = m.expand(groups).reshape(n, channels) / gain, k.expand(groups).reshape(n, channels)
    scale = k * gamma
    return _affine(x, scale * rstd, beta - scale * (running_mean * rstd + t * m)), m, k


class GroupAffine(torch.autograd.Function):
    """y = x * scale + shift per sample and channel, with the closed-form derivative through the group moments.

    With gain a, k = 1 / sqrt((1 - t) + t * (v + eps)), x^ = (x' - t * m) * k, g^ = grad * gamma / a, means over sample
    and group:

        d x' = k * (g^ - t * mean(g^) - t * k * (x' - m) * mean(g^ * x^))
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        running_mean: Tensor,
        rstd: Tensor,
        gain: Tensor,
        gamma: Tensor,
        beta: Tensor,
        t: Tensor,
        num_groups: int,
        eps: Tensor | float,
    ) -> Tensor:
        out, m, k = group_affine(x, mean, var, running_mean, rstd, gain, gamma, beta, t, num_groups, eps)
        ctx.save_for_backward(x, running_mean, rstd, gain, gamma, t, m, k)
        ctx.groups = len(mean), num_groups, mean.shape[1] // num_groups
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, running_mean, rstd, gain, gamma, t, m, k = ctx.saved_tensors  # m of the group, over the channel's gain
        (grad,) = grads
        dims = tuple(range(2, x.ndim))
        wide = grad.to(k.dtype)
        sum_g = wide.sum(dims)
        centred = (wide * x).sum(dims) - running_mean * sum_g
        sum_gx = (centred * rstd - t * m * sum_g) * k  # of grad * x^
        dx = None
        if ctx.needs_input_grad[0]:
            size = ctx.groups[2] * max(1, math.prod(x.shape[2:]))

            def group_mean(sums: Tensor) -> Tensor:
                means = (sums * gamma).view(ctx.groups).sum(2, keepdim=True) / size
                return means.expand(ctx.groups).reshape(k.shape)

            slope = -t * (k * gain).square() * group_mean(sum_gx)  # of the gradient in (x - running_mean) * rstd
            shift = -t * k * gain * group_mean(sum_g / gain) - slope * (running_mean * rstd + m)
            dx = _affine(x, slope * rstd.square(), shift * rstd, dtype=k.dtype)
            dx = dx.addcmul_(wide, _like(x, k * gamma * rstd)).to(x.dtype)
        return dx, None, None, None, None, None, sum_gx.sum(0), sum_g.sum(0), None, None, None


def _like(x: Tensor, table: Tensor) -> Tensor:
    """Return (N, C) values in a shape that broadcasts over `x` (N, C, *)."""
    return table.view(*table.shape, *(1,) * (x.ndim - 2))


def _affine(x: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return x * scale + shift for (N, C) tables, in `dtype` or the type of `x`, computed in that of the tables."""
    return torch.addcmul(_like(x, shift), x, _like(x, scale)).to(dtype or x.dtype)
