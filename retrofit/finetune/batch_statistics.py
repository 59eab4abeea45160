"""Batch statistics over all processes, and back to each process's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.layers import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    BatchNormalNorm3d,
    BatchNormalNormAct2d,
    SyncBatchNormalNorm,
    SyncBatchNormalNormAct,
)
from retrofit.layers.decorrelated_batch_norm import DecorrelatedNorm
from retrofit.utils.running import device_of

_CONVERTED: dict[type[nn.Module], type[nn.Module]] = {
    **dict.fromkeys((BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d), SyncBatchNormalNorm),
    BatchNormalNormAct2d: SyncBatchNormalNormAct,
}
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {  # torch's own synchronization needs an accelerator
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), nn.SyncBatchNorm),
    BatchNormAct2d: SyncBatchNormAct,
}


def sync_norms(model: nn.Module, device: torch.device | str | None = None) -> int:
    """Let batch normalizations take their training statistics over all processes, with exact gradients.

    Each layer turns into its synchronized form in place: same object, parameters, buffers and state-dict names.

    Args:
        model: The network.
        device: Where it will run, if elsewhere. On a CPU only converted layers synchronize: torch's need a GPU.

    Returns:
        How many layers synchronize.

    Raises:
        RetrofitError: If a layer whitens, which needs each set whole.
    """
    if any(isinstance(module, DecorrelatedNorm) for module in model.modules()):
        raise RetrofitError(
            "whitening matrices are not synchronized between processes; leave dbn and dbnn unsynchronized"
        )
    place = device_of(model) if device is None else torch.device(device)
    forms = _CONVERTED if place.type == "cpu" else _CONVERTED | _PLAIN
    layers = [module for module in model.modules() if type(module) in forms]
    for layer in layers:
        vars(layer)["_retrofit_local_form"] = type(layer)
        layer.__class__ = forms[type(layer)]
        vars(layer).setdefault("process_group", None)
    return len(layers)


@contextmanager
def local_norms(model: nn.Module) -> Iterator[None]:
    """Give the layers that `sync_norms` changed their own class for a while: an artifact describes that network."""
    synchronized = {module: type(module) for module in model.modules() if "_retrofit_local_form" in vars(module)}
    for module in synchronized:
        module.__class__ = vars(module)["_retrofit_local_form"]
    try:
        yield
    finally:
        for module, form in synchronized.items():
            module.__class__ = form
