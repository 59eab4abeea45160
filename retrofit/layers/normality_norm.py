"""The computation that every normality-normalized layer shares (Eftekhari & Papyan 2025, algorithm
1).

A layer is its choice of normalized set. `normality_norm` standardizes each set, estimates its
lambda, transforms, adds the scaled noise and applies the affine; `apply_statistics` does the same
with statistics that are given. Its backward is the closed form of the whole chain, so that only the
input and a few numbers a set are kept for it.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers import kernels
from retrofit.layers.kernels import eager
from retrofit.layers.kernels.eager import (
    KernelOptions,
    Noise,
    affine,
    blocks,
    compute_dtype,
    normal,
)
from retrofit.layers.kernels.layout import layout_of
from retrofit.layers.power_transform import Reductions, StepGradient, first_step, yeo_johnson
from retrofit.layers.transforms import differentiable_once, transformed

NoiseKind = Literal["scaled", "unscaled", "gaussian-dropout"]


class Statistics(NamedTuple):
    """What a normalized set was found to be: keepdim tensors without gradient, and the set's size
    over all ranks.
    """

    mean: Tensor
    var: Tensor
    lmbda: Tensor
    size: Tensor | int


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last where that is how `x` lies, and not otherwise contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def apply_statistics(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    lmbda: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Standardize by the given mean and biased variance, transform, and apply the affine, in
    float32 at least. The tensors have as many dimensions as `x` and broadcast to it; the result has
    its shape and dtype.
    """
    dtype = compute_dtype(x)
    tensors = (mean, var, lmbda, weight, bias)
    differentiated = torch.is_grad_enabled() and any(
        v is not None and v.requires_grad for v in (x, *tensors)
    )
    rstd = torch.rsqrt(var.to(dtype) + eps)
    if differentiated or not kernels.fits(x):
        h = (x.to(dtype) - mean.to(dtype)) * rstd
        return affine(yeo_johnson(h, lmbda.to(dtype)), weight, bias).to(x.dtype)
    ones = torch.ones_like(rstd)
    gamma, beta = ones if weight is None else weight, 0 * ones if bias is None else bias
    constants = torch.stack([c.to(dtype) for c in (mean, rstd, lmbda.to(dtype) - 1, gamma, beta)])
    layout = layout_of(
        x.shape, x.stride(), tuple(d for d, n in enumerate(mean.shape) if n == 1), mean.shape
    )
    out = layout.empty_like(x)
    constants = constants.permute(0, *(d + 1 for d in layout.order)).reshape(5, *layout.affine)
    kernels.choose(out).apply(layout.view(out), layout.view(x), layout.dims, constants)
    return out


def normality_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    dim: tuple[int, ...],
    eps: float,
    strength: Tensor | float = 1.0,
    noise: float = 0.0,
    noise_kind: NoiseKind = "scaled",
    alpha: float = 1.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Statistics | None]:
    """Normalize, gaussianize, perturb and scale `x`, of any shape, with the statistics of its sets
    over `dim`.

    gamma and beta (`weight`, `bias`) broadcast to `x`; `eps` is added to the biased variance; the
    ranks of `group` share the sets. With t = `strength`, lambda = 1 + t * alpha * (estimate - 1),
    where alpha in [0, 1] is eq. 6's, and the noise has the factor t * xi (`noise`) and a kind that
    `perturb` describes. Returns the result in `x`'s shape and dtype, and the statistics (lambda as
    estimated: strength does not enter it), None of an empty input.
    """
    if (
        x.numel() == 0 and group is None
    ):  # still connected to the parameters, whose gradients are then zero
        return affine(x * 1.0, weight, bias).to(x.dtype), None
    t = torch.as_tensor(strength, dtype=compute_dtype(x), device=x.device)
    if transformed():
        if group is not None:
            raise RuntimeError(
                "synchronized statistics take no transform of torch.func; use the plain layer's class"
            )
        values = x.to(t.dtype)
        var, mean = torch.var_mean(values, dim, correction=0, keepdim=True)
        h = (values - mean) * torch.rsqrt(var + eps)
        y, lmbda = gaussianize(h, dim, t, noise, noise_kind, alpha)
        size = Reductions(dim).size(x)
        return affine(y, weight, bias).to(x.dtype), Statistics(
            mean.detach(), var.detach(), lmbda.detach(), size
        )
    factor = noise * t if noise else None
    if factor is not None and noise_kind != "scaled":
        y, statistics = normality_norm(
            x, None, None, dim=dim, eps=eps, strength=t, alpha=alpha, group=group
        )
        return affine(perturb(y.to(t.dtype), factor, noise_kind, dim), weight, bias).to(
            x.dtype
        ), statistics
    effective_alpha = t if alpha == 1 else t * alpha
    weight, bias = (
        None if p is None else p.view((1,) * (x.ndim - p.ndim) + p.shape) for p in (weight, bias)
    )
    out, (mean, var, _, step) = _NormalityNorm.apply(
        x, weight, bias, effective_alpha, factor, dim, eps, group
    )
    return out, Statistics(mean, var, 1 + step, Reductions(dim, group).size(x))


class _NormalityNorm(torch.autograd.Function):
    """Algorithm 1 with one Newton step, and its closed-form backward: through `kernels`, for
    tensors that a compiler traces through the same formulas as a whole. `t` multiplies lambda's
    step, `factor` the noise (None: no noise).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Any,
        bias: Any,
        t: Tensor,
        factor: Any,
        dim: Any,
        eps: float,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        shapes = [None if p is None else p.shape for p in (weight, bias)]
        ctx.layout = layout_of(x.shape, x.stride(), dim, *shapes) if kernels.fits(x) else None
        ctx.dim, ctx.eps, ctx.group = dim, eps, group
        seed = None
        if (
            factor is not None
        ):  # where kernels run, a seed of the CPU gives the same noise on every device
            device = x.device if ctx.layout is None else "cpu"
            seed = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device).to(
                x.device
            )
        if ctx.layout is None:
            out, stats = eager.normalized(
                x, weight, bias, t, eps, _noise(x, factor, seed), Reductions(dim, group)
            )
            statistics = stats[:4]
        else:
            gamma, beta = (
                None if p is None else ctx.layout.view(p, ctx.layout.affine) for p in (weight, bias)
            )
            view, out = ctx.layout.view, ctx.layout.empty_like(x)
            options = KernelOptions(ctx.layout.dims, ctx.layout.affine, t, eps, factor, seed, group)
            stats = kernels.choose(out, group).forward(view(out), view(x), gamma, beta, options)
            statistics = ctx.layout.undo(stats[:4], ctx.layout.kept).clone()
        ctx.save_for_backward(x, weight, bias, t, factor, seed, stats)
        ctx.mark_non_differentiable(statistics)
        return out, statistics

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, t, factor, seed, stats = ctx.saved_tensors
        if ctx.layout is None:
            over = Reductions(ctx.dim, ctx.group)
            grad_x, y = eager.pulled_back(
                grads[0], x, weight, t, stats, _noise(x, factor, seed), over
            )
            grad = grads[0].to(y.dtype)
            grad_weight, grad_bias = grad * y, grad
        else:
            view, grad_x = ctx.layout.view, ctx.layout.empty_like(x)
            gamma = None if weight is None else view(weight, ctx.layout.affine)
            options = KernelOptions(
                ctx.layout.dims, ctx.layout.affine, t, ctx.eps, factor, seed, ctx.group
            )
            tensors = view(grad_x), view(x), view(grads[0]), gamma
            grads_affine = kernels.choose(grad_x, ctx.group).backward(*tensors, stats, options)
            grad_weight, grad_bias = ctx.layout.undo(grads_affine, ctx.layout.full_affine)
        return (
            grad_x,
            None if weight is None else grad_weight.sum_to_size(weight.shape).to(weight.dtype),
            None if bias is None else grad_bias.sum_to_size(bias.shape).to(bias.dtype),
            *(None,) * 5,
        )


def _noise(x: Tensor, factor: Tensor | None, seed: Tensor | None) -> Noise | None:
    return (
        None
        if factor is None or seed is None
        else lambda spread: normal(x.shape, seed) * (factor * spread)
    )


def gaussianize(
    h: Tensor,
    dim: tuple[int, ...],
    strength: Any,
    noise: float,
    noise_kind: NoiseKind,
    alpha: float,
) -> tuple[Tensor, Tensor]:
    """Transform and perturb standardized values, float32 or more, as `normality_norm` does; return
    them and lambda.
    """
    effective_alpha = (strength * alpha).to(h.dtype)
    if transformed():
        lmbda = estimate(h, dim)
        y = yeo_johnson(h, 1 + effective_alpha * (lmbda - 1))
    else:
        y, lmbda = _OneStep.apply(h, effective_alpha, dim)
    return perturb(y, noise * strength, noise_kind, dim) if noise else y, lmbda


def estimate(h: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Return the lambda of each set of standardized values, `dim` kept as size one, by
    differentiable operations.
    """
    return 1 + first_step(h, Reductions(dim))[0]


class _OneStep(torch.autograd.Function):
    """One Newton step and the transform, with its closed-form backward: `h` and a few numbers a set
    are kept.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, t: Tensor, dim: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        y, kept = torch.empty_like(h), []
        # on a CPU a third faster than the whole tensor at once
        for block in blocks(h, dim):
            part, step, gradient = eager.gaussianized(block(h), t, Reductions(dim))
            block(y).copy_(part)
            kept.append(torch.stack([step, *gradient]))
        stats = torch.cat(kept, block.axis + 1)
        lmbda = 1 + stats[0]
        ctx.dim = dim
        ctx.save_for_backward(h, t, stats)
        ctx.mark_non_differentiable(lmbda)
        return y, lmbda

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, t, stats = ctx.saved_tensors
        grad_h = torch.empty_like(h)
        for block in blocks(h, ctx.dim):
            step, *gradient = (block.of(s) for s in stats)
            _, direct, to_lmbda, shift = eager.pulls(
                block(grads[0]), block(h), t, step, StepGradient(*gradient)
            )
            block(grad_h).copy_(direct + t * to_lmbda.mean(ctx.dim, True) * shift)
        return grad_h, None, None


def perturb(y: Tensor, factor: Tensor | float, kind: NoiseKind, dim: tuple[int, ...]) -> Tensor:
    """Add noise to transformed values, with z ~ N(0, 1) for each (the paper's sections 4.2 and
    5.6).

    "scaled" gives y + factor * s * z, with s the mean absolute deviation of the set, which takes no
    gradient; "unscaled" the same with s = sqrt(2 / pi), a standard normal set's; "gaussian-dropout"
    y * (1 + factor * z), through which y's gradient flows (there the paper writes xi as sqrt((1 -
    p) / p), p the rate of retention).
    """
    noise = factor * torch.randn_like(y)
    if kind == "gaussian-dropout":
        return y * (1 + noise)
    if kind == "unscaled":
        return y + noise * math.sqrt(2 / math.pi)
    return y + noise * (y - y.mean(dim, True)).abs().mean(dim, True).detach()
