"""Running statistics of a network, converted or not: estimated again, or held where they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from retrofit.errors import RetrofitError
from retrofit.layers import StrengthMixin
from retrofit.layers.batch_norm import _BatchNormalNorm
from retrofit.layers.decorrelated_batch_norm import DecorrelatedNorm
from retrofit.surgery import convert

_OF_BATCHES = (_BatchNorm, _BatchNormalNorm, DecorrelatedNorm)


@torch.no_grad()
def update_bn(loader: Iterable[Any], model: nn.Module, device: torch.device | str | int | None = None) -> int:
    """Estimate the running statistics of batch normalizations anew, as `torch.optim.swa_utils.update_bn` does.

    That one knows torch's layers alone; this one the converted ones too, with their lambda and whitening. Migrated and
    frozen statistics are constants, and stay.

    Args:
        loader: Batches: tensors, or lists and tuples whose first entry is the input.
        model: The network; its mode is restored.
        device: Where to move inputs, if anywhere.

    Returns:
        How many layers were estimated; with none, the loader is not read.

    Raises:
        RetrofitError: If the loader is empty.
    """
    found: list[Any] = _tracking(model)
    if not found:
        return 0
    momenta = {layer: layer.momentum for layer in found}
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        for layer in found:
            layer.reset_running_stats()
            layer.momentum = None  # the plain average over all batches
        for batch in loader:
            images = batch[0] if isinstance(batch, list | tuple) else batch
            model(images if device is None else images.to(device))
    finally:
        empty = all(layer.num_batches_tracked == 0 for layer in found)
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    if empty:
        raise RetrofitError("the loader held no batch to estimate statistics from: they are reset; give it data")
    return len(found)


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
    if any(isinstance(layer, _BatchNorm) for layer in found):
        convert(model, "frozen", source="bn", check=False)
    return len(found)


def _tracking(model: nn.Module) -> list[nn.Module]:
    """Layers that normalize by the batch in training and by running statistics after it."""
    return [m for m in model.modules() if isinstance(m, _OF_BATCHES) and getattr(m, "running_mean", None) is not None]
