"""What folding asks of a layer, one of ours or a library's BatchNorm, and how it takes fused layers apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from torch import nn

from retrofit.graph.rewrite import replace_module
from retrofit.layers import NormalityMixin, ProxyNorm, StrengthMixin
from retrofit.layers.batch_norm import _BatchNormalNorm
from retrofit.layers.channel_map import ChannelMap
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.group_norm import GroupNormalNorm
from retrofit.layers.layer_norm import LayerNormalNorm, LayerNormalNorm2d
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery.families import classify


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
    if isinstance(layer, ConvertedLayer):
        return layer.channel_map()
    if not is_batch_norm(layer):
        return None
    return ChannelMap.of(layer.running_mean, layer.running_var, layer.eps, layer.weight, layer.bias)


def estimates(layer: nn.Module) -> bool:
    """Whether a layer of ours estimates lambda from its input in evaluation."""
    return isinstance(layer, NormalityMixin) and not layer.keeps_statistics


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
