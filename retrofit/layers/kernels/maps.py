"""Maps by a scale and a shift as Triton kernels: constant batch statistics, migrated group
normalization and proxy-normalized activations on a GPU.

All three are phi((x - mean) / std) * scale + shift with numbers for each channel, or for each
sample and channel; phi is the identity but behind a norm. Where these numbers depend on the input
or on samples of a proxy, small kernels compute them, and their derivatives.
"""

# ruff: noqa: N803, RET505, RUF005
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import TensorWeakRef

from retrofit.layers.kernels import triton as ours
from retrofit.layers.kernels.channelwise import Activation, _quantiles
from retrofit.layers.kernels.eager import Strength
from retrofit.layers.kernels.layout import is_dense, layout_of
from retrofit.layers.kernels.plan import PROGRAMS, LaunchPlan, plan_of
from retrofit.layers.kernels.triton import (
    _collected,
    _Entries,
    _exp2,
    _keep,
    _leave,
    _leave_affine,
    _load,
    _mean_and_squares,
    _merged,
    _number,
    _of_set,
    _over,
    _place,
    _polynomial,
    _reciprocal,
    _rows,
    _Shared,
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
_NUMBERS = ours._NUMBERS


@triton.jit
def _phi(x, first, second, KIND):
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
        slope = tl.zeros_like(x) + 1
    return y, slope


@triton.jit
def _argument(Mean, Var, Inner, at, eps):
    """Return what phi takes, (x - centre) * factor + offset, as these three numbers of each set;
    nothing where it takes x.
    """
    if Inner is not None:
        factor, offset = _rows(Inner, 0, 2, at)
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
def _mapped(tile, given, sums, TILE):
    Out, X, argument, activation, scale, shift = given
    y, _ = _phi_of(_load(X, tile), argument, activation)
    _store(Out, tile, y * scale + shift)
    return sums


@triton.jit(do_not_specialize=_NUMBERS)
def _map(
    Out, X, Scale, Shift, Mean, Var, Inner, eps, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write phi * scale + shift; see `_argument`. Scale and shift are numbers of each set, behind an
    inner map of each channel.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    if Inner is None:
        scale = _number(Scale, at.sets, at.valid, 1.0)
        shift = _number(Shift, at.sets, at.valid, 0.0)
    else:
        scale, shift = _of_set(Scale, at, 1.0, TILE), _of_set(Shift, at, 0.0, TILE)
    argument = _argument(Mean, Var, Inner, at, eps)
    _over(at, _mapped, (Out, X, argument, (KIND, first, second), scale, shift), (), TILE)


@triton.jit
def _pulled_back(tile, given, sums, TILE):
    GradX, X, Grad, argument, activation, factors = given
    x, grad = _load(X, tile), _load(Grad, tile)
    y, slope = _phi_of(x, argument, activation)
    g = grad * slope * factors[0]
    if len(factors) == 3:
        g += x * factors[1] + factors[2]
    _store(GradX, tile, g)
    if len(sums) == 2:
        sums = sums[0] + grad * y, sums[1] + grad
    return sums


@triton.jit(do_not_specialize=_NUMBERS)
def _map_back(
    GradX, X, Grad, Scale, Sums, Mean, Var, eps, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, entries,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, and leave sums of grad * phi and of grad."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    argument = _argument(Mean, Var, None, at, eps)
    factor = _number(Scale, at.sets, at.valid, 1.0)
    if len(argument) == 3:
        factor *= argument[1]
    given = GradX, X, Grad, argument, (KIND, first, second), (factor,)
    zero = _zeros(TILE)
    _leave_affine(Sums, entries, at, _over(at, _pulled_back, given, (zero, zero), TILE), TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _combine(
    GradX, X, Grad, Table, Inner, Scale, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write grad * a + x * b + c, by three rows of a table; grad is pulled back through phi and its
    scale where there is an inner map.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    a, b, c = _rows(Table, 0, 3, at)
    a *= _of_set(Scale, at, 1.0, TILE)
    argument = _argument(None, None, Inner, at, 0.0)
    _over(at, _pulled_back, (GradX, X, Grad, argument, (KIND, first, second), (a, b, c)), (), TILE)


@triton.jit(do_not_specialize=_NUMBERS)
def _moments(
    Parts, X,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Leave mean and sum of squared deviations of a program's share of each set."""
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    mean, squares, _, _ = _mean_and_squares(X, at, TILE)
    _leave(Parts, at, (mean, squares))


@triton.jit
def _products(tile, given, sums, TILE):
    X, Grad, mean, argument, activation = given
    x, grad = _load(X, tile), _load(Grad, tile)
    y, slope = _phi_of(x, argument, activation)
    g = grad * slope
    products = sums[0] + g, sums[1] + g * (x - mean)
    if len(sums) == 4:
        products = products + (sums[2] + grad * y, sums[3] + grad)
    return products


@triton.jit(do_not_specialize=_NUMBERS)
def _sums(
    Parts, X, Grad, Mean, Inner, Scale, first, second,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Leave sums of grad and of grad * (x - mean) over a program's share of each set. With an inner
    map, that grad is pulled back as in `_combine`; then follow sums of grad * phi and of grad.
    """
    at = _place(outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE)
    mean, scale = _of_set(Mean, at, 0.0, TILE), _of_set(Scale, at, 1.0, TILE)
    argument = _argument(None, None, Inner, at, 0.0)
    zero = _zeros(TILE)
    zeros = (zero, zero) if Inner is None else (zero, zero, zero, zero)
    sums = _over(at, _products, (X, Grad, mean, argument, (KIND, first, second)), zeros, TILE)
    sums = _totals(sums, TILE)
    _leave(Parts, at, (sums[0] * scale, sums[1] * scale) + sums[2:])


# Migrated group normalization: what `_GroupAffine` computes, a program a sample and group


@triton.jit
def _group(channels, of_group, splits, share, runs, width, BLOCK):
    """Return the channels of a program's group, their numbers in tables, and the group's."""
    within = tl.arange(0, BLOCK)[None, :]
    channel = tl.program_id(1) * of_group + within
    place = tl.program_id(0) * channels + channel
    total = tl.num_programs(0) * channels
    at = _Shared(place, within < of_group, total, splits, share, runs, width)
    group = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) + within * 0
    groups = tl.num_programs(0) * tl.num_programs(1)
    return channel, at, _Entries(group, at.valid, groups)


@triton.jit
def _constants(Mean, Var, Gain, Weight, SourceEps, channel, at):
    """Return mean, 1 / std, gain and gamma."""
    var = _number(Var, channel, at.valid, 1.0)
    rstd = 1 / tl.sqrt(var + tl.load(SourceEps).to(tl.float32))
    mean, gain = _number(Mean, channel, at.valid, 0.0), _number(Gain, channel, at.valid, 1.0)
    return mean, rstd, gain, _number(Weight, channel, at.valid, 1.0)


@triton.jit
def _of_group(at, numbers):
    """Add up numbers of a group's channels."""
    return tl.sum(tl.where(at.valid, numbers, 0.0), 1, keep_dims=True)


@triton.jit(do_not_specialize=["channels", "of_group", "splits", "runs", "share", "width"])
def _migrated_table(
    Table, Kept, Parts, Mean, Var, Gain, Weight, Bias, Code, Eps, SourceEps, unit,
    channels, of_group, splits, runs, share, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the moments of a group's channels into scale and shift of x; keep the group's mean, k
    and t.
    """
    channel, at, group = _group(channels, of_group, splits, share, runs, width, BLOCK)
    row_mean, squares = _merged(Parts, at, 1)
    row_var = squares / (runs * width).to(tl.float32)
    mean, rstd, gain, gamma = _constants(Mean, Var, Gain, Weight, SourceEps, channel, at)
    scale = rstd * gain
    centre = (row_mean - mean) * scale
    m = _of_group(at, centre) / of_group
    apart = centre - m
    v = _of_group(at, row_var * scale * scale + apart * apart) / of_group
    t = tl.load(Code).to(tl.float32) * unit
    # At t = 0 the moments do not count, not even where they overflow
    m, v = tl.where(t > 0, m, 0.0), tl.where(t > 0, v, 1.0)
    k = 1 / tl.sqrt(1 - t + t * (v + tl.load(Eps).to(tl.float32)))
    shift = _number(Bias, channel, at.valid, 0.0) - k * gamma * (mean * rstd + t * m / gain)
    _keep(Table, 0, at, (k * gamma * rstd, shift))
    _keep(Kept, 0, group, (m, k, t))


@triton.jit(do_not_specialize=["channels", "of_group", "splits", "size"])
def _migrated_slopes(
    Table, Sums, Kept, Parts, Mean, Var, Gain, Weight, SourceEps,
    channels, of_group, splits, size, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the rows of `_combine`, and the sums of grad * x^ and grad; see `_GroupAffine`.
    Behind them, those for a proxy.
    """
    channel, at, group = _group(channels, of_group, splits, 1, 1, size, BLOCK)
    sums = _collected(Parts, ROWS, at, 1)
    sum_g = sums[0]
    m, k, t = _rows(Kept, 0, 3, group)
    mean, rstd, gain, gamma = _constants(Mean, Var, Gain, Weight, SourceEps, channel, at)
    m = m / gain
    sum_gx = (sums[1] * rstd - t * m * sum_g) * k
    total = (of_group * size).to(tl.float32)
    mean_gx = _of_group(at, sum_gx * gamma) / total
    mean_g = _of_group(at, sum_g * gamma / gain) / total
    slope = -t * (k * gain) * (k * gain) * mean_gx
    shift = -t * k * gain * mean_g - slope * (mean * rstd + m)
    _keep(Table, 0, at, (k * gamma * rstd, slope * rstd * rstd, shift * rstd))
    _keep(Sums, 0, at, (sum_gx, sum_g) + sums[2:])


# The proxy of a proxy-normalized activation: what `ProxyNorm.constants` computes


@triton.jit
def _proxy(
    Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channels, samples,
    BLOCK, WIDTH,
):  # fmt: skip
    """Return a program's channels, samples of the proxy, one a row, which there are, and what
    scaled them.
    """
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = _Entries(channel, channel < channels, channels)
    gamma, beta = _number(Gamma, channel, at.valid, 1.0), _number(Beta, channel, at.valid, 0.0)
    wide = 1 + _number(ProxyScale, channel, at.valid, 0.0)
    offset = _number(ProxyBias, channel, at.valid, 0.0)
    sample = tl.arange(0, BLOCK)[:, None]
    quantile = _number(Quantiles, sample, sample < samples, 0.0)
    y = quantile * (wide * gamma) + (offset * gamma + beta)
    return at, y, (sample < samples) & at.valid, quantile, gamma, wide, offset


@triton.jit
def _scale(RestoreScale, at, std, DIVIDE):
    """Return the scale of phi at strength 1."""
    if DIVIDE:
        return _number(RestoreScale, at.sets, at.valid, 1.0) / std
    else:
        return std * 0 + 1


@triton.jit(do_not_specialize=["channels", "samples"])
def _proxy_table(
    Table, Gamma, Beta, ProxyScale, ProxyBias, RestoreScale, RestoreShift, Quantiles, Code, unit,
    eps, first, second, channels, samples,
    KIND: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the scale and shift of phi at strength t, and the proxy's mean and std, and t."""
    at, y, drawn, _, _, _, _ = _proxy(
        Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channels, samples, BLOCK, WIDTH
    )
    phi, _ = _phi(y, first, second, KIND)
    mean = tl.sum(tl.where(drawn, phi, 0.0), 0, keep_dims=True) / samples
    apart = tl.where(drawn, phi - mean, 0.0)
    std = tl.sqrt(tl.sum(apart * apart, 0, keep_dims=True) / samples + eps)
    scale = _scale(RestoreScale, at, std, DIVIDE)
    shift = _number(RestoreShift, at.sets, at.valid, 0.0) - scale * mean
    t = tl.load(Code).to(tl.float32) * unit
    _keep(Table, 0, at, (1 + t * (scale - 1), t * shift, mean, std, t))


@triton.jit(do_not_specialize=["channels", "samples"])
def _proxy_gradients(
    Gradients, Sums, More, Table, Gamma, Beta, ProxyScale, ProxyBias, RestoreScale, Quantiles,
    first, second, channels, samples,
    KIND: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gamma, beta, proxy_scale and proxy_bias, by those of scale and shift.
    Gamma and beta have `More`, by the norm itself.
    """
    at, y, drawn, quantile, gamma, wide, offset = _proxy(
        Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channels, samples, BLOCK, WIDTH
    )
    phi, slope = _phi(y, first, second, KIND)
    mean, std, t = _rows(Table, 2, 3, at)
    std = tl.where(at.valid, std, 1.0)
    of_scale, of_shift = _rows(Sums, 0, 2, at)
    scale = t * _scale(RestoreScale, at, std, DIVIDE)
    of_phi = -of_shift * scale
    if DIVIDE:
        of_phi -= (of_scale - of_shift * mean) * scale / (std * std) * (phi - mean)
    of_y = tl.where(drawn, of_phi * slope / samples, 0.0)
    by_quantile = tl.sum(of_y * quantile, 0, keep_dims=True)
    plain = tl.sum(of_y, 0, keep_dims=True)
    to_gamma, to_beta = by_quantile * wide + plain * offset, plain
    if More is not None:
        more = _rows(More, 0, 2, at)
        to_gamma, to_beta = to_gamma + more[0], to_beta + more[1]
    _keep(Gradients, 0, at, (to_gamma, to_beta, by_quantile * gamma, plain * gamma))


# From Python


@lru_cache(maxsize=1024)
def _plan(
    size: tuple[int, ...], stride: tuple[int, ...], channel_dim: int, per_sample: bool, busy: int
) -> LaunchPlan | None:
    """Return the plan for sets of a channel, or of a sample and channel."""
    if not is_dense(size, stride):
        return None
    channel = channel_dim % len(size)
    apart = [0, channel] if per_sample else [channel]
    dims = tuple(d for d in range(len(size)) if d not in apart)
    channels = torch.Size(n if d == channel else 1 for d, n in enumerate(size))
    layout = layout_of(size, stride, dims, channels)
    plan = plan_of(layout.shape, layout.dims, layout.affine, busy)
    in_order = [d for d in layout.order if d in apart] == apart
    return plan if in_order and plan is not None and _is_per_set(plan) else None


def _is_per_set(plan: LaunchPlan) -> bool:
    """Whether gamma is a number of each set, whose lanes are no other's."""
    return plan.tile.along == "sets" and plan.tile.merge == 1


def plan_for(x: Tensor, channel_dim: int = 1, per_sample: bool = False) -> LaunchPlan | None:
    """Return how kernels go about `x`, (N, C, *) or (N, *, C); None where they cannot."""
    # Programs that only write need no merging of what they share
    busy = ours.processors(x.device) * (1 if per_sample else PROGRAMS)
    return _plan(x.shape, x.stride(), channel_dim, per_sample, busy)


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """Return a gradient that lies in memory as `x` does."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


def _launch_map(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    plan: LaunchPlan,
    phi: Activation = IDENTITY,
    statistics: tuple[Tensor | None, Tensor | None] = (None, None),
    inner: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return phi * scale + shift, by a number of each for a set, or, behind an inner map, for a
    channel.
    """
    out = torch.empty_like(x)
    kind, *numbers = phi
    tensors = out, x, scale, shift, *statistics, inner
    ours.launch(_map, plan, *tensors, eps, *numbers, *plan.numbers, kind)
    return out


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
        ctx.save_for_backward(x, mean, var, weight, bias)
        ctx.eps = eps
        ctx.plan = plan
        return _launch_map(x, weight, bias, plan, statistics=(mean, var), eps=eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight, bias = ctx.saved_tensors
        gradients: Any
        if torch.is_grad_enabled():
            gradients = _differentiably(x, grads[0], mean, var, weight, bias, ctx.eps)
        else:
            tensors = x, grads[0], weight, mean, var
            grad_x, sums = _map_backward(*tensors, ctx.eps, IDENTITY, ctx.plan)
            gradients = grad_x, *sums
        return gradients[0], None, None, *needed(ctx, 3, gradients[1:]), None, None


def _differentiably(
    x: Tensor,
    grad: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> list[Tensor | None]:
    """Return the gradients of x, weight and bias for a second derivative, by torch's operation."""
    exact = torch.promote_types(x.dtype, torch.float32)
    statistics = mean.to(exact), var.to(exact)
    gamma, beta = (None if value is None else value.to(exact) for value in (weight, bias))
    out = functional.batch_norm(x, *statistics, gamma, beta, eps=eps)
    trained = [value is not None and value.requires_grad for value in (x, weight, bias)]
    leaves: Any = list(compress((x, weight, bias), trained))
    gradients = iter(torch.autograd.grad(out, leaves, grad.to(out.dtype), create_graph=True))
    return [next(gradients) if each else None for each in trained]


def _map_backward(
    x: Tensor, grad: Tensor, scale: Any, mean: Any, var: Any, eps: float, phi: Any, plan: LaunchPlan
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and those of scale and shift, (2, C)."""
    grad_x = torch.empty_like(x)
    sums = ours.room(x, 2, *plan.gradients)
    kind, *numbers = phi
    tensors = grad_x, x, _like(grad, x), scale, sums, mean, var
    arguments = *tensors, eps, *numbers, *plan.numbers, sums.numel() // 2
    ours.launch(_map_back, plan, *arguments, kind)
    return grad_x, sums.sum((1, 2))


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
    channel_dim: int

    def table(self, like: Tensor, channels: int, *parameters: Tensor | None) -> Tensor:
        """Return scale and shift of phi, and what their derivatives take, by gamma, beta,
        proxy_scale and proxy_bias.
        """
        table = ours.room(like, 5, channels)
        tensors = table, *parameters, self.restore_scale, self.restore_shift
        self._launch(_proxy_table, table, tensors, (*self.strength, self.eps))
        return table

    def gradients(
        self, sums: Tensor, more: Tensor | None, table: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the four parameters by `sums`, those of scale and shift; gamma
        and beta have `more`.
        """
        gradients = ours.room(table, 4, table.shape[1])
        tensors = gradients, sums, more, table, *parameters, self.restore_scale
        self._launch(_proxy_gradients, table, tensors, ())
        return gradients.unbind()

    def _launch(self, kernel: Any, table: Tensor, tensors: Any, numbers: Any) -> None:
        kind, *of_phi = self.phi
        channels = table.shape[1]
        sizes = channels, self.samples, kind, self.divide, triton.next_power_of_2(self.samples)
        quantiles = _quantiles_on(self.samples, table.device)
        grid = (triton.cdiv(channels, _CHANNELS),)
        ours.launch_on(kernel, grid, *tensors, quantiles, *numbers, *of_phi, *sizes, _CHANNELS)


@lru_cache(maxsize=16)
def _quantiles_on(samples: int, device: torch.device) -> Tensor:
    return _quantiles(samples).to(device)


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
        plan = self.plan
        rows = 2 if inner is None else 4
        table, scale, (kind, *numbers) = inner or (None, None, IDENTITY)
        behind = table, scale, *numbers, *plan.numbers, kind
        grad = _like(grad, x)
        parts = ours.room(x, rows, plan.splits, plan.sets)
        ours.launch(_sums, plan, parts, x, grad, mean, *behind)
        slopes = ours.room(x, 3, plan.sets)
        sums = ours.room(x, rows, samples, channels)
        tensors = slopes, sums, self.kept, parts, mean, var, gain, weight, source_eps
        size = x.numel() // (samples * channels)
        _launch_of_groups(_migrated_slopes, x, self.kept, tensors, (plan.splits, size, rows))
        grad_x = torch.empty_like(x)
        ours.launch(_combine, plan, grad_x, x, grad, slopes, *behind)
        return grad_x, sums.sum(1)


def _launch_of_groups(kernel: Any, x: Tensor, kept: Tensor, tensors: Any, sizes: Any) -> None:
    """Launch a program for each sample and group."""
    _, samples, groups = kept.shape
    channels = x.shape[1]
    of_group = channels // groups
    block = triton.next_power_of_2(of_group)
    ours.launch_on(kernel, (samples, groups), *tensors, channels, of_group, *sizes, block)


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
    parts = ours.room(x, 2, plan.splits, plan.sets)
    ours.launch(_moments, plan, parts, x, *plan.numbers)
    table = ours.room(x, 2, plan.sets)
    kept = ours.room(x, 3, len(x), num_groups)
    tensors = table, kept, parts, mean, var, gain, weight, bias
    factors = strength.source, eps, source_eps, strength.unit
    sizes = plan.splits, *plan.shares
    _launch_of_groups(_migrated_table, x, kept, (*tensors, *factors), sizes)
    return Migration(plan, (mean, var, gain, source_eps), table, kept)


class MigratedNormOnGPU(torch.autograd.Function):
    """`migrated_group_norm` by its migration, with derivatives by x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, migration: Migration
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.migration = migration
        # For a `ProxyNorm` that finds this node behind its input
        ctx.affine = weight, bias
        ctx.source = TensorWeakRef(x)
        ctx.version = x._version
        scale, shift = migration.table
        return _launch_map(x, scale, shift, migration.plan)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, sums = ctx.migration.gradients(x, grads[0], weight)
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


class ProxyActivationOnGPU(torch.autograd.Function):
    """A proxy-normalized activation, with derivatives by x, gamma, beta, proxy_scale and
    proxy_bias.

    With a migration, `x` is the input of the `migrated_group_norm` before the activation, whose
    output is `y` if the norm has written it. The plan is of what is read: `y`, else `x`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        plan: LaunchPlan,
        migration: Migration | None,
        proxy: Proxy,
        *parameters: Tensor | None,
    ) -> Tensor:
        table = proxy.table(x, x.shape[proxy.channel_dim], *parameters)
        ctx.save_for_backward(x, table, *parameters)
        ctx.plan = plan
        ctx.migration = migration
        ctx.proxy = proxy
        inner = migration.table if migration is not None and y is None else None
        source = x if y is None else y
        return _launch_map(source, table[0], table[1], plan, proxy.phi, inner=inner)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, table, *parameters = ctx.saved_tensors
        phi = ctx.proxy.phi
        if ctx.migration is None:
            of_norm = None
            grad_x, sums = _map_backward(x, grads[0], table[0], None, None, 0.0, phi, ctx.plan)
        else:
            inner = ctx.migration.table, table[0], phi
            grad_x, of_norm = ctx.migration.gradients(x, grads[0], parameters[0], inner)
            sums = of_norm[2:]
        gradients = ctx.proxy.gradients(sums, of_norm, table, *parameters)
        return grad_x, None, None, None, None, *needed(ctx, 5, gradients)
