"""Look at a network, or a copy of it, and leave it as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.utils.placement import device_of
from retrofit.utils.text import one_line


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module's mode back afterwards, by `train`, where torchvision's feature extractors change their graph."""
    modes = [(module, module.training) for module in model.modules()]  # parents first
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.train(training)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode without gradients, and every module's mode back afterwards."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate a network, and leave its modes, its buffers and the random state as they were.

    What is compiled runs uncompiled: compiled code calls the hooks alone that were there when it was traced.
    """
    device = device_of(model)
    kind, devices = ("cuda", []) if device.type in ("cpu", "meta") else (device.type, [device])
    buffers = kept_values(model.buffers())
    compiled = any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with evaluating(model), eager, torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            put_back(buffers)


def kept_values(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int | None, Tensor]]:
    """Remember the values of some tensors, for `put_back`."""
    return [(t, None if t.is_inference() else t._version, t.detach().clone()) for t in tensors if not t.is_meta]


def put_back(values: list[tuple[Tensor, int | None, Tensor]]) -> None:
    """Give tensors that were written to since `kept_values` their former values."""
    with torch.no_grad():
        for tensor, version, former in values:
            if version is None or tensor._version != version:
                tensor.copy_(former)


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a network; raise RetrofitError if it holds computed tensors, as pruned layers do."""
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise RetrofitError(
            "the network cannot be copied: it holds tensors that were computed, as pruned layers do; make them "
            f"permanent first, by torch.nn.utils.prune.remove for example ({one_line(error)[:100]})"
        ) from error
