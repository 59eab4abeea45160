"""The computation that every normality-normalized layer shares (Eftekhari & Papyan 2025, algorithm
1).

A layer is its choice of normalized set. `normalize` standardizes each set, estimates its
lambda, transforms, adds the scaled noise and applies the affine; `apply_statistics` does the same
with statistics that are given. Its backward is the closed form of the whole chain, so that only the
input and a few numbers a set are kept for it.
"""

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers import batch_norm_operator, kernels
from retrofit.layers.function_transforms import differentiable_once, transformed
from retrofit.layers.gaussianization import gaussianize
from retrofit.layers.inference_forms import channel_view
from retrofit.layers.kernels import eager
from retrofit.layers.kernels.eager import DrawNoise, affine, compute_dtype
from retrofit.layers.kernels.kernel_options import KernelOptions, Running, Strength
from retrofit.layers.kernels.layout import (
    Layout,
    channel_layout,
    dense,
    is_dense,
    laid_out_as,
    layout_of,
)
from retrofit.layers.kernels.normal_numbers import normal
from retrofit.layers.kernels.triton_plan import plan_of
from retrofit.layers.noise import NoiseKind, perturb
from retrofit.layers.normalized_sets import Sets, batch_sets
from retrofit.layers.power_transform import Reductions, yeo_johnson


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
    """Standardize (N, C, *) by the given means and biased variances, transform, and apply the
    affine, in float32 at least. All are (C,) each; the result has the shape and dtype of `x`.
    """
    dtype = compute_dtype(x)
    mean = mean.to(dtype)
    lmbda = lmbda.to(dtype)
    rstd = torch.rsqrt(var.to(dtype) + eps)
    has_gradient = any(t is not None and t.requires_grad for t in (x, weight, bias))
    if (has_gradient and torch.is_grad_enabled()) or not kernels.fits(x):
        h = (x.to(dtype) - channel_view(mean, x)) * channel_view(rstd, x)
        gamma, beta = (None if p is None else channel_view(p, x) for p in (weight, bias))
        return affine(yeo_johnson(h, channel_view(lmbda, x)), gamma, beta).to(x.dtype)
    gamma = torch.ones_like(rstd) if weight is None else weight.to(dtype)
    beta = torch.zeros_like(rstd) if bias is None else bias.to(dtype)
    constants = torch.stack([mean, rstd, lmbda - 1, gamma, beta])
    x = dense(x)
    layout = channel_layout(x)
    out = torch.empty_like(x)
    kernels.choose(out).apply(out, x, layout, constants.view(5, *layout.affine))
    return out


class Normalization(NamedTuple):
    """What a layer asks of `normalize`, beside tensors."""

    # from a tensor to a view of it in which a set spans whole dimensions, and to these
    sets: Sets
    # whether gamma and beta, (C,), belong to dimension 1
    per_channel: bool
    # added to the biased variance
    eps: float
    # the factor of the noise at strength 1; 0 for no noise
    xi: float = 0.0
    # see `perturb`
    noise_kind: NoiseKind = "scaled"
    # of eq. 6
    alpha: float = 1.0
    # ranks that share the sets
    group: ProcessGroup | None = None
    running: Running | None = None

    def beside(self, parameter: Tensor | None, x: Tensor) -> Tensor | None:
        """View gamma or beta such that it broadcasts to `x`."""
        if parameter is None:
            return None
        if self.per_channel:
            return parameter.view(1, -1, *(1,) * (x.ndim - 2))
        return parameter.view(*(1,) * (x.ndim - parameter.ndim), *parameter.shape)

    def scaled(self, y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return y * gamma + beta, in the type of `x`, whose shape it has."""
        return affine(y, self.beside(weight, x), self.beside(bias, x)).to(x.dtype)

    def views(self, x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
        """View parameters such that they broadcast to the view of `x` by its sets."""
        own = [self.beside(parameter, x) for parameter in parameters]
        return [None if parameter is None else self.sets(parameter)[0] for parameter in own]

    def takes_operator(self, x: Tensor) -> bool:
        """Whether a compiler shall see one operator in the place of the formulas."""
        return self.sets is batch_sets and self.group is None and batch_norm_operator.takes(x)

    def seed(self, x: Tensor) -> Tensor | None:
        """Draw the seed of the noise, on the device of `x`."""
        if not self.xi:
            return None
        return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=x.device)

    def in_memory(self, x: Tensor, parameter: Tensor | None) -> tuple[Tensor, Layout]:
        """Return `x`, or a copy that is dense and has gamma and beta in the order of what they
        multiply, and its layout.
        """
        affine = None if parameter is None else parameter.shape
        sets: Any = self.sets
        # Partial functions are no keys: they are equal to themselves alone
        key = (sets.func, *sets.args) if type(sets) is partial else (sets,)
        key = affine, self.per_channel, *key
        layout = _layout_in_memory(x.shape, x.stride(), *key)
        if layout is None:
            x = x.contiguous()
            layout = _layout_in_memory(x.shape, x.stride(), *key)
            assert layout is not None
        return x, layout

    def statistics(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor
    ) -> Statistics:
        """Return what `normalize` found of the sets of `x`."""
        if self.group is None and kernels.fits(x):
            x, layout = self.in_memory(x.detach(), bias if weight is None else weight)
            sets = math.prod(layout.kept)
            stats = layout.undo(stats.reshape(-1)[: 4 * sets])
        mean, var, _, step = stats[:4]
        values, dim = self.sets(x.detach())
        return Statistics(mean, var, 1 + step, Reductions(dim, self.group).size(values))


@lru_cache(maxsize=1024)
def _layout_in_memory(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    affine: torch.Size | None,
    per_channel: bool,
    sets: Any,
    *arguments: Any,
) -> Layout | None:
    """Return the layout of tensors for kernels that take them as they lie in memory; None where
    they are not dense, or gamma and beta lie in another order than what they multiply.
    """
    if not is_dense(size, stride):
        return None
    x = torch.empty_strided(size, stride, device="meta")
    parameter = None if affine is None else torch.empty(affine, device="meta")
    spec = Normalization(sets=partial(sets, *arguments), per_channel=per_channel, eps=0.0)
    values, dim = spec.sets(x)
    (view,) = spec.views(x, parameter)
    layout = layout_of(values.shape, values.stride(), dim, None if view is None else view.shape)
    changing = [] if view is None else [d for d in layout.order if view.shape[d] != 1]
    return layout if changing == sorted(changing) else None


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, strength: Strength, spec: Normalization
) -> tuple[Tensor, Tensor | None]:
    """Normalize, gaussianize, perturb and scale `x` with the statistics of its sets.

    With t = `strength`, lambda = 1 + t * alpha * (estimate - 1), where alpha in [0, 1] is eq. 6's,
    and the noise has the factor t * xi and a kind that `perturb` describes.

    Returns:
        The result, in the shape, dtype and memory format of `x`, and never a view: networks write
        over it. And the numbers of each set for `Normalization.statistics`; None where there is
        none, or where kernels have moved the running statistics.

    Raises:
        RuntimeError: If synchronized statistics meet a transform of torch.func.
    """
    result: tuple[Tensor, Tensor | None]
    # Of the kinds of noise, kernels and formulas have the scaled one alone
    if spec.xi and spec.noise_kind != "scaled":
        return _with_other_noise(x, weight, bias, strength, spec)
    # Kernels do not wait for other ranks in the middle
    if spec.group is None and kernels.fits(x):
        result = _ByKernels.apply(x, weight, bias, strength, spec)
        return result
    if spec.group is None and x.numel() == 0:
        # Connected to the parameters, whose gradients are then zero
        return spec.scaled(x * 1.0, x, weight, bias), None
    if spec.takes_operator(x):
        seed = spec.seed(x)
        return batch_norm_operator.batch_normality(
            x, weight, bias, seed, strength, eps=spec.eps, alpha=spec.alpha, xi=spec.xi
        )
    if transformed():
        return _followed(x, weight, bias, strength, spec)
    result = _ByFormulas.apply(x, weight, bias, strength, spec)
    return result


def _with_other_noise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, strength: Strength, spec: Normalization
) -> tuple[Tensor, Tensor | None]:
    """Apply algorithm 1 with noise that kernels do not have."""
    y, stats = normalize(x, None, None, strength, spec._replace(xi=0.0))
    dtype = compute_dtype(x)
    # These kinds take no mean over a set, so they get no dimensions of one.
    y = perturb(y.to(dtype), spec.xi * strength.value(dtype), spec.noise_kind, ())
    return spec.scaled(y, x, weight, bias), stats


def _kernels_for(x: Tensor, layout: Layout) -> Any:
    """Return the kernels that are chosen for `x`, if they know sets that lie as these do."""
    module: Any = kernels.choose(x)
    if module.READS_STRENGTH:
        processors = module.launcher.processors(x.device)
        if plan_of(layout.shape, layout.dims, layout.affine, processors) is None:
            return eager
    return module


class _ByKernels(torch.autograd.Function):
    """Algorithm 1 with one Newton step, and its closed-form backward, by kernels that take tensors
    as they lie in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, strength: Strength, spec: Normalization
    ) -> tuple[Tensor, Tensor | None]:
        x, layout = spec.in_memory(x, bias if weight is None else weight)
        module = _kernels_for(x, layout)
        out = torch.empty_like(x)
        seed = spec.seed(x) if spec.xi else None
        if not module.READS_STRENGTH:
            strength = Strength(strength.value(compute_dtype(x)))
        ctx.options = KernelOptions(
            layout=layout,
            strength=strength,
            eps=spec.eps,
            alpha=spec.alpha,
            xi=spec.xi,
            seed=seed,
            running=spec.running,
        )
        ctx.module = module
        table = module.forward(out, x, weight, bias, ctx.options)
        # Recomputed with the rest under activation checkpointing
        ctx.save_for_backward(x, weight, bias, table, seed)
        if module.READS_STRENGTH and spec.running is not None:
            return out, None
        ctx.mark_non_differentiable(table)
        return out, table

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, table, seed = ctx.saved_tensors
        grad = laid_out_as(x, grad)
        grad_x = torch.empty_like(x)
        options = ctx.options._replace(seed=seed)
        gradients = ctx.module.backward(grad_x, x, grad, weight, table, options)
        to_weight = to_bias = None
        if weight is not None:
            to_weight = gradients[0].view(weight.shape).to(weight.dtype)
        if bias is not None:
            to_bias = gradients[1].view(bias.shape).to(bias.dtype)
        return grad_x, to_weight, to_bias, None, None


def _followed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, strength: Strength, spec: Normalization
) -> tuple[Tensor, Tensor]:
    """Apply algorithm 1 by operations that a transform can follow."""
    if spec.group is not None:
        raise RuntimeError(
            "synchronized statistics take no transform of torch.func; use the plain layer's class"
        )
    t = strength.value(compute_dtype(x))
    values, dim = spec.sets(x)
    values = values.to(t.dtype)
    var, mean = torch.var_mean(values, dim, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + spec.eps)
    h = (values - mean) * rstd
    y, lmbda = gaussianize(h, dim, strength=t, xi=spec.xi, noise_kind="scaled", alpha=spec.alpha)
    gamma, beta = spec.views(x, weight, bias)
    out = affine(y, gamma, beta).to(x.dtype)
    stats = torch.stack([mean, var, rstd, lmbda - 1])
    return out.reshape(x.shape), stats.detach()


class _ByFormulas(torch.autograd.Function):
    """What `_ByKernels` does, by the formulas on whole tensors: for a compiler that traces them, and
    for ranks that share sets.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, strength: Strength, spec: Normalization
    ) -> tuple[Tensor, Tensor]:
        seed = spec.seed(x)
        t = strength.value(compute_dtype(x))
        values, dim = spec.sets(x)
        gamma, beta = spec.views(x, weight, bias)
        draw_noise = _noise_of(values, t * spec.xi, seed)
        over = Reductions(dim, spec.group)
        out, stats = eager.normalized(
            values, gamma, beta, t * spec.alpha, spec.eps, draw_noise, over
        )
        ctx.spec = spec
        ctx.save_for_backward(x, weight, bias, t, seed, stats)
        ctx.mark_non_differentiable(stats)
        return _shaped_as(x, out), stats

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, t, seed, stats = ctx.saved_tensors
        spec: Normalization = ctx.spec
        values, dim = spec.sets(x)
        views = spec.views(x, weight, bias)
        grad = spec.sets(grads[0])[0]
        draw_noise = _noise_of(values, t * spec.xi, seed)
        over = Reductions(dim, spec.group)
        grad_x, y = eager.pulled_back(
            grad, values, views[0], t * spec.alpha, stats, draw_noise, over
        )
        grad = grad.to(y.dtype)
        affine = map(_like, (grad * y, grad), views, (weight, bias))
        return grad_x.reshape(x.shape), *affine, None, None


def _shaped_as(x: Tensor, out: Tensor) -> Tensor:
    """Return a result in the shape of `x`, and not as a view, which an in-place operation behind the
    layer could not change.
    """
    return out if out.shape == x.shape else out.reshape(x.shape).clone()


def _like(gradient: Tensor, view: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Return the gradient of a parameter that was broadcast as `view`."""
    if view is None or parameter is None:
        return None
    return gradient.sum_to_size(view.shape).reshape(parameter.shape).to(parameter.dtype)


def _noise_of(x: Tensor, factor: Tensor, seed: Tensor | None) -> DrawNoise | None:
    """Return what draws the noise of `x`. Elements are numbered in the order of the dimensions, not
    in that of memory as kernels number them: where they lie is up to the compiler.
    """
    if seed is None:
        return None
    return lambda spread: normal(x.shape, seed) * (factor * spread)
