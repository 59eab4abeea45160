"""Constant affine maps per channel, and the gamma and beta behind them that are trained."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers.base import ConvertedLayer
from retrofit.layers.forms import ChannelAffine


class ConstantAffine(ConvertedLayer):
    """x * scale + shift per channel.

    It has no parameters: it is what is left of statistics that were migrated, where no layer beside it takes them in.

    Args:
        scale: (C,).
        shift: (C,).
        channel_dim: Dimension of the channels: 1 for (N, C, *), -1 for (N, *, C).

    Shape:
        (N, C, *) or (N, *, C) to the same, in the input's type.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor, channel_dim: int = 1) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("shift", shift.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to `x`."""
        shape = (-1,) + (1,) * (x.ndim - 2) if self.channel_dim == 1 else (-1,)
        return (x * self.scale.view(shape) + self.shift.view(shape)).to(x.dtype)

    def source_layer(self) -> nn.Module:
        """Return the layer itself, which no library has."""
        return self

    def _form(self) -> list[nn.Module]:
        return [ChannelAffine(self.scale, self.shift, last=self.channel_dim == -1)]

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.scale.numel()}, channel_dim={self.channel_dim}"


class Pointwise(ConvertedLayer, nn.Conv1d):
    """weight * x + bias per channel of (N, C, *), as a convolution: per-sample gradients know those."""

    def __init__(self, channels: int, bias: bool) -> None:
        super().__init__(channels, channels, 1, groups=channels, bias=bias, device="meta")

    def forward(self, input: Tensor) -> Tensor:
        """Apply the map to `input`."""
        return super().forward(input.flatten(2) if input.ndim > 2 else input.unsqueeze(-1)).view(input.shape)

    def source_layer(self) -> nn.Module:
        """Return the layer itself, which is torch's but for the shape of its input."""
        return self

    def _form(self) -> list[nn.Module]:
        weight = self.weight.flatten()
        return [ChannelAffine(weight, torch.zeros_like(weight) if self.bias is None else self.bias)]


def trained_affine(layer: Any) -> tuple[tuple[Tensor, Tensor], nn.Module]:
    """Return the constants of a layer that is an affine map, and gamma, beta, dropout and activation behind them."""
    constant = layer.channel_map()
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    weight, bias = layer.weight, layer.bias
    if weight is not None:
        parts["norm"] = conv = Pointwise(len(weight), bias is not None)
        conv.weight = nn.Parameter(weight.detach().clone().view(-1, 1, 1), weight.requires_grad)
        conv.bias = bias
    return (constant.scale, constant.shift), named_sequence(parts, layer)


def named_sequence(parts: OrderedDict[str, nn.Module], layer: ConvertedLayer) -> nn.Module:
    """Return named modules, then the dropout and the activation of a layer, one after the other."""
    fused = [module for module in layer.fused_modules() if module not in parts.values()]
    named = OrderedDict(parts, **{name: child for name, child in layer.named_children() if child in fused})
    if list(named) == ["norm"]:
        return named["norm"]
    return nn.Sequential(named) if named else nn.Identity()
