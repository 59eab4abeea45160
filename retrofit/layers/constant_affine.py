"""A frozen BatchNorm in plain networks: constants per channel, then gamma and beta, which are trained."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.forms import ChannelAffine


class ConstantAffine(ConvertedLayer):
    """x * scale + shift per channel: what is left of migrated statistics where no layer beside it takes them in.

    It has buffers and no parameters: what computes gradients per sample refuses a layer that has both.

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


class TrainedAffine(ConvertedLayer, nn.Conv1d):
    """x * weight + bias per channel of (N, C, *), as a convolution of size 1, whose gradients per sample all know.

    Args:
        weight: gamma, (C,), or None for constant ones.
        bias: beta, (C,), or None.
    """

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        gamma = torch.ones_like(bias) if weight is None else weight  # type: ignore[arg-type]
        super().__init__(len(gamma), len(gamma), 1, groups=len(gamma), bias=False, device="meta")
        self.weight = nn.Parameter(gamma.detach().view(-1, 1, 1), weight is not None and weight.requires_grad)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the map to `input`."""
        return super().forward(input.flatten(2) if input.ndim > 2 else input.unsqueeze(-1)).reshape(input.shape)

    def source_layer(self) -> nn.Module:
        """Return the layer itself, which is torch's but for the shape of its input."""
        return self

    def _form(self) -> list[nn.Module]:
        scale = self.weight.flatten()
        return [ChannelAffine(scale, torch.zeros_like(scale) if self.bias is None else self.bias)]


def trained_affine(layer: Any) -> nn.Module:
    """Return the constants of a layer that is an affine map, then gamma and beta, dropout and activation."""
    constant = layer.channel_map()
    scale, shift = (value.to(layer.running_mean.dtype) for value in (constant.scale, constant.shift))
    parts: OrderedDict[str, nn.Module] = OrderedDict(affine=ConstantAffine(scale, shift))
    if layer.weight is not None or layer.bias is not None:
        parts["norm"] = TrainedAffine(layer.weight, layer.bias)
    return named_sequence(parts, layer)


def named_sequence(parts: OrderedDict[str, nn.Module], layer: ConvertedLayer) -> nn.Module:
    """Return named modules, then the dropout and the activation of a layer, one after the other."""
    fused = [module for module in layer.fused_modules() if module not in parts.values()]
    named = OrderedDict(parts, **{name: child for name, child in layer.named_children() if child in fused})
    if len(named) == 1 and parts:
        return next(iter(named.values()))
    return nn.Sequential(named) if named else nn.Identity()
