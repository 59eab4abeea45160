"""What each converted layer computes in evaluation, in float64, and which plain layer it is where it is one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.graph.rewrite import replace_module
from retrofit.layers import MigratedGroupNorm, NormalityMixin, ProxyNorm, StrengthMixin
from retrofit.layers.batch_norm import RunningNormality, _BatchNormalNorm
from retrofit.layers.group_norm import GroupNormalNorm
from retrofit.layers.instance_norm import _InstanceNormalNorm
from retrofit.layers.layer_norm import LayerNormalNorm, LayerNormalNorm2d
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery.families import classify


@dataclass(frozen=True)
class ChannelMap:
    """gamma * psi(scale * x + shift; lambda) + beta, per channel: (C,) each, float64."""

    scale: Tensor
    shift: Tensor
    lmbda: Tensor
    gamma: Tensor
    beta: Tensor

    @property
    def is_affine(self) -> bool:
        """Whether lambda is 1 everywhere it matters."""
        return bool(((self.lmbda == 1) | (self.gamma == 0)).all())

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return scale and shift of the whole map, where lambda is 1."""
        return self.gamma * self.scale, self.gamma * self.shift + self.beta

    def upright(self) -> ChannelMap:
        """Return the same function with gamma >= 0, by gamma * psi(h; lambda) = -gamma * psi(-h; 2 - lambda)."""
        sign = torch.where(self.gamma < 0, -1.0, 1.0).to(self.gamma.dtype)
        lmbda = torch.where(self.gamma < 0, 2 - self.lmbda, self.lmbda)
        return ChannelMap(self.scale * sign, self.shift * sign, lmbda, self.gamma.abs(), self.beta)


def is_wanted(module: nn.Module) -> bool:
    """Whether folding does something about `module`: a BatchNorm with running statistics, or a layer of ours."""
    if isinstance(module, WeightStandardization):
        return False
    return isinstance(module, StrengthMixin) or is_batch_norm(module)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm, frozen or not, that uses running statistics in evaluation."""
    found = classify("", module)
    known = found is not None and found.family in ("bn", "frozen-bn") and found.status == "known"
    return known and getattr(module, "running_mean", None) is not None


def channel_map(layer: Any) -> ChannelMap | None:
    """Return what a layer computes in evaluation if that is a constant map per channel."""
    if isinstance(layer, MigratedGroupNorm):
        if layer.strength != 0:
            return None
        scale, shift = layer.input_affine()
        lmbda = torch.ones_like(scale)
    elif not keeps_statistics(layer):
        return None
    else:
        scale = torch.rsqrt(layer.running_var.double() + layer.eps)
        shift = -layer.running_mean.double() * scale
        lmbda = torch.ones_like(scale)
        if isinstance(layer, RunningNormality):
            assert layer.running_lambda is not None
            lmbda = 1 + layer.effective_alpha.double() * (layer.running_lambda.double() - 1)
    gamma = torch.ones_like(scale) if layer.weight is None else layer.weight.detach().double()
    if isinstance(layer, MigratedGroupNorm):
        gamma = gamma / layer.gain.double()
    beta = torch.zeros_like(scale) if layer.bias is None else layer.bias.detach().double()
    return ChannelMap(scale, shift, lmbda, gamma, beta)


class ChannelsFirstLayerNorm(nn.LayerNorm):
    """LayerNorm over C of (N, C, *), by way of the channels-last form that runtimes know."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def keeps_statistics(layer: Any) -> bool:
    """Whether a layer evaluates by running statistics, as BatchNorm does; others may do something else with theirs."""
    if not isinstance(layer, RunningNormality):
        return is_batch_norm(layer)
    if isinstance(layer, _InstanceNormalNorm) and not layer.track_running_stats:  # as torch's decide, not by buffers
        return False
    return layer.running_mean is not None


def source_layer(layer: Any) -> nn.Module:
    """Return torch's own layer for one of ours that estimates lambda, at strength 0."""
    new: Any
    if isinstance(layer, LayerNormalNorm):
        cls = ChannelsFirstLayerNorm if isinstance(layer, LayerNormalNorm2d) else nn.LayerNorm
        new = cls(layer.normalized_shape, layer.eps, layer.elementwise_affine)
    elif isinstance(layer, GroupNormalNorm):
        new = nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, layer.affine)
    else:
        names = (base.__name__.replace("Normal", "") for base in type(layer).__mro__)
        cls = next(getattr(nn, name) for name in names if hasattr(nn, name))
        new = cls(layer.num_features, layer.eps, affine=layer.affine, track_running_stats=False)
    new.register_parameter("weight", layer.weight)
    new.register_parameter("bias", layer.bias)
    return new.eval()


def estimates(layer: nn.Module) -> bool:
    """Whether a layer of ours estimates lambda from its input in evaluation."""
    return isinstance(layer, NormalityMixin) and not keeps_statistics(layer)


def kind_of(layer: nn.Module) -> str:
    """Return which sets a layer that estimates lambda normalizes."""
    if isinstance(layer, LayerNormalNorm2d):
        return "channel"
    if isinstance(layer, LayerNormalNorm):
        return "layer"
    if isinstance(layer, GroupNormalNorm):
        return "group"
    return "batch" if isinstance(layer, _BatchNormalNorm) else "instance"


def split_fused(net: nn.Module, fixed: Collection[nn.Module]) -> nn.Module:
    """Take norm+activation layers but the `fixed` ones apart, in place, each into `norm`, `drop` and `act`."""
    for name, layer in list(net.named_modules()):
        act = getattr(layer, "act", None)
        if layer in fixed or not is_wanted(layer) or isinstance(layer, ProxyNorm) or not isinstance(act, nn.Module):
            continue
        drop = getattr(layer, "drop", None) or nn.Identity()
        layer.act = layer.drop = nn.Identity()
        net = replace_module(net, name, nn.Sequential(OrderedDict(norm=layer, drop=drop, act=act)))
    return net


def plain_convolutions(net: nn.Module, fixed: Collection[nn.Module]) -> None:
    """Replace weight-standardised convolutions but the `fixed` ones by plain ones of the weights that they use."""
    for name, conv in list(net.named_modules()):
        if isinstance(conv, WeightStandardization) and conv not in fixed and name:
            replace_module(net, name, conv.plain_convolution())
