"""Proxy-normalized activations and migrated group normalization by channelwise.cpp, a call or two
each way.

They take contiguous tensors and channels_last ones as they lie, in float32 and bfloat16. Callers
have a path of torch operations for everything else; `layout_of` says which of the two it is.
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
from retrofit.layers.function_transforms import differentiable_once, needed
from retrofit.layers.kernels import cpp
from retrofit.layers.kernels.cpp import call, floats, room

Activation = tuple[int, float, float]
"""The number of an activation in channelwise.cpp, and two numbers that it takes."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CLAMP, _LEAKY, _HARDSWISH, _SILU, _GELU = range(5)
_FIXED: dict[Any, Activation] = {
    **dict.fromkeys((nn.ReLU, functional.relu, torch.relu), (_CLAMP, 0.0, inf)),
    functional.relu6: (_CLAMP, 0.0, 6.0),
    **dict.fromkeys((nn.Hardswish, functional.hardswish), (_HARDSWISH, 0.0, 0.0)),
    **dict.fromkeys((nn.SiLU, functional.silu), (_SILU, 0.0, 0.0)),
    functional.gelu: (_GELU, 0.0, 0.0),
}


def known(activation: Any) -> Activation | None:
    """Return what channelwise.cpp calls an activation, a module or a function; None where it has no
    number, or someone's hook wants to see it.
    """
    if isinstance(activation, nn.Module) and is_watched(activation):
        return None
    kind = type(activation)
    if kind in (nn.ReLU6, nn.Hardtanh):
        low = float(activation.min_val)
        high = float(activation.max_val)
        return _CLAMP, low, high
    if kind is nn.LeakyReLU:
        return _LEAKY, float(activation.negative_slope), 0.0
    if kind is nn.GELU:
        if activation.approximate != "none":
            return None
        return _GELU, 0.0, 0.0
    return _FIXED.get(activation, _FIXED.get(kind))


def is_watched(module: nn.Module) -> bool:
    """Whether someone's hook wants to see what a module takes or gives."""
    return any(getattr(module, name) or getattr(hooks, f"_global{name}") for name in _HOOKS)


class ChannelLayout(ctypes.Structure):
    """How a tensor lies, in elements; see channelwise.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("rows", "length", "period", "channels", "blocks"),
            *("step", "threads", "half", "last"),
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
    x: Tensor, *tables: Tensor | None, channel_dim: int = 1, per_sample: bool = False
) -> ChannelLayout | None:
    """Return how `x` lies in memory, for kernels that read tables of numbers for its channels.

    Args:
        x: The input, (N, C, *), or (N, *, C) with `channel_dim` -1.
        *tables: Parameters and buffers that the kernels read, (C,) each.
        channel_dim: The dimension of the channels, 1 or -1.
        per_sample: Whether the kernels' own tables are (N, C), not (C,).

    Returns:
        The layout; None where no kernel takes these tensors.
    """
    if x.dtype not in cpp.TYPES:
        return None
    if not (kernels.fits(x) and kernels.runs_cpp(x)):
        return None
    samples = x.shape[0]
    channels = x.shape[channel_dim]
    for table in tables:
        if table is not None and not _is_readable(table, channels):
            return None
    layout = ChannelLayout(
        threads=cpp.threads(x), channels=channels, half=x.dtype == torch.bfloat16
    )
    layout.channel_dim = channel_dim
    layout.last = _has_channels_last(x, channel_dim)
    if not layout.last:
        layout.rows = samples * channels
        layout.length = x.numel() // layout.rows
        layout.period = layout.rows if per_sample else channels
        return layout
    layout.rows = x.numel() // channels
    if per_sample:
        layout.blocks = samples
        layout.step = channels
    else:
        layout.blocks = min(layout.threads, layout.rows)
    return layout


def _is_readable(table: Tensor, channels: int) -> bool:
    is_plain = type(table) in (Tensor, nn.Parameter)
    return is_plain and table.is_cpu and table.shape == (channels,)


def _has_channels_last(x: Tensor, channel_dim: int) -> bool:
    if channel_dim == -1 or x.numel() == x.shape[0] * x.shape[1]:
        return True
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


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
        tables = room(6, layout.channels)
        sizes = layout.channels, samples
        numbers = *phi, float(eps), float(strength), divide
        tensors = tables, quantiles(samples), *map(floats, given)
        call("proxy_tables", *sizes, *numbers, *tensors)
        arranged = layout.arrange(x)
        out = torch.empty_like(arranged)
        call("channels_forward", layout, *phi, out, arranged, tables[0], tables[1])
        gamma, _, proxy_scale, proxy_bias, *_ = given
        ctx.save_for_backward(x, gamma, proxy_scale, proxy_bias, tables)
        ctx.phi = phi
        ctx.layout = layout
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, proxy_scale, proxy_bias, tables = ctx.saved_tensors
        layout = ctx.layout
        arranged = layout.arrange(x)
        grad = layout.arrange(grads[0].to(x.dtype))
        grad_x = torch.empty_like(arranged)
        sums = layout.sums()
        call("channels_backward", layout, *ctx.phi, grad_x, sums, arranged, grad, tables[0])
        gradients = room(4, layout.channels)
        sizes = layout.channels, sums.shape[1] // layout.channels
        parameters = map(floats, (gamma, proxy_scale, proxy_bias))
        call("proxy_gradients", *sizes, gradients, sums, tables, *parameters)
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
        samples, channels = x.shape[:2]
        num_groups, strength, *_ = numbers
        weight, bias, mean, var, gain = given
        arranged = layout.arrange(x)
        out = torch.empty_like(arranged)
        moments = room(channels + 2 * samples * num_groups)
        tensors = out, arranged, moments, layout.sums(), room(2, samples * channels)
        parameters = map(floats, (mean, var, gain, weight, bias))
        call("migrated_forward", layout, *numbers, *tensors, *parameters)
        ctx.save_for_backward(x, weight, mean, gain, moments)
        ctx.layout = layout
        ctx.num_groups = num_groups
        ctx.strength = strength
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, gain, moments = ctx.saved_tensors
        layout = ctx.layout
        samples, channels = x.shape[:2]
        arranged = layout.arrange(x)
        grad = layout.arrange(grads[0].to(x.dtype))
        grad_x = torch.empty_like(arranged) if ctx.needs_input_grad[0] else None
        gradients = room(2, channels)
        scratch = layout.sums(), room(3, samples * channels)
        tensors = grad_x, gradients, arranged, grad, moments, *scratch
        parameters = map(floats, (mean, gain, weight))
        call("migrated_backward", layout, ctx.num_groups, ctx.strength, *tensors, *parameters)
        return grad_x, None, None, *needed(ctx, 3, gradients), None, None, None


@lru_cache(maxsize=16)
def quantiles(samples: int) -> Tensor:
    """Return values of the standard normal, uniform in probability; nobody writes to them."""
    steps = torch.arange(samples, dtype=torch.float64, device="cpu")
    return ((2**0.5) * torch.erfinv((2 * steps + 1) / samples - 1)).to(torch.float32)
