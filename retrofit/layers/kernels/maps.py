"""Maps by a scale and a shift as Triton kernels: constant batch statistics, migrated group
normalization and proxy-normalized activations on a GPU.

All three are phi((x - mean) / std) * scale + shift with numbers for each channel, or for each
sample and channel; phi is the identity but behind a norm. Where these numbers depend on the input
or on samples of a proxy, small kernels compute them, and their derivatives.
"""

# ruff: noqa: N803, RET505, RUF005
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrofit.layers.kernels import triton as ours
from retrofit.layers.kernels.channelwise import _quantiles
from retrofit.layers.kernels.eager import Strength
from retrofit.layers.kernels.layout import is_dense, layout_of
from retrofit.layers.kernels.plan import PROGRAMS, LaunchPlan, plan_of
from retrofit.layers.kernels.triton import (
    _kept,
    _leave,
    _leave_affine,
    _load,
    _mean_and_squares,
    _number,
    _over,
    _place,
    _rows,
    _store,
    _totals,
    _zeros,
)
from retrofit.layers.transforms import differentiable_once, needed

# Numbers of activations, as `channelwise.known` has them, and the identity
_CLAMP, _LEAKY, _HARDSWISH, _SILU, _GELU, _IDENTITY = map(tl.constexpr, range(6))
IDENTITY = 5, 0.0, 0.0
# Channels that a program of the proxy's tables takes
_CHANNELS = 4
_NUMBERS = [*ours._NUMBERS, "channels", "splits"]


@triton.jit
def _phi(x, first, second, KIND: tl.constexpr):
    """Return an activation and its derivative."""
    if KIND == _CLAMP:
        y = tl.where(x < first, first, tl.where(x > second, second, x))
        slope = tl.where((x > first) & (x < second), 1.0, 0.0)
    elif KIND == _LEAKY:
        slope = tl.where(x > 0, 1.0, first)
        y = x * slope
    elif KIND == _HARDSWISH:
        share = x * (1 / 6) + 0.5
        share = tl.where(share < 0, 0.0, tl.where(share > 1, 1.0, share))
        y = x * share
        slope = tl.where(x < -3, 0.0, tl.where(x <= 3, x * (1 / 3) + 0.5, 1.0))
    elif KIND == _SILU:
        share = 1 / (1 + tl.exp(-x))
        y = x * share
        slope = share * (1 + x * (1 - share))
    elif KIND == _GELU:
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        y = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        y = x
        slope = x * 0 + 1
    return y, slope


@triton.jit
def _standardization(Mean, Var, at, eps):
    """Return mean and 1 / std of each set, nothing where x is not standardized."""
    if Mean is None:
        return ()
    else:
        rstd = 1 / tl.sqrt(_number(Var, at.sets, at.valid, 1.0) + eps)
        return _number(Mean, at.sets, at.valid, 0.0), rstd


@triton.jit
def _phi_of(X, tile, standard, activation, TILE: tl.constexpr):
    x = _load(X, tile, TILE)
    if len(standard) == 2:
        x = (x - standard[0]) * standard[1]
    return _phi(x, activation[1], activation[2], activation[0])


@triton.jit
def _mapped(tile, given, sums, TILE: tl.constexpr):
    Out, X, standard, activation, scale, shift = given
    y, _ = _phi_of(X, tile, standard, activation, TILE)
    _store(Out, tile, y * scale + shift, TILE)
    return sums


@triton.jit(do_not_specialize=_NUMBERS)
def _map(
    Out, X, Scale, Shift, Mean, Var, eps, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write phi((x - mean) / std) * scale + shift."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    scale, shift = _number(Scale, at.sets, at.valid, 1.0), _number(Shift, at.sets, at.valid, 0.0)
    standard = _standardization(Mean, Var, at, eps)
    _over(at, _mapped, (Out, X, standard, (KIND, first, second), scale, shift), (), TILE)


@triton.jit
def _mapped_back(tile, given, sums, TILE: tl.constexpr):
    GradX, X, Grad, standard, activation, factor = given
    g = _load(Grad, tile, TILE)
    y, slope = _phi_of(X, tile, standard, activation, TILE)
    _store(GradX, tile, g * factor * slope, TILE)
    return sums[0] + _kept(g * y, tile, 0.0, TILE), sums[1] + g


@triton.jit(do_not_specialize=_NUMBERS)
def _map_back(
    GradX, X, Grad, Scale, Sums, Mean, Var, eps, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, entries,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, and leave sums of grad * phi and of grad."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    standard = _standardization(Mean, Var, at, eps)
    factor = _number(Scale, at.sets, at.valid, 1.0)
    if len(standard) == 2:
        factor *= standard[1]
    given = GradX, X, Grad, standard, (KIND, first, second), factor
    of_scale, of_shift = _over(at, _mapped_back, given, (_zeros(TILE), _zeros(TILE)), TILE)
    _leave_affine(Sums, at, of_scale, TILE)
    _leave_affine(Sums + entries, at, of_shift, TILE)


@triton.jit
def _combined(tile, given, sums, TILE: tl.constexpr):
    GradX, X, Grad, a, b, c = given
    grad_x = _load(Grad, tile, TILE) * a + (_load(X, tile, TILE) * b + c)
    _store(GradX, tile, grad_x, TILE)
    return sums


@triton.jit(do_not_specialize=_NUMBERS)
def _combine(
    GradX, X, Grad, Table,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write grad * a + x * b + c, by three rows of a table."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    _over(at, _combined, (GradX, X, Grad) + _rows(Table, 0, 3, sets, at), (), TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _moments(
    Parts, X,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Leave mean and sum of squared deviations of a program's share of each set."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    mean, squares, _, _ = _mean_and_squares(X, at, TILE)
    _leave(Parts, sets, at, (mean, squares))


@triton.jit
def _products(tile, given, sums, TILE: tl.constexpr):
    X, Grad, mean = given
    g = _load(Grad, tile, TILE)
    return sums[0] + g, sums[1] + g * (_load(X, tile, TILE) - mean)


@triton.jit(do_not_specialize=_NUMBERS)
def _sums(
    Parts, X, Grad, Mean,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, channels,
    TILE: tl.constexpr,
):  # fmt: skip
    """Leave sums of grad and of grad * (x - mean) over a program's share of each set."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    mean = _number(Mean, at.sets % channels, at.valid, 0.0)
    sums = _over(at, _products, (X, Grad, mean), (_zeros(TILE), _zeros(TILE)), TILE)
    _leave(Parts, sets, at, _totals(sums, TILE))


# Migrated group normalization: what `_GroupAffine` computes, a program a sample and group


@triton.jit
def _group(channels, of_group, BLOCK: tl.constexpr):
    """Return the channels of a program's group, which there are, and their numbers in tables."""
    group = tl.program_id(1) * of_group
    within = tl.arange(0, BLOCK)
    return group + within, within < of_group, tl.program_id(0) * channels + group + within


@triton.jit(do_not_specialize=["channels", "of_group", "splits", "runs", "share", "width"])
def _migrated_table(
    Table, Kept, Parts, Mean, Var, Gain, Weight, Bias, Code, Eps, SourceEps, unit,
    channels, of_group, splits, runs, share, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the moments of a group's channels into scale and shift of x; keep the group's mean and
    k.
    """
    channel, mask, place = _group(channels, of_group, BLOCK)
    sets = tl.num_programs(0) * channels
    row_mean = tl.zeros([BLOCK], tl.float32)
    for s in range(splits):
        part = tl.minimum((s + 1) * share, runs) - s * share
        row_mean += tl.load(Parts + s * sets + place, mask=mask, other=0.0) * (part / runs)
    squares = tl.zeros([BLOCK], tl.float32)
    for s in range(splits):
        part = tl.minimum((s + 1) * share, runs) - s * share
        apart = tl.load(Parts + s * sets + place, mask=mask, other=0.0) - row_mean
        own = tl.load(Parts + (splits + s) * sets + place, mask=mask, other=0.0)
        squares += own + apart * apart * (part * width).to(tl.float32)
    row_var = squares / (runs * width).to(tl.float32)

    t = tl.load(Code).to(tl.float32) * unit
    eps, source_eps = tl.load(Eps).to(tl.float32), tl.load(SourceEps).to(tl.float32)
    gain, gamma = _number(Gain, channel, mask, 1.0), _number(Weight, channel, mask, 1.0)
    mean, beta = _number(Mean, channel, mask, 0.0), _number(Bias, channel, mask, 0.0)
    rstd = 1 / tl.sqrt(_number(Var, channel, mask, 1.0) + source_eps)
    centre = tl.where(mask, (row_mean - mean) * (rstd * gain), 0.0)
    m = tl.sum(centre, 0) / of_group
    apart = tl.where(mask, centre - m, 0.0)
    within = tl.where(mask, row_var * (rstd * gain) * (rstd * gain), 0.0)
    v = tl.sum(within + apart * apart, 0) / of_group
    # At t = 0 the moments do not count, not even where they overflow
    m, v = tl.where(t > 0, m, 0.0), tl.where(t > 0, v, 1.0)
    k = 1 / tl.sqrt(1 - t + t * (v + eps))
    scale = k * gamma
    tl.store(Table + place, scale * rstd, mask=mask)
    tl.store(Table + sets + place, beta - scale * (mean * rstd + t * m / gain), mask=mask)
    group = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    groups = tl.num_programs(0) * tl.num_programs(1)
    tl.store(Kept + group, m)
    tl.store(Kept + groups + group, k)
    tl.store(Kept + 2 * groups + group, t)


@triton.jit(do_not_specialize=["channels", "of_group", "splits", "size"])
def _migrated_slopes(
    Table, Sums, Kept, Parts, Mean, Var, Gain, Weight, SourceEps,
    channels, of_group, splits, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the rows of `_combine`, and the sums of grad * x^ and grad; see `_GroupAffine`."""
    channel, mask, place = _group(channels, of_group, BLOCK)
    sets = tl.num_programs(0) * channels
    sum_g, centred = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for s in range(splits):
        sum_g += tl.load(Parts + s * sets + place, mask=mask, other=0.0)
        centred += tl.load(Parts + (splits + s) * sets + place, mask=mask, other=0.0)
    group = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    groups = tl.num_programs(0) * tl.num_programs(1)
    m, k = tl.load(Kept + group), tl.load(Kept + groups + group)
    t = tl.load(Kept + 2 * groups + group)
    gain, gamma = _number(Gain, channel, mask, 1.0), _number(Weight, channel, mask, 1.0)
    mean = _number(Mean, channel, mask, 0.0)
    rstd = 1 / tl.sqrt(_number(Var, channel, mask, 1.0) + tl.load(SourceEps).to(tl.float32))
    m = m / gain
    sum_gx = (centred * rstd - t * m * sum_g) * k
    total = (of_group * size).to(tl.float32)
    mean_gx = tl.sum(tl.where(mask, sum_gx * gamma, 0.0), 0) / total
    mean_g = tl.sum(tl.where(mask, sum_g * gamma / gain, 0.0), 0) / total
    slope = -t * (k * gain) * (k * gain) * mean_gx
    shift = -t * k * gain * mean_g - slope * (mean * rstd + m)
    tl.store(Table + place, k * gamma * rstd, mask=mask)
    tl.store(Table + sets + place, slope * rstd * rstd, mask=mask)
    tl.store(Table + 2 * sets + place, shift * rstd, mask=mask)
    tl.store(Sums + place, sum_gx, mask=mask)
    tl.store(Sums + sets + place, sum_g, mask=mask)


# The proxy of a proxy-normalized activation: what `ProxyNorm.constants` computes


@triton.jit
def _proxy(
    Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channel, mask, samples, BLOCK: tl.constexpr
):
    """Return samples of the proxy, one a row, which there are, and what scaled them."""
    gamma, beta = _number(Gamma, channel, mask, 1.0), _number(Beta, channel, mask, 0.0)
    wide = 1 + _number(ProxyScale, channel, mask, 0.0)
    offset = _number(ProxyBias, channel, mask, 0.0)
    sample = tl.arange(0, BLOCK)[:, None]
    drawn = sample < samples
    quantile = tl.load(Quantiles + sample, mask=drawn, other=0.0)
    y = quantile * (wide * gamma) + (offset * gamma + beta)
    return y, drawn & mask, quantile, gamma, wide, offset


@triton.jit(do_not_specialize=["channels", "samples"])
def _proxy_table(
    Table, Gamma, Beta, ProxyScale, ProxyBias, RestoreScale, RestoreShift, Quantiles, Code, unit,
    eps, first, second, channels, samples,
    KIND: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the scale and shift of phi at strength t, and the proxy's mean and std, and t."""
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = channel < channels
    y, drawn, _, _, _, _ = _proxy(
        Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channel, mask, samples, BLOCK
    )
    phi, _ = _phi(y, first, second, KIND)
    phi = tl.where(drawn, phi, 0.0)
    mean = tl.sum(phi, 0, keep_dims=True) / samples
    apart = tl.where(drawn, phi - mean, 0.0)
    std = tl.sqrt(tl.sum(apart * apart, 0, keep_dims=True) / samples + eps)
    scale = mean * 0 + 1
    if DIVIDE:
        scale = _number(RestoreScale, channel, mask, 1.0) / std
    shift = _number(RestoreShift, channel, mask, 0.0) - scale * mean
    t = tl.load(Code).to(tl.float32) * unit
    tl.store(Table + channel, 1 + t * (scale - 1), mask=mask)
    tl.store(Table + channels + channel, t * shift, mask=mask)
    tl.store(Table + 2 * channels + channel, mean, mask=mask)
    tl.store(Table + 3 * channels + channel, std, mask=mask)
    tl.store(Table + 4 * channels + channel, mean * 0 + t, mask=mask)


@triton.jit(do_not_specialize=["channels", "samples"])
def _proxy_gradients(
    Gradients, Sums, Table, Gamma, Beta, ProxyScale, ProxyBias, RestoreScale, Quantiles,
    first, second, channels, samples,
    KIND: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gamma, beta, proxy_scale and proxy_bias, by those of scale and
    shift.
    """
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = channel < channels
    y, drawn, quantile, gamma, wide, offset = _proxy(
        Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channel, mask, samples, BLOCK
    )
    phi, slope = _phi(y, first, second, KIND)
    mean = _number(Table + 2 * channels, channel, mask, 0.0)
    std = _number(Table + 3 * channels, channel, mask, 1.0)
    t = _number(Table + 4 * channels, channel, mask, 0.0)
    of_scale, of_shift = (
        _number(Sums, channel, mask, 0.0),
        _number(Sums + channels, channel, mask, 0.0),
    )
    scale = mean * 0 + 1
    if DIVIDE:
        scale = _number(RestoreScale, channel, mask, 1.0) / std
    of_mean = -t * of_shift * scale
    of_var = mean * 0
    if DIVIDE:
        of_var = -t * (of_scale - of_shift * mean) * scale / (2 * std * std)
    of_y = tl.where(drawn, (of_mean + 2 * of_var * (phi - mean)) * slope / samples, 0.0)
    by_quantile = tl.sum(of_y * quantile, 0, keep_dims=True)
    plain = tl.sum(of_y, 0, keep_dims=True)
    tl.store(Gradients + channel, by_quantile * wide + plain * offset, mask=mask)
    tl.store(Gradients + channels + channel, plain, mask=mask)
    tl.store(Gradients + 2 * channels + channel, by_quantile * gamma, mask=mask)
    tl.store(Gradients + 3 * channels + channel, plain * gamma, mask=mask)


# From Python


@lru_cache(maxsize=1024)
def _plan(
    size: tuple[int, ...], stride: tuple[int, ...], channel_dim: int, per_sample: bool, busy: int
) -> LaunchPlan | None:
    """Return the plan for sets of a channel, or of a sample and channel."""
    if not is_dense(size, stride):
        return None
    channel = channel_dim % len(size)
    apart = {0, channel} if per_sample else {channel}
    dims = tuple(d for d in range(len(size)) if d not in apart)
    channels = torch.Size(n if d == channel else 1 for d, n in enumerate(size))
    layout = layout_of(size, stride, dims, channels)
    plan = plan_of(layout.shape, layout.dims, layout.affine, busy)
    if plan is None or [d for d in layout.order if d in apart] != sorted(apart):
        return None
    return plan if plan.tile.along == "sets" and plan.tile.merge == 1 else None


def plan_for(x: Tensor, channel_dim: int = 1, per_sample: bool = False) -> LaunchPlan | None:
    """Return how kernels go about `x`, (N, C, *) or (N, *, C); None where they cannot."""
    # Programs that only write need no merging of what they share
    busy = ours.processors(x.device) * (1 if per_sample else PROGRAMS)
    return _plan(x.shape, x.stride(), channel_dim, per_sample, busy)


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """Return a gradient that lies in memory as `x` does."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


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
        out = torch.empty_like(x)
        kind, *numbers = IDENTITY
        tensors = out, x, weight, bias, mean, var
        ours.launch(_map, plan, *tensors, eps, *numbers, *plan.numbers, kind)
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps, ctx.plan = eps, plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            sums: Any
            grad_x, sums = _differentiably(x, grads[0], mean, var, weight, ctx.eps)
        else:
            tensors = x, grads[0], weight, mean, var
            grad_x, sums = _map_backward(*tensors, ctx.eps, IDENTITY, ctx.plan)
        return grad_x, None, None, *needed(ctx, 3, sums), None, None


def _differentiably(
    x: Tensor, grad: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the gradients of a map of (N, C, *) for a second derivative."""
    exact = torch.promote_types(x.dtype, torch.float32)
    rstd = torch.rsqrt(var.to(exact) + eps)
    scale = rstd if weight is None else rstd * weight
    shape = -1, *(1,) * (x.ndim - 2)
    over = (0, *range(2, x.ndim))
    centred = (x - mean.to(exact).view(shape)) * rstd.view(shape)
    sums = (grad * centred).sum(over), grad.to(exact).sum(over)
    return (grad * scale.view(shape)).to(x.dtype), sums


def _map_backward(
    x: Tensor, grad: Tensor, scale: Any, mean: Any, var: Any, eps: float, phi: Any, plan: LaunchPlan
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and those of scale and shift, (2, C)."""
    grad_x, sums = torch.empty_like(x), ours.room(x, 2, *plan.gradients)
    kind, *numbers = phi
    tensors = grad_x, x, _like(grad, x), scale, sums, mean, var
    arguments = *tensors, eps, *numbers, *plan.numbers, sums.numel() // 2
    ours.launch(_map_back, plan, *arguments, kind)
    return grad_x, sums.sum(plan.summed)


class ProxyActivationOnGPU(torch.autograd.Function):
    """A proxy-normalized activation; `given` and `phi` are those of
    `channelwise.ProxyActivation`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        plan: LaunchPlan,
        phi: Any,
        strength: Strength,
        settings: Any,
        *given: Any,
    ) -> Tensor:
        eps, divide, samples = settings
        kind, *numbers = phi
        table, out = ours.room(x, 5, plan.sets), torch.empty_like(x)
        quantiles = _quantiles_on(samples, x.device)
        arguments = table, *given, quantiles, strength.source, strength.unit, eps, *numbers
        _launch_table(_proxy_table, plan.sets, *arguments, plan.sets, samples, kind, divide)
        tensors = out, x, table[0], table[1], None, None
        ours.launch(_map, plan, *tensors, 0.0, *numbers, *plan.numbers, kind)
        ctx.save_for_backward(x, table, *given)
        ctx.plan, ctx.phi, ctx.settings = plan, phi, settings
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, table, *given = ctx.saved_tensors
        _, divide, samples = ctx.settings
        channels = ctx.plan.sets
        grad_x, sums = _map_backward(x, grads[0], table[0], None, None, 0.0, ctx.phi, ctx.plan)
        gradients = ours.room(x, 4, channels)
        kind, *numbers = ctx.phi
        arguments = gradients, sums, table, *given[:5], _quantiles_on(samples, x.device), *numbers
        _launch_table(_proxy_gradients, channels, *arguments, channels, samples, kind, divide)
        return grad_x, None, None, None, None, *needed(ctx, 5, gradients.unbind()), None, None


def _launch_table(kernel: Any, channels: int, *arguments: Any) -> None:
    samples = arguments[-3]
    grid = (triton.cdiv(channels, _CHANNELS),)
    ours.launch_on(kernel, grid, *arguments, triton.next_power_of_2(samples), _CHANNELS)


@lru_cache(maxsize=16)
def _quantiles_on(samples: int, device: torch.device) -> Tensor:
    return _quantiles(samples).to(device)


class MigratedNormOnGPU(torch.autograd.Function):
    """`migrated_group_norm` of (N, C, *); the tensors given are weight, bias, running mean and
    variance, and gain, each (C,) or None, and eps and source_eps, 0-dim.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: LaunchPlan, num_groups: int, strength: Strength, *given: Any
    ) -> Tensor:
        weight, bias, mean, var, gain, eps, source_eps = given
        samples, channels = x.shape[:2]
        parts = ours.room(x, 2, plan.splits, plan.sets)
        ours.launch(_moments, plan, parts, x, *plan.numbers)
        table, kept = ours.room(x, 2, plan.sets), ours.room(x, 3, samples, num_groups)
        of_group = channels // num_groups
        block = triton.next_power_of_2(of_group)
        grid = samples, num_groups
        tensors = table, kept, parts, mean, var, gain, weight, bias
        factors = strength.source, eps, source_eps, strength.unit
        sizes = channels, of_group, plan.splits, *plan.shares
        ours.launch_on(_migrated_table, grid, *tensors, *factors, *sizes, block)
        out = torch.empty_like(x)
        kind, *numbers = IDENTITY
        mapped = out, x, table[0], table[1], None, None
        ours.launch(_map, plan, *mapped, 0.0, *numbers, *plan.numbers, kind)
        ctx.save_for_backward(x, weight, mean, var, gain, source_eps, kept)
        ctx.plan, ctx.num_groups = plan, num_groups
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, gain, source_eps, kept = ctx.saved_tensors
        plan, (samples, channels) = ctx.plan, x.shape[:2]
        grad = _like(grads[0], x)
        parts = ours.room(x, 2, plan.splits, plan.sets)
        ours.launch(_sums, plan, parts, x, grad, mean, *plan.numbers, channels)
        table, sums = ours.room(x, 3, plan.sets), ours.room(x, 2, samples, channels)
        of_group = channels // ctx.num_groups
        size = x.numel() // (samples * channels)
        tensors = table, sums, kept, parts, mean, var, gain, weight, source_eps
        sizes = channels, of_group, plan.splits, size, triton.next_power_of_2(of_group)
        ours.launch_on(_migrated_slopes, (samples, ctx.num_groups), *tensors, *sizes)
        grad_x = torch.empty_like(x)
        ours.launch(_combine, plan, grad_x, x, grad, table, *plan.numbers)
        gradients = needed(ctx, 4, sums.sum(1).unbind())
        return grad_x, None, None, None, *gradients, *(None,) * 5
