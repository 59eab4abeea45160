"""Proxy-normalized activations and migrated group normalization by channelwise.cpp, a call or two
each way.

They take contiguous tensors and channels_last ones as they lie, in float32 and bfloat16. Who calls
them has a path of torch operations for everything else; `layout_of` says which it is.
"""

import ctypes
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooks

from retrofit.layers import kernels
from retrofit.layers.kernels import cpp
from retrofit.layers.kernels.cpp import call, floats, room
from retrofit.layers.transforms import differentiable_once, needed

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CLAMP, _LEAKY, _HARDSWISH, _SILU, _GELU = range(5)


def known(activation: Any) -> tuple[int, float, float] | None:
    """Return the number of an activation in channelwise.cpp and two numbers of its own, or None
    where it has none, or someone's hook wants to see it.
    """
    kind = activation
    if isinstance(activation, nn.Module):
        kind = type(activation)
        if any(getattr(activation, name) or getattr(hooks, f"_global{name}") for name in _HOOKS):
            return None
    if kind in (nn.ReLU, functional.relu, torch.relu):
        return _CLAMP, 0.0, inf
    if kind is functional.relu6:
        return _CLAMP, 0.0, 6.0
    if kind in (nn.ReLU6, nn.Hardtanh):
        return _CLAMP, float(activation.min_val), float(activation.max_val)
    if kind is nn.LeakyReLU:
        return _LEAKY, float(activation.negative_slope), 0.0
    if kind in (nn.Hardswish, functional.hardswish):
        return _HARDSWISH, 0.0, 0.0
    if kind in (nn.SiLU, functional.silu):
        return _SILU, 0.0, 0.0
    if kind is functional.gelu or (kind is nn.GELU and activation.approximate == "none"):
        return _GELU, 0.0, 0.0
    return None


class ChannelLayout(ctypes.Structure):
    """How a tensor lies, in elements; see channelwise.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "rows",
            "length",
            "period",
            "channels",
            "blocks",
            "step",
            "threads",
            "half",
            "last",
        )
    )
    channel_dim: int

    def arrange(self, x: Tensor) -> Tensor:
        """Return `x` in the order of memory that this stands for: itself, or a copy."""
        if not self.last or self.channel_dim == -1:
            return x.contiguous()
        return x.movedim(1, -1).contiguous().movedim(-1, 1)

    def sums(self) -> Tensor:
        entries = self.blocks * self.channels if self.last else self.rows
        return torch.empty(2, entries, dtype=torch.float64, device="cpu")


def layout_of(
    x: Tensor, *given: Tensor | None, channel_dim: int = 1, per_sample: bool = False
) -> ChannelLayout | None:
    """Return how `x`, (N, C, *) or (N, *, C) by `channel_dim`, lies for tables of (C,), or (N, C)
    with `per_sample`; None where no kernel takes it, or the parameters and buffers `given` with it,
    (C,) each.
    """
    if not (x.dtype in cpp.TYPES and kernels.fits(x) and kernels.runs_cpp(x)):
        return None
    samples, channels = x.shape[0], x.shape[channel_dim]
    present = [g for g in given if g is not None]
    if any(
        type(g) not in (Tensor, nn.Parameter) or not g.is_cpu or g.shape != (channels,)
        for g in present
    ):
        return None
    length = x.numel() // (samples * channels)
    layout = ChannelLayout(
        threads=cpp.threads(x), channels=channels, half=x.dtype == torch.bfloat16
    )
    layout.channel_dim = channel_dim
    layout.last = (
        channel_dim == -1
        or length == 1
        or (not x.is_contiguous() and x.movedim(1, -1).is_contiguous())
    )
    if layout.last:
        layout.rows = x.numel() // channels
        layout.blocks, layout.step = (
            (samples, channels) if per_sample else (min(layout.threads, layout.rows), 0)
        )
    else:
        layout.rows, layout.length = samples * channels, length
        layout.period = layout.rows if per_sample else channels
    return layout


class ProxyActivation(torch.autograd.Function):
    """A proxy-normalized activation, see `ProxyNorm`, with derivatives by x and the first four of
    the tensors given: gamma, beta, proxy_scale, proxy_bias, restore_scale and restore_shift, each
    (C,) or None. The constants are what `known` says of the activation, eps, strength, whether the
    layer divides, and its number of samples.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: ChannelLayout, constants: Any, *given: Tensor | None
    ) -> Tensor:
        phi, eps, strength, divide, samples = constants
        tables, numbers = room(6, layout.channels), (*phi, float(eps), float(strength), divide)
        call(
            "proxy_tables",
            layout.channels,
            samples,
            *numbers,
            tables,
            _quantiles(samples),
            *map(floats, given),
        )
        arranged = layout.arrange(x)
        out = torch.empty_like(arranged)
        call("channels_forward", layout, *phi, out, arranged, tables[0], tables[1])
        gamma, _, proxy_scale, proxy_bias, *_ = given
        ctx.save_for_backward(x, gamma, proxy_scale, proxy_bias, tables)
        ctx.phi, ctx.layout = phi, layout
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, proxy_scale, proxy_bias, tables = ctx.saved_tensors
        layout, channels = ctx.layout, ctx.layout.channels
        arranged, grad = layout.arrange(x), layout.arrange(grads[0].to(x.dtype))
        grad_x, sums, gradients = torch.empty_like(arranged), layout.sums(), room(4, channels)
        call("channels_backward", layout, *ctx.phi, grad_x, sums, arranged, grad, tables[0])
        own = map(floats, (gamma, proxy_scale, proxy_bias))
        call("proxy_gradients", channels, sums.shape[1] // channels, gradients, sums, tables, *own)
        return grad_x, None, None, *needed(ctx, 3, gradients), None, None


class MigratedNorm(torch.autograd.Function):
    """`migrated_group_norm` of (N, C, *), with derivatives by x, weight and bias. `numbers` are the
    groups, strength, eps and source_eps; the tensors given are weight, bias, running mean and
    variance, and gain, each (C,) or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layout: ChannelLayout,
        numbers: tuple[int, float, float, float],
        *given: Tensor | None,
    ) -> Tensor:
        (samples, channels), (num_groups, *rest) = x.shape[:2], numbers
        weight, bias, mean, var, gain = given
        arranged = layout.arrange(x)
        out, kept = torch.empty_like(arranged), room(channels + 2 * samples * num_groups)
        tensors = out, arranged, kept, layout.sums(), room(2, samples * channels)
        call(
            "migrated_forward",
            layout,
            num_groups,
            *rest,
            *tensors,
            *map(floats, (mean, var, gain, weight, bias)),
        )
        ctx.save_for_backward(x, weight, mean, gain, kept)
        ctx.layout, ctx.num_groups, ctx.strength = layout, num_groups, rest[0]
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, gain, kept = ctx.saved_tensors
        layout, (samples, channels) = ctx.layout, x.shape[:2]
        arranged, grad = layout.arrange(x), layout.arrange(grads[0].to(x.dtype))
        grad_x = torch.empty_like(arranged) if ctx.needs_input_grad[0] else None
        gradients = room(2, channels)
        tensors = (
            grad_x,
            gradients,
            arranged,
            grad,
            kept,
            layout.sums(),
            room(3, samples * channels),
        )
        call(
            "migrated_backward",
            layout,
            ctx.num_groups,
            ctx.strength,
            *tensors,
            *map(floats, (mean, gain, weight)),
        )
        return grad_x, None, None, *needed(ctx, 3, gradients), None, None, None


@lru_cache(maxsize=16)
def _quantiles(samples: int) -> Tensor:
    """Return values of the standard normal, uniform in probability; nobody writes to them."""
    steps = torch.arange(samples, dtype=torch.float64, device="cpu")
    return ((2**0.5) * torch.erfinv((2 * steps + 1) / samples - 1)).to(torch.float32)
