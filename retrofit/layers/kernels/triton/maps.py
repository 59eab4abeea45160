"""Maps by a scale and a shift: phi((x - mean) / std) * scale + shift with numbers for each channel,
or for each sample and channel; phi is the identity but behind a norm.

Constant batch statistics are such a map. Migrated group normalization (`migration`) and
proxy-normalized activations (`proxy`) are others, whose numbers small kernels compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from retrofit.layers.function_transforms import needed
from retrofit.layers.kernels.channelwise import Activation
from retrofit.layers.kernels.layout import is_dense, laid_out_as, layout_of
from retrofit.layers.kernels.triton import launcher
from retrofit.layers.kernels.triton.activations import IDENTITY, phi
from retrofit.layers.kernels.triton.affine import affine_of_sets, store_affine_sums
from retrofit.layers.kernels.triton.tables import load_entries, load_rows
from retrofit.layers.kernels.triton.tiles import (
    add,
    kernel,
    load,
    over,
    place_of,
    store,
    zero_sums,
)
from retrofit.layers.kernels.triton_plan import PROGRAMS, LaunchPlan, plan_of


@triton.jit
def load_argument(Mean, Var, Inner, place, eps):
    """Return what phi takes, (x - centre) * factor + offset, as these three numbers of each set;
    nothing where it takes x. `Inner` is the table of an inner map, factor and offset.
    """
    if Inner is not None:
        factor, offset = load_rows(Inner, 0, 2, place)
        return tl.zeros_like(factor), factor, offset
    elif Mean is not None:
        rstd = 1 / tl.sqrt(load_entries(Var, place, 1.0) + eps)
        return load_entries(Mean, place, 0.0), rstd, tl.zeros_like(rstd)
    else:
        return ()


@triton.jit
def phi_of(x, argument, activation):
    """Return phi and its derivative."""
    if len(argument) == 3:
        x = (x - argument[0]) * argument[1] + argument[2]
    return phi(x, activation[1], activation[2], activation[0])


@triton.jit
def _store_map(tile, operands, sums, TILE):
    Out, X, argument, activation, scale, shift = operands
    y, _ = phi_of(load(X, tile), argument, activation)
    store(Out, tile, y * scale + shift)
    return sums


@kernel
def map_kernel(
    Out, X, Scale, Shift, Mean, Var, Inner, eps, lower, upper, KIND: tl.constexpr,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store phi * scale + shift; see `load_argument`. Scale and shift are numbers of each set,
    behind an inner map of each channel.
    """
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    if Inner is None:
        scale, shift = load_entries(Scale, place, 1.0), load_entries(Shift, place, 0.0)
    else:
        scale = affine_of_sets(Scale, place, 1.0, TILE)
        shift = affine_of_sets(Shift, place, 0.0, TILE)
    argument = load_argument(Mean, Var, Inner, place, eps)
    over(place, _store_map, (Out, X, argument, (KIND, lower, upper), scale, shift), (), TILE)


@triton.jit
def store_gradient(tile, operands, sums, TILE):
    """Store grad * phi' * a + x * b + c, by one factor or three; add up grad * phi and grad where
    there are sums.
    """
    GradX, X, Grad, argument, activation, factors = operands
    x, grad = load(X, tile), load(Grad, tile)
    y, slope = phi_of(x, argument, activation)
    g = grad * slope * factors[0]
    if len(factors) == 3:
        g += x * factors[1] + factors[2]
    store(GradX, tile, g)
    return add(sums, (grad * y, grad))


@kernel
def map_backward_kernel(
    GradX, X, Grad, Scale, Sums, Mean, Var, partials, eps, lower, upper, KIND: tl.constexpr,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x, and sums of grad * phi and of grad."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    argument = load_argument(Mean, Var, None, place, eps)
    factor = load_entries(Scale, place, 1.0)
    if len(argument) == 3:
        factor *= argument[1]
    operands = GradX, X, Grad, argument, (KIND, lower, upper), (factor,)
    sums = over(place, store_gradient, operands, zero_sums(2, TILE), TILE)
    store_affine_sums(Sums, partials, place, sums, TILE)


@lru_cache(maxsize=1024)
def _plan(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    channel_dim: int,
    per_sample: bool,
    programs: int,
) -> LaunchPlan | None:
    """Return the plan for sets of a channel, or of a sample and channel."""
    if not is_dense(size, stride):
        return None
    channel = channel_dim % len(size)
    of_sets = [0, channel] if per_sample else [channel]
    dims = tuple(d for d in range(len(size)) if d not in of_sets)
    channels = torch.Size(n if d == channel else 1 for d, n in enumerate(size))
    layout = layout_of(size, stride, dims, channels)
    plan = plan_of(layout.shape, layout.dims, layout.affine, programs)
    in_order = [d for d in layout.order if d in of_sets] == of_sets
    # Tables have a number for each lane
    return plan if in_order and plan is not None and plan.tile.merge == 1 else None


def channel_plan(x: Tensor, channel_dim: int = 1, per_sample: bool = False) -> LaunchPlan | None:
    """Return how kernels go about `x`, (N, C, *) or (N, *, C); None where they cannot."""
    # Programs that only write need no merging of what they share
    programs = launcher.processors(x.device) * (1 if per_sample else PROGRAMS)
    return _plan(x.shape, x.stride(), channel_dim, per_sample, programs)


def launch_map(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    plan: LaunchPlan,
    activation: Activation = IDENTITY,
    statistics: tuple[Tensor | None, Tensor | None] = (None, None),
    inner: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return phi * scale + shift, by a number of each for a set, or, behind an inner map, for a
    channel.
    """
    out = torch.empty_like(x)
    kind, *bounds = activation
    tensors = out, x, scale, shift, *statistics, inner
    launcher.launch(map_kernel, plan, *tensors, eps, *bounds, kind)
    return out


def launch_map_backward(
    x: Tensor,
    grad: Tensor,
    scale: Tensor | None,
    plan: LaunchPlan,
    activation: Activation = IDENTITY,
    statistics: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and those of scale and shift, (2, C)."""
    grad_x = torch.empty_like(x)
    sums = launcher.room(x, 2, *plan.gradients)
    kind, *bounds = activation
    tensors = grad_x, x, laid_out_as(x, grad), scale, sums, *statistics
    partials = sums.numel() // 2
    launcher.launch(map_backward_kernel, plan, *tensors, partials, eps, *bounds, kind)
    return grad_x, sums.sum((1, 2))


class ChannelMapOnGPU(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias per channel, with constant mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Any,
        bias: Any,
        eps: float,
        plan: LaunchPlan,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps
        ctx.plan = plan
        return launch_map(x, weight, bias, plan, statistics=(mean, var), eps=eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        affine: Iterable[Tensor]
        if torch.is_grad_enabled():
            grad_x, affine = _differentiably(x, grads[0], mean, var, weight, ctx.eps)
        else:
            grad_x, affine = launch_map_backward(
                x, grads[0], weight, ctx.plan, statistics=(mean, var), eps=ctx.eps
            )
        return grad_x, None, None, *needed(ctx, 3, affine), None, None


def _differentiably(
    x: Tensor, grad: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of x, and those of weight and bias, for a second derivative, by torch's
    own layer.
    """

    def layer(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return functional.batch_norm(x, mean, var, gamma.to(mean.dtype), beta, eps=eps)

    gamma = torch.ones_like(mean) if weight is None else weight
    pull_back: Any = torch.func.vjp(layer, x, gamma, torch.zeros_like(mean))[1]
    grad_x, *affine = pull_back(grad)
    return grad_x, affine
