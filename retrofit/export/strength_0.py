"""Constants that stand for a layer at strength 0: their fit, and how a layer holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers import MigratedGroupNorm
from retrofit.layers.layer_norm import LayerNormalNorm, LayerNormalNorm2d


def representable(layer: Any, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the constants that a layer can have at strength 0: see `settle`."""
    if not isinstance(layer, MigratedGroupNorm):
        return weight, bias
    able = weight * layer.weight > 1e-3 * layer.weight.square()  # a channel of no weight is its bias, either way
    return torch.where(able, weight, layer.weight), torch.where(able, bias, layer.bias)


def settle(layer: Any, weight: Tensor, bias: Tensor) -> None:
    """Set a layer to strength 0, where it is `weight` times its normalization there, plus `bias`.

    A migrated norm holds that in its running statistics: a proxy activation behind it goes by its weight and bias.
    """
    layer.set_strength(0.0)
    if not isinstance(layer, MigratedGroupNorm):
        layer.weight.copy_(weight.view_as(layer.weight))
        layer.bias.copy_(bias.view_as(layer.bias))
        return
    own_weight, own_bias, wanted, offset = (values.double() for values in (layer.weight, layer.bias, weight, bias))
    off = own_weight == 0
    rstd = torch.rsqrt(layer.running_var.double() + layer.eps) * torch.where(off, 1.0, wanted / own_weight)
    shift = torch.where(off, 0.0, (offset - own_bias) / (own_weight * rstd))
    layer.running_mean.copy_(layer.running_mean.double() - shift)
    layer.running_var.copy_(rstd.square().reciprocal())
    layer.eps.zero_()


def per_channel(layer: nn.Module, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions that a channel spans, and the shape in which its constants broadcast."""
    if isinstance(layer, LayerNormalNorm) and not isinstance(layer, LayerNormalNorm2d):
        own = x.shape[x.ndim - len(layer.normalized_shape) :]
        return tuple(range(x.ndim - len(own))), tuple(own)
    return (0, *range(2, x.ndim)), (-1, *(1,) * (x.ndim - 2))


def regress(base: Tensor, wanted: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, float]:
    """Fit wanted = weight * base + bias by least squares; return them and the root mean square of what is left.

    The last is a share of the standard deviation of what is wanted, over all channels together.
    """
    mean_base, mean = base.mean(dims, keepdim=True), wanted.mean(dims, keepdim=True)
    centred, target = base - mean_base, wanted - mean
    power = centred.square().mean(dims, keepdim=True)
    weight = (centred * target).mean(dims, keepdim=True) / power.clamp_min(1e-12)
    left = (target - weight * centred).square().mean()
    bias = mean - weight * mean_base
    share = float((left / target.square().mean().clamp_min(1e-30)).sqrt())
    return weight.flatten(), bias.flatten(), share
