"""Maps with a scale and a shift a channel, or a sample and channel, by channelwise.cpp: one pass over memory each.

They take contiguous tensors and channels_last ones as they lie, in float32 and bfloat16. Who calls them has a path of
torch operations for everything else; `layout_of` says which it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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
_IDENTITY, _CLAMP, _LEAKY, _HARDSWISH, _SILU, _GELU = range(6)
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


def layout_of(x: Tensor, channel_dim: int = 1, per_sample: bool = False) -> ChannelLayout | None:
    """Return how `x` lies for tables of (C,), or (N, C) with `per_sample`; None where no kernel takes it."""
    if not (x.is_cpu and x.dtype in cpp.TYPES and kernels.fits(x) and kernels.chosen(x) is cpp):
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


def moments(x: Tensor, layout: ChannelLayout, about: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each sample and channel, (N, C) in float32.

    Args:
        x: (N, C, *).
        layout: As `layout_of` gives it, for tables per sample.
        about: (C,) roughly the means.
    """
    x, centre = layout.arrange(x), _table(about.expand(x.shape[:2]))
    count = x.numel() // centre.numel()
    (offset, _) = _sums("channels_moments", x, layout, x, centre) / count
    mean = (centre + offset.view_as(centre)).to(torch.float32)
    shift, power = _sums("channels_moments", x, layout, x, mean).view(2, *mean.shape) / count
    return mean, (power - shift * shift).clamp_min_(0).to(torch.float32)


def affine(x: Tensor, layout: ChannelLayout, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift by tables of (N, C); autograd sees nothing of it."""
    x = layout.arrange(x)
    out = torch.empty_like(x)
    _call("channels_forward", x, layout, *_arguments(ActivationCode(_IDENTITY)), out, x, _table(scale), _table(shift))
    return out


def dots(x: Tensor, grad: Tensor, layout: ChannelLayout, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of grad * (x - centre) and of grad for each sample and channel, (N, C) in float32."""
    table = _table(centre.expand(x.shape[:2]))
    x, grad = layout.arrange(x), layout.arrange(grad.to(x.dtype))
    dot, total = _sums("channels_dots", x, layout, x, grad, table).to(torch.float32).view(2, *table.shape)
    return dot, total


def combine(x: Tensor, grad: Tensor, layout: ChannelLayout, by_x: Tensor, by_grad: Tensor, shift: Tensor) -> Tensor:
    """Return x * by_x + grad * by_grad + shift by tables of (N, C)."""
    x, grad = layout.arrange(x), layout.arrange(grad.to(x.dtype))
    out = torch.empty_like(x)
    _call("channels_combine", x, layout, out, x, grad, _table(by_x), _table(by_grad), _table(shift))
    return out


class Activate(torch.autograd.Function):
    """phi(x) * scale + shift by tables of (C,), and its derivative."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, phi: ActivationCode, layout: ChannelLayout
    ) -> Tensor:
        arranged = layout.arrange(x)
        out = torch.empty_like(arranged)
        tables = _table(scale), _table(shift)
        _call("channels_forward", x, layout, *_arguments(phi), out, arranged, *tables)
        ctx.save_for_backward(x, scale)
        ctx.phi, ctx.layout = phi, layout
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, scale = ctx.saved_tensors
        arranged, grad = ctx.layout.arrange(x), ctx.layout.arrange(grads[0].to(x.dtype))
        grad_x = torch.empty_like(arranged)
        sums = _room(ctx.layout)
        _call("channels_backward", x, ctx.layout, *_arguments(ctx.phi), grad_x, sums, arranged, grad, _table(scale))
        by_scale, by_shift = sums.view(2, -1, ctx.layout.channels).sum(1).to(scale.dtype)
        return grad_x, by_scale, by_shift, None, None


class ProxyMoments(torch.autograd.Function):
    """Mean and variance of phi(quantile * scale + shift), (C,) each in float32, and their derivatives."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, scale: Tensor, shift: Tensor, quantiles: Tensor, phi: ActivationCode
    ) -> tuple[Tensor, Tensor]:
        found = torch.empty(6, len(scale), dtype=torch.float32, device="cpu")
        tensors = found, _table(quantiles), _table(scale), _table(shift)
        sizes = ctypes.c_int64(len(scale)), ctypes.c_int64(len(quantiles))
        cpp.library().channels_proxy(*sizes, *_arguments(phi), *map(_pointer, tensors))
        mean, mean_scale, mean_shift, var, var_scale, var_shift = found
        ctx.save_for_backward(mean_scale, mean_shift, var_scale, var_shift)
        return mean.clone(), var.clone()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        mean_scale, mean_shift, var_scale, var_shift = ctx.saved_tensors
        of_mean, of_var = grads
        return of_mean * mean_scale + of_var * var_scale, of_mean * mean_shift + of_var * var_shift, None, None


def _arguments(phi: ActivationCode) -> tuple[Any, ...]:
    return phi.kind, ctypes.c_float(phi.a), ctypes.c_float(phi.b)


def _table(values: Tensor) -> Tensor:
    return values.detach().to(torch.float32).contiguous()


def _room(layout: ChannelLayout) -> Tensor:
    """Return room for two sums, an entry each."""
    entries = layout.blocks * layout.channels if layout.last else layout.rows
    return torch.empty(2, entries, dtype=torch.float64, device="cpu")


def _sums(name: str, x: Tensor, layout: ChannelLayout, *tensors: Tensor) -> Tensor:
    sums = _room(layout)
    _call(name, x, layout, sums, *tensors)
    return sums


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _call(name: str, x: Tensor, layout: ChannelLayout, *arguments: Any) -> None:
    given = (_pointer(a) if isinstance(a, Tensor) else a for a in arguments)
    half = x.dtype == torch.bfloat16
    getattr(cpp.library(), name)(int(half), int(layout.last), ctypes.byref(layout), *given)
