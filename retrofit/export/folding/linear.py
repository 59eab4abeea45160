"""Folding per-channel affine maps into the convolution or linear layer before or after them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


def out_channels(layer: nn.Module) -> int:
    """Return how many channels a convolution or linear layer puts out."""
    return int(layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features)  # type: ignore[arg-type]


def in_channels(layer: nn.Module) -> int:
    """Return how many channels a convolution or linear layer takes in."""
    return int(layer.in_channels if isinstance(layer, _ConvNd) else layer.in_features)  # type: ignore[arg-type]


@torch.no_grad()
def fold_after(layer: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Make `layer` put out `scale * y + shift` instead of y, per output channel; padding does not matter here.

    Args:
        layer: Linear or a (transposed) convolution of any dimensions and groups, linear in its `weight` and `bias`.
        scale: (C_out,).
        shift: (C_out,).

    Raises:
        ValueError: If the layer puts out another number of channels.
    """
    if scale.numel() != out_channels(layer):
        raise ValueError(f"the layer puts out {out_channels(layer)} channels, the map has {scale.numel()}")
    by_group = _by_group(layer)
    groups = by_group.shape[0]
    place = (groups, 1, -1) if isinstance(layer, _ConvTransposeNd) else (groups, -1, 1)
    _set(layer, by_group * scale.double().view(*place, *(1,) * (by_group.ndim - 3)), scale, shift)


@torch.no_grad()
def fold_groups_after(layer: nn.Module, matrix: Tensor, shift: Tensor) -> None:
    """Make `layer` put out `matrix @ y + shift` instead of y, each group of output channels by its own matrix.

    Args:
        layer: As for `fold_after`, and one that `mixes_groups`.
        matrix: (groups, g, g), for groups of g neighbouring channels.
        shift: (C_out,).
    """
    by_group = _by_group(layer)
    outer = 2 if isinstance(layer, _ConvTransposeNd) else 1
    rows = by_group.movedim(outer, 1)
    mixed = matrix.double() @ rows.reshape(*matrix.shape[:2], -1)
    bias = layer.bias
    if isinstance(bias, Tensor):
        shift = shift + (matrix.double() @ bias.detach().double().view(*matrix.shape[:2], 1)).flatten()
    _set(layer, mixed.reshape(rows.shape).movedim(1, outer), torch.zeros_like(shift), shift)


def mixes_groups(layer: nn.Module, size: int) -> bool:
    """Whether each group of `size` neighbouring output channels of `layer` comes from the same input channels."""
    groups = layer.groups if isinstance(layer, _ConvNd) else 1
    return (out_channels(layer) // groups) % size == 0


@torch.no_grad()
def fold_before(layer: nn.Module, scale: Tensor, shift: Tensor | None = None) -> None:
    """Make `layer` take x where it took `scale * x + shift`, per input channel.

    Args:
        layer: As for `fold_after`. A shift is right only where `takes_shift` says so.
        scale: (C_in,).
        shift: (C_in,) or None.

    Raises:
        ValueError: If the layer takes another number of channels.
    """
    if scale.numel() != in_channels(layer):
        raise ValueError(f"the layer takes {in_channels(layer)} channels, the map has {scale.numel()}")
    by_group = _by_group(layer)
    groups = by_group.shape[0]
    place = (groups, -1, 1) if isinstance(layer, _ConvTransposeNd) else (groups, 1, -1)
    shape = (*place, *(1,) * (by_group.ndim - 3))
    ones = torch.ones(out_channels(layer), dtype=torch.float64, device=scale.device)
    offset = torch.zeros_like(ones)
    if shift is not None:
        moved = by_group * shift.double().view(shape)
        spatial = tuple(range(3, moved.ndim))
        moved = moved.sum(spatial) if spatial else moved
        offset = moved.sum(1 if isinstance(layer, _ConvTransposeNd) else 2).flatten()
    _set(layer, by_group * scale.double().view(shape), ones, offset)


def takes_shift(layer: nn.Module) -> bool:
    """Whether a constant added to the input of `layer` is a constant added to its output: no zeros are padded in.

    (What is padded in by reflection or the like holds the constant too.)
    """
    if isinstance(layer, nn.Linear):
        return True
    if isinstance(layer, _ConvTransposeNd) or not isinstance(layer, _ConvNd):
        return False
    if all(side == 1 for side in layer.kernel_size):
        return isinstance(layer.padding, str) or not any(layer.padding)
    if type(layer) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):  # timm's Conv2dSame pads by the input's size
        return False
    if layer.padding_mode != "zeros":
        return True
    return layer.padding == "valid" if isinstance(layer.padding, str) else not any(layer.padding)


def _by_group(layer: nn.Module) -> Tensor:
    """The weight in float64 as (groups, first, second, *): its two channel dimensions, within each group."""
    weight: Tensor = layer.weight.detach().double()  # type: ignore[operator]
    groups = layer.groups if isinstance(layer, _ConvNd) else 1
    return weight.unflatten(0, (groups, -1))


def _set(layer: nn.Module, weight: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Give `layer` the weight, and the bias scale * bias + shift if that is not nothing."""
    parameter: Tensor = layer.weight  # type: ignore[assignment]
    parameter.copy_(weight.flatten(0, 1))
    if layer.bias is None:
        if bool(shift.any()):
            layer.bias = nn.Parameter(shift.to(parameter.dtype), requires_grad=parameter.requires_grad)
    else:
        bias: Tensor = layer.bias  # type: ignore[assignment]
        bias.copy_(scale.double() * bias.double() + shift)
