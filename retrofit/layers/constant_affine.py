"""Constant affine maps per channel, and gamma and beta behind them, which are trained."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.forms import ChannelAffine


class ConstantAffine(ConvertedLayer):
    """(x * scale + shift) * weight + bias per channel, of which weight and bias are trained.

    The constants are what is left of statistics that were migrated, where no layer beside it takes them in.

    Args:
        scale: (C,).
        shift: (C,).
        channel_dim: Dimension of the channels: 1 for (N, C, *), -1 for (N, *, C).
        weight: gamma, (C,), or None.
        bias: beta, (C,), or None.

    Shape:
        (N, C, *) or (N, *, C) to the same, in the input's type.
    """

    scale: Tensor
    shift: Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        scale: Tensor,
        shift: Tensor,
        channel_dim: int = 1,
        weight: nn.Parameter | None = None,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("shift", shift.detach().clone())
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to `x`."""
        shape = (-1,) + (1,) * (x.ndim - 2) if self.channel_dim == 1 else (-1,)
        y = x * self.scale.view(shape) + self.shift.view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        return (y if self.bias is None else y + self.bias.view(shape)).to(x.dtype)

    def source_layer(self) -> nn.Module:
        """Return the layer itself, which no library has."""
        return self

    def _form(self) -> list[nn.Module]:
        gamma = torch.ones_like(self.scale) if self.weight is None else self.weight
        beta = torch.zeros_like(self.scale) if self.bias is None else self.bias
        return [ChannelAffine(self.scale * gamma, self.shift * gamma + beta, last=self.channel_dim == -1)]

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.scale.numel()}, channel_dim={self.channel_dim}"


def trained_affine(layer: Any) -> nn.Module:
    """Return the constants of a layer that is an affine map, with gamma and beta, and dropout and activation behind."""
    constant = layer.channel_map()
    scale, shift = (value.to(layer.running_mean.dtype) for value in (constant.scale, constant.shift))
    return named_sequence(OrderedDict(affine=ConstantAffine(scale, shift, 1, layer.weight, layer.bias)), layer)


def named_sequence(parts: OrderedDict[str, nn.Module], layer: ConvertedLayer) -> nn.Module:
    """Return named modules, then the dropout and the activation of a layer, one after the other."""
    fused = [module for module in layer.fused_modules() if module not in parts.values()]
    named = OrderedDict(parts, **{name: child for name, child in layer.named_children() if child in fused})
    if len(named) == 1 and parts:
        return next(iter(named.values()))
    return nn.Sequential(named) if named else nn.Identity()
