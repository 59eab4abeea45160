"""Decorrelated layers for inference: the whitening matrix goes into the layer before, or stands as a convolution.

In evaluation they are linear within each group of channels, up to the power transform, which is then that of a
`BatchNormalNorm` of standardised values, so that everything that folding does about those is done here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.export.folding.linear import fold_groups_after, mixes_groups, out_channels
from retrofit.export.forms.operations import constant_norm, in_sequence
from retrofit.graph.find_sites import find_sites
from retrofit.graph.rewrite import replace_module
from retrofit.layers import BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d
from retrofit.layers.batch_norm import RunningNormality
from retrofit.layers.decorrelated_batch_norm import DecorrelatedNorm

_NORMAL: tuple[type[RunningNormality], ...] = (BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d)


def is_decorrelated(module: nn.Module) -> bool:
    """Whether `module` whitens groups of channels."""
    return isinstance(module, DecorrelatedNorm)


def fold_whitening(
    net: nn.Module,
    names: dict[nn.Module, str],
    fixed: Collection[nn.Module],
    shapes: Callable[[nn.Module, list[nn.Module]], Mapping[nn.Module, Sequence[int]]],
) -> tuple[nn.Module, dict[str, str]]:
    """Take the whitening out of decorrelated layers, in place.

    What remains of one with a power transform is a `BatchNormalNorm`, the same object; of a plain one, nothing. Where
    the layer before cannot take the matrix exactly (it serves others too, or is a convolution whose groups cut through
    those of the matrix, a depthwise one, say), the matrix becomes a convolution of size 1. Where it
    is diagonal, it stays with the norm.

    Args:
        net: The network, in evaluation, its norm+activation layers split.
        names: What the user calls the modules; a BatchNorm that takes a layer's place is added.
        fixed: Layers to leave alone.
        shapes: Tells the shape of the input of each of the given layers of a network, if it is called.

    Returns:
        The network, and by the user's name what became of each layer of which no norm is left: "folded" or "group
        convolution".

    Raises:
        RetrofitError: If a layer keeps no running statistics.
    """
    decorrelated = {module: name for name, module in net.named_modules() if is_decorrelated(module)}
    found = {module: name for module, name in decorrelated.items() if module not in fixed}
    if not found:
        return net, {}
    for layer, name in found.items():
        if layer.running_mean is None:
            raise RetrofitError(f"{name} tracks no running statistics, so its whitening is no constant; keep it out")
    ndims = {layer: len(shape) for layer, shape in shapes(net, list(found)).items()}
    sites = {net.get_submodule(site.norm): site for site in find_sites(net, is_decorrelated).sites if site.places == 1}
    forms: dict[str, str] = {}
    for layer, name in found.items():
        if layer not in ndims:  # what the network never calls can stay
            continue
        matrix, shift = _linear(layer)
        normal, channels = isinstance(layer, RunningNormality), len(shift)
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        parts: list[nn.Module]
        if torch.equal(matrix, torch.diag_embed(diagonal)) and normal:
            parts = [_without_whitening(layer, layer.running_mean, diagonal.flatten().pow(-2))]
        elif torch.equal(matrix, torch.diag_embed(diagonal)):
            parts = [constant_norm(diagonal.flatten(), shift, ndims[layer])]
            names[parts[0]] = names[layer]
        else:
            site = sites.get(layer)
            feeder = net.get_submodule(site.feeder) if site is not None and site.feeder is not None else None
            parts = []
            if feeder is not None and _takes(feeder, matrix, ndims[layer]):
                fold_groups_after(feeder, matrix, shift)
            else:
                parts.append(_group_convolution(matrix, shift, ndims[layer]))
            if normal:
                parts.append(_without_whitening(layer, shift.new_zeros(channels), shift.new_ones(channels)))
            else:
                forms[names[layer]] = "group convolution" if parts else "folded"
        net = replace_module(net, name, in_sequence(parts))
    return net, forms


@torch.no_grad()
def _linear(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the matrices (groups, g, g) and the shift (C,) of what is linear about a layer, float64.

    A plain layer's affine is included.
    """
    matrix = layer.running_matrix(torch.float64)
    mean = layer.running_mean.double().view(*matrix.shape[:2], 1)
    shift = -(matrix @ mean).flatten()
    if not isinstance(layer, RunningNormality):
        if layer.weight is not None:
            gamma = layer.weight.double()
            matrix, shift = matrix * gamma.view(*matrix.shape[:2], 1), shift * gamma
        if layer.bias is not None:
            shift = shift + layer.bias.double()
    return matrix, shift


def _takes(feeder: nn.Module, matrix: Tensor, ndim: int) -> bool:
    channels = matrix.shape[0] * matrix.shape[1]
    on_channels = ndim == 2 or not isinstance(feeder, nn.Linear)
    return on_channels and out_channels(feeder) == channels and mixes_groups(feeder, matrix.shape[-1])


def _group_convolution(matrix: Tensor, shift: Tensor, ndim: int) -> nn.Module:
    """Return the layer that multiplies each group of channels of (N, C, *) by its matrix, and shifts."""
    groups, size, _ = matrix.shape
    channels = groups * size
    new: Any
    if ndim == 2:
        new = nn.Linear(channels, channels, device=matrix.device)
        weight = torch.block_diag(*matrix)
    else:
        cls = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[ndim]
        new = cls(channels, channels, 1, groups=groups, device=matrix.device)
        weight = matrix.flatten(0, 1)
    new.requires_grad_(False)
    new.weight.copy_(weight.view(new.weight.shape))
    new.bias.copy_(shift)
    return new


def _without_whitening(layer: Any, mean: Tensor, var: Tensor) -> nn.Module:
    """Make a decorrelated layer with a power transform the `BatchNormalNorm` of the given statistics."""
    layer.__class__ = next(cls for cls in type(layer).__mro__ if cls in _NORMAL)
    del layer.running_covariance, layer.running_whitening
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)
    layer.eps = 0.0
    return layer
