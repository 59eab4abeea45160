"""Maps by a scale and a shift as Triton kernels: constant batch statistics, migrated group
normalization and proxy-normalized activations on a GPU.

All three are phi((x - mean) / std) * scale + shift with numbers for each channel, or for each
sample and channel; phi is the identity but behind a norm. Where these numbers depend on the input
or on samples of a proxy, small kernels compute them, and their derivatives.
"""

# ruff: noqa: N803, RET505
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from retrofit.layers.kernels import triton as ours
from retrofit.layers.kernels.channelwise import Activation, _quantiles
from retrofit.layers.kernels.eager import Strength
from retrofit.layers.kernels.layout import is_dense, layout_of
from retrofit.layers.kernels.plan import PROGRAMS, LaunchPlan, plan_of
from retrofit.layers.kernels.triton import (
    _exp2,
    _leave,
    _leave_affine,
    _load,
    _mean_and_squares,
    _number,
    _over,
    _place,
    _polynomial,
    _reciprocal,
    _rows,
    _store,
    _totals,
    _zeros,
)
from retrofit.layers.transforms import differentiable_once, needed

# Numbers of activations, as `channelwise.known` has them, and the identity
_CLAMP, _LEAKY, _HARDSWISH, _SILU, _GELU, _IDENTITY = map(tl.constexpr, range(6))
IDENTITY: Activation = (5, 0.0, 0.0)
# An inner map behind which gradients are pulled back: its table, the scale behind it, the activation
_Inner = tuple[Tensor, Tensor, Activation]
# The normal distribution's tail beyond a is exp(-a^2 / 2) * t * polynomial(t), t = 1 / (1 + near * a),
# as in Abramowitz and Stegun 7.1.26; fitted to an error of 1.3e-8 / max(1, a)
_NEAR = tl.constexpr(0.28)
_TAIL = tl.constexpr(
    (
        *(-0.10608119655055692, 0.39107580301510503, -0.23909196522040166),
        *(0.2707263783295853, 0.06671778091327663, 0.11665319951299163),
    )
)
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
        share = _reciprocal(1 + _exp2(x * -1.4426950408889634))
        y = x * share
        slope = share + y * (1 - share)
    elif KIND == _GELU:
        density = _exp2(x * x * -0.7213475204444817)
        near = _reciprocal(1 + _NEAR * tl.abs(x))
        tail = density * (near * _polynomial(near, _TAIL))
        share = tl.where(x < 0, tail, 1 - tail)
        y = x * share
        slope = share + x * density * 0.3989422804014327
    else:
        y = x
        slope = x * 0 + 1
    return y, slope


@triton.jit
def _argument(Mean, Var, Inner, at, eps, sets):
    """Return what phi takes, (x - centre) * factor + offset, as these three numbers of each set;
    nothing where it takes x.
    """
    if Inner is not None:
        factor, offset = _rows(Inner, 0, 2, sets, at)
        return tl.zeros_like(factor), factor, offset
    elif Mean is not None:
        rstd = 1 / tl.sqrt(_number(Var, at.sets, at.valid, 1.0) + eps)
        return _number(Mean, at.sets, at.valid, 0.0), rstd, tl.zeros_like(rstd)
    else:
        return ()


@triton.jit
def _phi_of(x, argument, activation):
    """Return phi and its derivative."""
    if len(argument) == 3:
        x = (x - argument[0]) * argument[1] + argument[2]
    return _phi(x, activation[1], activation[2], activation[0])


@triton.jit
def _mapped(tile, given, sums, TILE: tl.constexpr):
    Out, X, argument, activation, scale, shift = given
    y, _ = _phi_of(_load(X, tile, TILE), argument, activation)
    _store(Out, tile, y * scale + shift, TILE)
    return sums


@triton.jit(do_not_specialize=_NUMBERS)
def _map(
    Out, X, Scale, Shift, Mean, Var, Inner, eps, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, channels,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write phi * scale + shift; see `_argument`. Behind an inner map, scale and shift repeat after
    `channels` sets.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    number = at.sets if Inner is None else at.sets % channels
    scale, shift = _number(Scale, number, at.valid, 1.0), _number(Shift, number, at.valid, 0.0)
    argument = _argument(Mean, Var, Inner, at, eps, sets)
    _over(at, _mapped, (Out, X, argument, (KIND, first, second), scale, shift), (), TILE)


@triton.jit
def _mapped_back(tile, given, sums, TILE: tl.constexpr):
    GradX, X, Grad, argument, activation, factor = given
    g = _load(Grad, tile, TILE)
    y, slope = _phi_of(_load(X, tile, TILE), argument, activation)
    _store(GradX, tile, g * factor * slope, TILE)
    return sums[0] + g * y, sums[1] + g


@triton.jit(do_not_specialize=_NUMBERS)
def _map_back(
    GradX, X, Grad, Scale, Sums, Mean, Var, eps, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, entries,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, and leave sums of grad * phi and of grad."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    argument = _argument(Mean, Var, None, at, eps, sets)
    factor = _number(Scale, at.sets, at.valid, 1.0)
    if len(argument) == 3:
        factor *= argument[1]
    given = GradX, X, Grad, argument, (KIND, first, second), factor
    of_scale, of_shift = _over(at, _mapped_back, given, (_zeros(TILE), _zeros(TILE)), TILE)
    _leave_affine(Sums, at, of_scale, TILE)
    _leave_affine(Sums + entries, at, of_shift, TILE)


@triton.jit
def _combined(tile, given, sums, TILE: tl.constexpr):
    GradX, X, Grad, argument, activation, a, b, c = given
    x, g = _load(X, tile, TILE), _load(Grad, tile, TILE)
    if len(argument) == 3:
        _, slope = _phi_of(x, argument, activation)
        g *= slope
    _store(GradX, tile, g * a + (x * b + c), TILE)
    return sums


@triton.jit(do_not_specialize=_NUMBERS)
def _combine(
    GradX, X, Grad, Table, Inner, Scale, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, channels,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write grad * a + x * b + c, by three rows of a table; grad is pulled back through phi and its
    scale where there is an inner map.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    a, b, c = _rows(Table, 0, 3, sets, at)
    if Inner is not None:
        a *= _number(Scale, at.sets % channels, at.valid, 1.0)
    argument = _argument(None, None, Inner, at, 0.0, sets)
    _over(at, _combined, (GradX, X, Grad, argument, (KIND, first, second), a, b, c), (), TILE)


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
    X, Grad, mean, argument, activation = given
    x, grad = _load(X, tile, TILE), _load(Grad, tile, TILE)
    if len(argument) == 3:
        y, slope = _phi_of(x, argument, activation)
        g = grad * slope
        return sums[0] + g, sums[1] + g * (x - mean), sums[2] + grad * y, sums[3] + grad
    else:
        return sums[0] + grad, sums[1] + grad * (x - mean)


@triton.jit(do_not_specialize=_NUMBERS)
def _sums(
    Parts, X, Grad, Mean, Inner, Scale, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, channels,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Leave sums of grad and of grad * (x - mean) over a program's share of each set. With an inner
    map, that grad is pulled back as in `_combine`; then follow sums of grad * phi and of grad.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, TILE)
    channel = at.sets % channels
    mean = _number(Mean, channel, at.valid, 0.0)
    argument = _argument(None, None, Inner, at, 0.0, sets)
    given, zero = (X, Grad, mean, argument, (KIND, first, second)), _zeros(TILE)
    if len(argument) == 3:
        scale = _number(Scale, channel, at.valid, 1.0)
        sums = _totals(_over(at, _products, given, (zero, zero, zero, zero), TILE), TILE)
        _leave(Parts, sets, at, (sums[0] * scale, sums[1] * scale, sums[2], sums[3]))
    else:
        _leave(Parts, sets, at, _totals(_over(at, _products, given, (zero, zero), TILE), TILE))


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


@triton.jit
def _of_splits(Parts, ROW: tl.constexpr, splits, sets, place, mask):
    """Add up the parts that programs left of a sum."""
    total = place.to(tl.float32) * 0
    for s in range(splits):
        total += tl.load(Parts + (ROW * splits + s) * sets + place, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["channels", "of_group", "splits", "size"])
def _migrated_slopes(
    Table, Sums, Kept, Parts, Mean, Var, Gain, Weight, SourceEps,
    channels, of_group, splits, size, PROXIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the rows of `_combine`, and the sums of grad * x^ and grad; see `_GroupAffine`.
    Behind them, those for a proxy.
    """
    channel, mask, place = _group(channels, of_group, BLOCK)
    sets = tl.num_programs(0) * channels
    sum_g = _of_splits(Parts, 0, splits, sets, place, mask)
    centred = _of_splits(Parts, 1, splits, sets, place, mask)
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
    if PROXIED:
        for row in tl.static_range(2, 4):
            total = _of_splits(Parts, row, splits, sets, place, mask)
            tl.store(Sums + row * sets + place, total, mask=mask)


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
    Gradients, Sums, More, Table, Gamma, Beta, ProxyScale, ProxyBias, RestoreScale, Quantiles,
    first, second, channels, samples,
    KIND: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gamma, beta, proxy_scale and proxy_bias, by those of scale and shift.
    Gamma and beta have `More`, by the norm itself.
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
    of_scale = _number(Sums, channel, mask, 0.0)
    of_shift = _number(Sums + channels, channel, mask, 0.0)
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
    to_gamma, to_beta = by_quantile * wide + plain * offset, plain
    if More is not None:
        to_gamma += _number(More, channel, mask, 0.0)
        to_beta += _number(More + channels, channel, mask, 0.0)
    tl.store(Gradients + channel, to_gamma, mask=mask)
    tl.store(Gradients + channels + channel, to_beta, mask=mask)
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


def _launch_map(
    out: Tensor,
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    plan: LaunchPlan,
    phi: Activation = IDENTITY,
    statistics: tuple[Tensor | None, Tensor | None] = (None, None),
    inner: tuple[Tensor | None, int] = (None, 1),
    eps: float = 0.0,
) -> None:
    """Write phi * scale + shift, by a number of each for a set, or, behind an inner map, which is
    given with the number of channels, for a channel.
    """
    kind, *numbers = phi
    table, channels = inner
    tensors = out, x, scale, shift, *statistics, table
    ours.launch(_map, plan, *tensors, eps, *numbers, *plan.numbers, channels, kind)


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
        _launch_map(out, x, weight, bias, plan, statistics=(mean, var), eps=eps)
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


class Proxy(NamedTuple):
    """What a `ProxyNorm` computes its constants from."""

    # see `channelwise.known`
    phi: Activation
    strength: Strength
    eps: float
    # whether it divides by the proxy's std, and how many samples the proxy has
    divide: bool
    samples: int
    # (C,) each
    restore_scale: Tensor | None
    restore_shift: Tensor | None

    def table(self, like: Tensor, channels: int, *parameters: Tensor | None) -> Tensor:
        """Return scale and shift of phi, and what their derivatives take, by gamma, beta,
        proxy_scale and proxy_bias.
        """
        _, *numbers = self.phi
        table = ours.room(like, 5, channels)
        tensors = table, *parameters, self.restore_scale, self.restore_shift
        factors = *self.strength, self.eps, *numbers
        quantiles = _quantiles_on(self.samples, like.device)
        self._launch(_proxy_table, channels, *tensors, quantiles, *factors)
        return table

    def gradients(
        self, sums: Tensor, more: Tensor | None, table: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the four parameters by `sums`, those of scale and shift; gamma
        and beta have `more`.
        """
        _, *numbers = self.phi
        channels = table.shape[1]
        gradients = ours.room(table, 4, channels)
        tensors = gradients, sums, more, table, *parameters, self.restore_scale
        quantiles = _quantiles_on(self.samples, table.device)
        self._launch(_proxy_gradients, channels, *tensors, quantiles, *numbers)
        return gradients.unbind()

    def _launch(self, kernel: Any, channels: int, *arguments: Any) -> None:
        sizes = channels, self.samples, self.phi[0], self.divide
        grid = (triton.cdiv(channels, _CHANNELS),)
        block = triton.next_power_of_2(self.samples)
        ours.launch_on(kernel, grid, *arguments, *sizes, block, _CHANNELS)


@lru_cache(maxsize=16)
def _quantiles_on(samples: int, device: torch.device) -> Tensor:
    return _quantiles(samples).to(device)


class ProxyActivationOnGPU(torch.autograd.Function):
    """A proxy-normalized activation, with derivatives by x, gamma, beta, proxy_scale and
    proxy_bias.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: LaunchPlan, proxy: Proxy, *parameters: Tensor | None
    ) -> Tensor:
        out = torch.empty_like(x)
        table = proxy.table(x, plan.sets, *parameters)
        _launch_map(out, x, table[0], table[1], plan, proxy.phi)
        ctx.save_for_backward(x, table, *parameters)
        ctx.plan = plan
        ctx.proxy = proxy
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, table, *parameters = ctx.saved_tensors
        phi = ctx.proxy.phi
        grad_x, sums = _map_backward(x, grads[0], table[0], None, None, 0.0, phi, ctx.plan)
        gradients = ctx.proxy.gradients(sums, None, table, *parameters)
        return grad_x, None, None, *needed(ctx, 3, gradients)


class Migration(NamedTuple):
    """Scale and shift of each sample and channel, (2, N * C), by which `migrated_group_norm` maps
    x, and what its derivative takes of each group: mean, k and t, (3, N, G).
    """

    plan: LaunchPlan
    # mean, var, gain and source_eps
    constants: tuple[Tensor | None, ...]
    table: Tensor
    kept: Tensor

    def gradients(
        self, x: Tensor, grad: Tensor, weight: Tensor | None, inner: _Inner | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of x, and sums over samples that are those of gamma and beta, (2, C);
        behind an inner map, (4, C) with those of its scale and shift.
        """
        samples, channels = x.shape[:2]
        mean, var, gain, source_eps = self.constants
        plan, groups = self.plan, self.kept.shape[2]
        rows = 2 if inner is None else 4
        table, scale, (kind, *numbers) = (None, None, IDENTITY) if inner is None else inner
        behind = table, scale, *numbers, *plan.numbers, channels, kind
        parts = ours.room(x, rows, plan.splits, plan.sets)
        ours.launch(_sums, plan, parts, x, grad, mean, *behind)
        slopes, sums = ours.room(x, 3, plan.sets), ours.room(x, rows, samples, channels)
        of_group = channels // groups
        size = x.numel() // (samples * channels)
        tensors = slopes, sums, self.kept, parts, mean, var, gain, weight, source_eps
        sizes = channels, of_group, plan.splits, size, rows == 4, triton.next_power_of_2(of_group)
        ours.launch_on(_migrated_slopes, (samples, groups), *tensors, *sizes)
        grad_x = torch.empty_like(x)
        ours.launch(_combine, plan, grad_x, x, grad, slopes, *behind)
        return grad_x, sums.sum(1)


def migrate(
    x: Tensor, num_groups: int, strength: Strength, *given: Tensor | None
) -> Migration | None:
    """Reduce (N, C, *) to what `migrated_group_norm` takes of it, None where kernels cannot. The
    tensors given are weight, bias, running mean and variance, and gain, each (C,) or None, and eps
    and source_eps, 0-dim.
    """
    plan = plan_for(x, per_sample=True)
    if plan is None:
        return None
    weight, bias, mean, var, gain, eps, source_eps = given
    samples, channels = x.shape[:2]
    parts = ours.room(x, 2, plan.splits, plan.sets)
    ours.launch(_moments, plan, parts, x, *plan.numbers)
    table, kept = ours.room(x, 2, plan.sets), ours.room(x, 3, samples, num_groups)
    of_group = channels // num_groups
    tensors = table, kept, parts, mean, var, gain, weight, bias
    factors = strength.source, eps, source_eps, strength.unit
    sizes = channels, of_group, plan.splits, *plan.shares, triton.next_power_of_2(of_group)
    ours.launch_on(_migrated_table, (samples, num_groups), *tensors, *factors, *sizes)
    return Migration(plan, (mean, var, gain, source_eps), table, kept)


class MigratedNormOnGPU(torch.autograd.Function):
    """`migrated_group_norm` by its migration, with derivatives by x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, migration: Migration
    ) -> Tensor:
        out = torch.empty_like(x)
        _launch_map(out, x, migration.table[0], migration.table[1], migration.plan)
        ctx.save_for_backward(x, weight)
        ctx.migration = migration
        # For a `ProxyNorm` that finds this node behind its input
        ctx.affine = weight, bias
        ctx.source = TensorWeakRef(x)
        ctx.version = x._version
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, sums = ctx.migration.gradients(x, _like(grads[0], x), weight)
        return grad_x, *needed(ctx, 1, sums.unbind()), None


def input_of(y: Tensor, *affine: Tensor | None) -> tuple[Tensor, Migration] | None:
    """Return what a norm made `y` of, with this gamma and beta, if no one has changed either since
    or looks at the gradient of `y`; else None.

    The graph of derivatives says so: its node is replaced when a tensor is written to.
    """
    node: Any = y.grad_fn
    if not isinstance(node, MigratedNormOnGPU._backward_cls) or y._version or y._backward_hooks:
        return None
    x = node.source()
    is_own = all(a is b for a, b in zip(node.affine, affine, strict=True))
    if x is None or x._version != node.version or not is_own or y.retains_grad:
        return None
    return x, node.migration


class ProxiedNormOnGPU(torch.autograd.Function):
    """`migrated_group_norm` and the proxy-normalized activation behind it at once, with derivatives
    by x, gamma, beta, proxy_scale and proxy_bias. Where the norm has written its output `y`, that is
    read, by a plan for its channels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: tuple[Tensor, LaunchPlan] | None,
        migration: Migration,
        proxy: Proxy,
        *parameters: Tensor | None,
    ) -> Tensor:
        channels = x.shape[1]
        out = torch.empty_like(x)
        table = proxy.table(x, channels, *parameters)
        scale, shift = table[:2].unbind()
        if y is None:
            plan = migration.plan
            inner = migration.table, channels
            _launch_map(out, x, scale, shift, plan, proxy.phi, inner=inner)
        else:
            output, plan = y
            _launch_map(out, output, scale, shift, plan, proxy.phi)
        ctx.save_for_backward(x, table, *parameters)
        ctx.migration = migration
        ctx.proxy = proxy
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, table, *parameters = ctx.saved_tensors
        inner = ctx.migration.table, table[0], ctx.proxy.phi
        grad_x, sums = ctx.migration.gradients(x, _like(grads[0], x), parameters[0], inner)
        gradients = ctx.proxy.gradients(sums[2:], sums, table, *parameters)
        return grad_x, None, None, None, *needed(ctx, 4, gradients)
