"""Running statistics of a network, converted or not: estimated again, or held where they are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from retrofit.errors import RetrofitError
from retrofit.layers import MigratedGroupNorm, StrengthMixin
from retrofit.record import unwrapped
from retrofit.surgery import apply, plan
from retrofit.utils.batches import input_of
from retrofit.utils.evaluating import evaluating, modes_of, restore_modes
from retrofit.utils.hooks import hooked

_NOT_FINITE = "the images or the weights hold NaN or infinity, or values grow without bound: mend them"


@torch.no_grad()
def update_bn(loader: Iterable[Any], model: nn.Module, device: torch.device | str | int | None = None) -> int:
    """Estimate the running statistics of batch normalizations anew, with lambda and whitening of converted layers.

    `torch.optim.swa_utils.update_bn` does so too. This one reads no data where there is nothing to estimate, refuses an
    empty loader and restores every mode. Migrated and frozen statistics are constants, and stay.

    Args:
        loader: Batches: tensors, or lists and tuples whose first entry is the input.
        model: The network; its mode is restored.
        device: Where to move inputs, if anywhere.

    Returns:
        How many layers were estimated; with none, the loader is not read. A layer that no batch reached keeps its
        statistics, and does not count.

    Raises:
        RetrofitError: If the loader is empty, or statistics are not finite; they are then as they were.
    """
    found: list[Any] = estimated_layers(model)
    if not found:
        return 0
    momenta = {layer: layer.momentum for layer in found}
    before = [(layer, *named, named[1].clone()) for layer in found for named in layer.named_buffers(recurse=False)]
    modes = modes_of(model)
    model.train()
    try:
        for layer in found:
            layer.reset_running_stats()
            layer.momentum = None  # the plain average over all batches
        for images in map(input_of, loader):
            model(images if device is None else images.to(device))
        idle = [layer for layer in found if layer.num_batches_tracked == 0]
        if len(idle) == len(found):
            raise RetrofitError("the loader held no batch to estimate statistics from; give it data")
        if not all(buffer.isfinite().all() for layer in found for buffer in layer.buffers()):
            raise RetrofitError(f"statistics are not finite; {_NOT_FINITE}")
    except BaseException:
        idle = found
        raise
    finally:
        for layer, name, buffer, value in before:
            if layer in idle:
                layer._buffers[name] = buffer.copy_(value)  # whitening is reset to another tensor
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        restore_modes(modes)
    return len(found) - len(idle)


@torch.no_grad()
def recentre(loader: Iterable[Any], model: nn.Module, device: torch.device | str | int | None = None) -> int:
    """Bring the constants of migrated norms up to date with the network, before its strength falls from 1 to 0.

    A migrated norm standardises by constants, then by the moments of each image and group. While it was trained, the
    mean of those moments may have moved; at strength 0 only the constants are left. The standardisation of each group
    is moved and scaled so that the moments are 0 and 1 on average. At strength 1 the function stays the same, since
    group normalization undoes a shift and a scale of its groups (with several groups, to their eps).

    Args:
        loader: Batches as the network is trained on: tensors, or lists and tuples whose first entry is the input.
        model: The network, changed in place; its mode is restored.
        device: Where to move inputs, if anywhere.

    Returns:
        How many layers were brought up to date.

    Raises:
        RetrofitError: If the loader is empty, or moments are not finite; nothing is changed then.
    """
    moments = group_moments(loader, model, device)
    for name, (mean, scale) in moments.items():
        move_standardisation(model.get_submodule(name), mean, scale)
    return len(moments)


@torch.no_grad()
def group_moments(
    loader: Iterable[Any], model: nn.Module, device: torch.device | str | int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure mean and standard deviation of what each migrated norm group-normalizes.

    Args:
        loader: As for `recentre`.
        model: The network; its mode is restored.
        device: Where to move inputs, if anywhere.

    Returns:
        By layer: (G,) each, in float64. With k = 1 / sqrt(v + eps) the mean is E[m k] / E[k], the deviation 1 / E[k].

    Raises:
        RetrofitError: If the loader is empty, or moments are not finite.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MigratedGroupNorm)}
    if not layers:
        return {}
    sums: dict[str, list[Tensor]] = {}

    def measure(name: str, layer: MigratedGroupNorm, args: tuple[Tensor, ...]) -> None:
        (x,) = args
        scale, shift = (values.view(-1, *(1,) * (x.ndim - 2)) for values in layer.input_affine())
        grouped = (x.double() * scale + shift).reshape(len(x), layer.num_groups, -1)
        var, mean = torch.var_mean(grouped, 2, correction=0)
        k = torch.rsqrt(var + layer.group_eps)
        found = [(mean * k).sum(0), k.sum(0), torch.full_like(k[0], len(x))]
        sums[name] = [a + b for a, b in zip(sums[name], found, strict=True)] if name in sums else found

    watched = hooked(layer.register_forward_pre_hook(partial(measure, name)) for name, layer in layers.items())
    with evaluating(model), watched:
        for images in map(input_of, loader):
            model(images if device is None else images.to(device))
    if not sums:
        raise RetrofitError("the loader held no batch to measure moments on; give it data")
    found = {name: (mk / k, count / k) for name, (mk, k, count) in sums.items()}
    for name, moments in found.items():
        if not all(values.isfinite().all() for values in moments):
            raise RetrofitError(f"the moments of {name} are not finite; {_NOT_FINITE}")
    return found


@torch.no_grad()
def move_standardisation(layer: Any, mean: Tensor, scale: Tensor) -> None:
    """Let a migrated norm standardise to (x' - mean) / scale, (G,) each, where it standardised to x'."""
    each = layer.num_channels // layer.num_groups
    slope, _ = layer.input_affine()
    layer.running_mean.copy_(layer.running_mean.double() + mean.repeat_interleave(each) / slope)
    var = (layer.running_var.double() + layer.eps) * scale.square().repeat_interleave(each)
    layer.running_var.copy_(var)
    layer.eps.zero_()
    layer.group_eps.div_(scale.square().mean())


def freeze_norms(model: nn.Module) -> int:
    """Hold the running statistics of batch normalizations where they are, converted or not, in training too.

    Converted layers then evaluate whatever `model.train()` says; torch's and timm's become `FrozenBatchNorm`. gamma and
    beta still train. Migrated statistics are constants already.

    Args:
        model: The network, changed in place; not a normalization layer itself.

    Returns:
        How many layers were frozen.
    """
    found = _tracking(model)
    for layer in found:
        if isinstance(layer, StrengthMixin):
            layer.frozen = True
            layer.eval()
    if any(not isinstance(layer, StrengthMixin) for layer in found):
        network = unwrapped(model)
        apply(plan(network, "frozen", source="bn"), network)
    return len(found)


def estimated_layers(model: nn.Module) -> list[nn.Module]:
    """Layers whose running statistics `update_bn` estimates: those that track them and are not frozen."""
    return [layer for layer in _tracking(model) if not getattr(layer, "frozen", False)]


def _tracking(model: nn.Module) -> list[nn.Module]:
    """Layers that normalize by the batch in training and by running statistics after it."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and getattr(m, "running_mean", None) is not None]
