"""The computation that every normality-normalized layer shares (Eftekhari & Papyan 2025, algorithm 1).

A layer is its choice of normalized set. `normality_norm` standardises each set, estimates its lambda, transforms,
adds the scaled noise and applies the affine; `apply_statistics` does the same with statistics that are given. Its
backward is the closed form of the whole chain, so that only the input and a few numbers a set are kept for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers import distributed
from retrofit.layers.estimate import NewtonStep, first_step, newton_lmbda, step_bounds, step_derivative
from retrofit.layers.transform import lmbda_derivative, power_and_log, transformed, yeo_johnson


class Statistics(NamedTuple):
    """What a normalized set was found to be: keepdim tensors without gradient, and the set's size over all ranks."""

    mean: Tensor
    var: Tensor
    lmbda: Tensor
    size: Tensor | int


def compute_dtype(x: Tensor) -> torch.dtype:
    """Float64 stays; everything else is computed in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def apply_statistics(
    x: Tensor, mean: Tensor, var: Tensor, lmbda: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Standardise with the given statistics, transform, and apply the affine.

    Args:
        x: Input of any shape.
        mean: Mean, broadcastable to `x`, as are all that follow.
        var: Biased variance.
        lmbda: Transform parameter; 1 is the identity.
        weight: gamma, or None.
        bias: beta, or None.
        eps: Added to the variance.

    Returns:
        The result in `x`'s shape and dtype; computed in float32 (float64 for float64 input).
    """
    dtype = compute_dtype(x)
    h = (x.to(dtype) - mean.to(dtype)) * torch.rsqrt(var.to(dtype) + eps)
    return _affine(yeo_johnson(h, lmbda.to(dtype)), weight, bias).to(x.dtype)


def normality_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    dim: tuple[int, ...],
    eps: float,
    strength: Tensor | float = 1.0,
    noise: float = 0.0,
    steps: int = 1,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Statistics]:
    """Normalize, gaussianize, perturb and scale `x` with statistics of its own.

    Args:
        x: Input of any shape; at least one element.
        weight: gamma, broadcastable to `x`, or None.
        bias: beta, broadcastable to `x`, or None.
        dim: The dimensions that the normalized set spans.
        eps: Added to the biased variance.
        strength: t in [0, 1]: lambda = 1 + t * (estimate - 1) (eq. 6's alpha), and the noise factor is t * noise.
        noise: xi, the factor of the additive Gaussian noise; 0 for none.
        steps: Newton iterations of the estimate; 1 is the paper's.
        group: Process group whose ranks share the sets, or None.

    Returns:
        The result in `x`'s shape and dtype, and the statistics (lambda as estimated: strength does not enter it).
    """
    t = torch.as_tensor(strength, dtype=compute_dtype(x), device=x.device)
    if steps > 1:
        return _iterated(x, weight, bias, dim, eps, t, noise, steps, group)
    out, mean, var, lmbda, count = _NormalityNorm.apply(x, weight, bias, t, dim, eps, noise, group)
    return out, Statistics(mean, var, lmbda, count)


class _NormalityNorm(torch.autograd.Function):
    """Algorithm 1 with one Newton step, and its closed-form backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        t: Tensor,
        dim: tuple[int, ...],
        eps: float,
        noise: float,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | int]:
        values = x.to(compute_dtype(x))
        mean, var = _mean_and_variance(values, dim, group)
        rstd = torch.rsqrt(var + eps)
        h = (values - mean) * rstd
        newton = _estimate(h, dim, group)
        s, p, log = power_and_log(h, 1 + t * newton.step)
        y = transformed(s, p, log)
        seed: Tensor | int | None = None
        if noise:
            z, seed = _draw(y)
            y = torch.addcmul(y, z, noise * t * _spread(y, dim, group))
        out = _affine(y, weight, bias).to(x.dtype)

        ctx.save_for_backward(
            x, weight, t, mean, rstd, *vars(newton).values(), seed if isinstance(seed, Tensor) else None
        )
        ctx.seed = seed if isinstance(seed, int) else None
        ctx.dim, ctx.noise, ctx.group = dim, noise, group
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        lmbda = 1 + newton.step
        count = distributed.set_size(values, dim, group)
        ctx.mark_non_differentiable(mean, var, lmbda)
        if isinstance(count, Tensor):
            ctx.mark_non_differentiable(count)
        return out, mean, var, lmbda, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, t, mean, rstd, *fields, drawn = ctx.saved_tensors
        newton = NewtonStep(*fields)
        values = x.to(compute_dtype(x))
        grad = grads[0].to(values.dtype)
        h = (values - mean) * rstd
        s, p, log = power_and_log(h, 1 + t * newton.step)

        grad_weight = grad_bias = None
        g = grad
        if weight is not None:
            if ctx.needs_input_grad[1]:
                y = transformed(s, p, log)
                if ctx.noise:
                    z = drawn if drawn is not None else _redraw(y, ctx.seed)
                    y = torch.addcmul(y, z, ctx.noise * t * _spread(y, ctx.dim, ctx.group))
                grad_weight = (grad * y).sum_to_size(weight.shape).to(weight.dtype)
            g = grad * weight.to(values.dtype)
        if ctx.bias_shape is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum_to_size(ctx.bias_shape).to(ctx.bias_dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            direct = g * torch.exp((p - 1) * log)
            shift = step_derivative(h, h.abs(), log, newton)  # times the count
            # d psi / d h is linear in the mean gradient of lambda, so one reduction serves all three projections.
            to_lmbda, d0, dh, s0, sh = distributed.means(
                [g * lmbda_derivative(p, log), direct, direct * h, shift, shift * h], ctx.dim, ctx.group
            )
            to_lmbda = t * to_lmbda
            pull = torch.addcmul(direct, to_lmbda, shift)
            grad_x = rstd * (pull - (d0 + to_lmbda * s0) - h * (dh + to_lmbda * sh))
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _iterated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dim: tuple[int, ...],
    eps: float,
    t: Tensor,
    noise: float,
    steps: int,
    group: ProcessGroup | None,
) -> tuple[Tensor, Statistics]:
    """Algorithm 1 with several Newton steps, differentiated by autograd."""
    if group is not None:
        raise ValueError("synchronized statistics take one Newton step; set steps=1")
    values = x.to(compute_dtype(x))
    var, mean = torch.var_mean(values, dim, correction=0, keepdim=True)
    h = (values - mean) * torch.rsqrt(var + eps)
    lmbda = newton_lmbda(h, dim, steps)
    y = yeo_johnson(h, 1 + t * (lmbda - 1))
    if noise:
        y = y + torch.randn_like(y) * (noise * t * _spread(y.detach(), dim, None))
    count = x.numel() // max(mean.numel(), 1)
    return _affine(y, weight, bias).to(x.dtype), Statistics(mean.detach(), var.detach(), lmbda.detach(), count)


def _mean_and_variance(x: Tensor, dim: tuple[int, ...], group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, the mean corrected once so that a large constant set has neither offset nor spread."""
    (mean,) = distributed.means([x], dim, group)
    centred = x - mean
    offset, power = distributed.means([centred, centred * centred], dim, group)
    return mean + offset.nan_to_num(0.0), (power - offset * offset).clamp_min(0)


def _estimate(h: Tensor, dim: tuple[int, ...], group: ProcessGroup | None) -> NewtonStep:
    low, high = distributed.extremes(h, dim, group)
    return first_step(h, lambda tensors: distributed.means(tensors, dim, group), step_bounds(low, high))


def _spread(y: Tensor, dim: tuple[int, ...], group: ProcessGroup | None) -> Tensor:
    """The scale s = mean|y - mean(y)| of the noise (section 4.2)."""
    (centre,) = distributed.means([y], dim, group)
    (spread,) = distributed.means([(y - centre).abs()], dim, group)
    return spread


def _draw(y: Tensor) -> tuple[Tensor, Tensor | int]:
    """Standard normal values like `y`, and what brings them back: a seed, or under a compiler the values themselves."""
    if torch.compiler.is_compiling():
        z = torch.randn_like(y)
        return z, z
    seed = int(torch.randint(2**62, ()).item())
    return _redraw(y, seed), seed


def _redraw(y: Tensor, seed: int) -> Tensor:
    return torch.empty_like(y).normal_(generator=torch.Generator(y.device).manual_seed(seed))


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is None:
        return y if bias is None else y + bias.to(y.dtype)
    scaled = y * weight.to(y.dtype)
    return scaled if bias is None else scaled + bias.to(y.dtype)
