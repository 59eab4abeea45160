"""Proxy-normalized activations and migrated group normalization by channelwise.cpp, a call or two each way.

They take contiguous tensors and channels_last ones as they lie, in float32 and bfloat16. Who calls them has a path of
torch operations for everything else; `layout_of` says which it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooks

from retrofit.layers import kernels
from retrofit.layers.kernels import cpp
from retrofit.layers.transforms import differentiable_once


class ActivationCode(NamedTuple):
    """An activation that channelwise.cpp has: its number there, and two numbers of its own."""

    kind: int
    a: float = 0.0
    b: float = 0.0


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CLAMP, _LEAKY, _HARDSWISH, _SILU, _GELU = range(5)
_RELU = ActivationCode(_CLAMP, 0.0, float("inf"))
_RELU6 = ActivationCode(_CLAMP, 0.0, 6.0)
_FUNCTIONS: dict[Any, ActivationCode] = {
    functional.relu: _RELU,
    torch.relu: _RELU,
    functional.relu6: _RELU6,
    functional.hardswish: ActivationCode(_HARDSWISH),
    functional.silu: ActivationCode(_SILU),
    functional.gelu: ActivationCode(_GELU),
}
_MODULES: dict[type, Callable[[Any], ActivationCode | None]] = {
    nn.ReLU: lambda act: _RELU,
    nn.ReLU6: lambda act: _RELU6,
    nn.Hardtanh: lambda act: ActivationCode(_CLAMP, act.min_val, act.max_val),
    nn.LeakyReLU: lambda act: ActivationCode(_LEAKY, act.negative_slope),
    nn.Hardswish: lambda act: ActivationCode(_HARDSWISH),
    nn.SiLU: lambda act: ActivationCode(_SILU),
    nn.GELU: lambda act: ActivationCode(_GELU) if act.approximate == "none" else None,
}


def known(activation: Callable[[Tensor], Tensor]) -> ActivationCode | None:
    """Return what channelwise.cpp calls an activation, or None where it has none, or someone's hook wants to see it."""
    if not isinstance(activation, nn.Module):
        return _FUNCTIONS.get(activation)
    if any(getattr(activation, name) or getattr(hooks, f"_global{name}") for name in _HOOKS):
        return None
    find = _MODULES.get(type(activation))
    return None if find is None else find(activation)


class ChannelLayout(ctypes.Structure):
    """How a tensor lies, in elements; see channelwise.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "period", "channels", "blocks", "step")),
        ("threads", ctypes.c_int),
    )
    channel_dim: int
    last: bool

    def arrange(self, x: Tensor) -> Tensor:
        """Return `x` in the order of memory that this stands for: itself, or a copy."""
        if not self.last or self.channel_dim == -1:
            return x.contiguous()
        return x.movedim(1, -1).contiguous().movedim(-1, 1)

    def sums(self) -> Tensor:
        """Return room for two sums, an entry each."""
        entries = self.blocks * self.channels if self.last else self.rows
        return torch.empty(2, entries, dtype=torch.float64, device="cpu")


def layout_of(x: Tensor, *given: Tensor | None, channel_dim: int = 1, per_sample: bool = False) -> ChannelLayout | None:
    """Return how `x` lies for tables of (C,), or (N, C) with `per_sample`; None where no kernel takes it.

    Args:
        x: (N, C, *), or (N, *, C) by `channel_dim`.
        given: The parameters and buffers of (C,) that go with it.
        channel_dim: 1 or -1.
        per_sample: Whether samples have tables of their own.
    """
    if not (x.is_cpu and x.dtype in cpp.TYPES and kernels.fits(x) and kernels.chosen(x) is cpp):
        return None
    if any(g is not None and (type(g) not in (Tensor, nn.Parameter) or not g.is_cpu) for g in given):
        return None
    samples, channels = x.shape[0], x.shape[channel_dim]
    length = x.numel() // (samples * channels)
    found = ChannelLayout(threads=cpp.threads(x), channels=channels)
    found.channel_dim = channel_dim
    found.last = channel_dim == -1 or length == 1 or (not x.is_contiguous() and x.movedim(1, -1).is_contiguous())
    if found.last:
        found.rows = x.numel() // channels
        found.blocks, found.step = (samples, channels) if per_sample else (min(found.threads, found.rows), 0)
    else:
        found.rows, found.length = samples * channels, length
        found.period = found.rows if per_sample else channels
    return found


class ProxyConstants(NamedTuple):
    """What a proxy-normalized activation is made of beside its parameters."""

    phi: ActivationCode
    eps: float
    strength: float
    divide: bool
    samples: int


class ProxyActivation(torch.autograd.Function):
    """A proxy-normalized activation, see `ProxyNorm`; its derivatives by x, gamma, beta and the proxy's parameters."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        proxy_scale: Tensor | None,
        proxy_bias: Tensor | None,
        restore_scale: Tensor | None,
        restore_shift: Tensor | None,
        constants: ProxyConstants,
        layout: ChannelLayout,
    ) -> Tensor:
        channels = layout.channels
        tables = _room(6, channels)
        options = ctypes.c_float(constants.eps), ctypes.c_float(constants.strength), int(constants.divide)
        given = gamma, beta, proxy_scale, proxy_bias, restore_scale, restore_shift
        tensors = tables, quantiles(constants.samples), *(_table(g, channels) for g in given)
        sizes = ctypes.c_int64(channels), ctypes.c_int64(constants.samples)
        _run("proxy_tables", *sizes, *_arguments(constants.phi), *options, *tensors)
        arranged = layout.arrange(x)
        out = torch.empty_like(arranged)
        scale, shift = tables[0], tables[1]
        _call("channels_forward", x, layout, *_arguments(constants.phi), out, arranged, scale, shift)
        ctx.save_for_backward(x, gamma, proxy_scale, proxy_bias, tables)
        ctx.has_beta = beta is not None
        ctx.phi, ctx.layout = constants.phi, layout
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, gamma, proxy_scale, proxy_bias, tables = ctx.saved_tensors
        layout, channels = ctx.layout, ctx.layout.channels
        arranged, grad = layout.arrange(x), layout.arrange(grads[0].to(x.dtype))
        grad_x, sums, found = torch.empty_like(arranged), layout.sums(), _room(4, channels)
        _call("channels_backward", x, layout, *_arguments(ctx.phi), grad_x, sums, arranged, grad, tables[0])
        sizes = ctypes.c_int64(channels), ctypes.c_int64(sums.shape[1] // channels)
        given = (_table(g, channels) for g in (gamma, proxy_scale, proxy_bias))
        _run("proxy_gradients", *sizes, found, sums, tables, *given)
        there = gamma is not None, ctx.has_beta, proxy_scale is not None, proxy_bias is not None
        return grad_x, *(g if has else None for g, has in zip(found, there, strict=True)), *(None,) * 4


class MigratedNorm(torch.autograd.Function):
    """`migrated_group_norm` of (N, C, *), and its derivatives by x, weight and bias."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        gain: Tensor | None,
        num_groups: int,
        strength: float,
        eps: float,
        source_eps: float,
        layout: ChannelLayout,
    ) -> Tensor:
        samples, channels = x.shape[:2]
        arranged = layout.arrange(x)
        out, kept = torch.empty_like(arranged), _room(channels + 2 * samples * num_groups)
        room = layout.sums(), _room(2, samples * channels)
        given = (_table(g, channels) for g in (running_mean, running_var, gain, weight, bias))
        options = ctypes.c_int64(num_groups), *map(ctypes.c_float, (strength, eps, source_eps))
        _call("migrated_forward", x, layout, *options, out, arranged, kept, *room, *given)
        ctx.save_for_backward(x, weight, running_mean, gain, kept)
        ctx.has_bias = bias is not None
        ctx.num_groups, ctx.strength, ctx.layout = num_groups, strength, layout
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight, running_mean, gain, kept = ctx.saved_tensors
        samples, channels = x.shape[:2]
        arranged, grad = ctx.layout.arrange(x), ctx.layout.arrange(grads[0].to(x.dtype))
        grad_x = torch.empty_like(arranged) if ctx.needs_input_grad[0] else None
        found, room = _room(2, channels), (ctx.layout.sums(), _room(3, samples * channels))
        given = (_table(g, channels) for g in (running_mean, gain, weight))
        options = ctypes.c_int64(ctx.num_groups), ctypes.c_float(ctx.strength)
        _call("migrated_backward", x, ctx.layout, *options, grad_x, found, arranged, grad, kept, *room, *given)
        grad_weight, grad_bias = found
        return grad_x, None if weight is None else grad_weight, grad_bias if ctx.has_bias else None, *(None,) * 8


@lru_cache(maxsize=16)
def quantiles(samples: int) -> Tensor:
    """Return values of the standard normal, uniform in probability; nobody writes to them."""
    steps = torch.arange(samples, dtype=torch.float64, device="cpu")
    return ((2**0.5) * torch.erfinv((2 * steps + 1) / samples - 1)).to(torch.float32)


def _arguments(phi: ActivationCode) -> tuple[Any, ...]:
    return phi.kind, ctypes.c_float(phi.a), ctypes.c_float(phi.b)


def _table(values: Tensor | None, channels: int) -> Tensor | None:
    return None if values is None else values.detach().to(torch.float32).expand(channels).contiguous()


def _room(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _call(name: str, x: Tensor, layout: ChannelLayout, *arguments: Any) -> None:
    half = x.dtype == torch.bfloat16
    _run(name, int(half), int(layout.last), ctypes.byref(layout), *arguments)


def _run(name: str, *arguments: Any) -> None:
    """Call a function of the library; tensors and None go as pointers."""
    held = [
        ctypes.c_void_p(None if a is None else a.data_ptr()) if a is None or isinstance(a, Tensor) else a
        for a in arguments
    ]
    getattr(cpp.library(), name)(*held)
