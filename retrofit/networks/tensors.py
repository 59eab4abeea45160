"""What a file holds of a network: its tensors, and the settings of layers that only training depends on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.layers.base import NormalityMixin, check_noise, check_noise_kind
from retrofit.utils.text import shortlist

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict themselves (aliases are the same objects), without other extra state."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of the state dict."""
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tensor that goes by several to its first name."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(model).items()}
    return {name: original for name, original in names.items() if name != original}


def to_write(model: nn.Module, twin: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for a file: each one once, contiguous, on the CPU, with storage of its own.

    Args:
        model: The network.
        twin: The network as it will be built again; it tells which tensors are one.

    Raises:
        RetrofitError: If the network holds as two tensors what will be built as one.
    """
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    for name, original in _aliases(twin).items():
        if not torch.equal(tensors[name], tensors[original]):
            raise RetrofitError(
                f"{name} and {original} are one tensor in the library's network, two here; make them equal to save it"
            )
        del tensors[name]
    form = torch.contiguous_format
    return {name: tensor.to("cpu", copy=True, memory_format=form) for name, tensor in tensors.items()}


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a file's tensors, with their names, shapes and types."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def misfit(model: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Say how a file's tensors differ from a network's, in name, shape or type; None if they do not."""
    own = tensors_of(model)
    given = {name: tensors[original] for name, original in _aliases(model).items() if original in tensors}
    given |= tensors
    both = [name for name in own if name in given]
    parts = {
        "missing": [name for name in own if name not in given],
        "unexpected": sorted(name for name in given if name not in own),
        "of another shape": [
            f"{name} {list(given[name].shape)} for {list(own[name].shape)}"
            for name in both
            if given[name].shape != own[name].shape
        ],
        "of another type": [
            f"{name} {given[name].dtype}".replace("torch.", "")
            for name in both
            if (given[name].dtype in _FLOATS) != own[name].is_floating_point()
        ],
    }
    return ", ".join(f"{len(names)} {word} ({shortlist(names)})" for word, names in parts.items() if names) or None


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a file's tensors, which fit, strictly, each into new memory of its own type on the model's device."""
    tensors = {name: tensors[original] for name, original in _aliases(model).items()} | dict(tensors)
    parameters = [name for name, tensor in tensors_of(model).items() if isinstance(tensor, nn.Parameter)]
    floating = {tensors[name].dtype for name in parameters if tensors[name].is_floating_point()}
    if len(floating) == 1:
        model.to(dtype=floating.pop())  # also the buffers that are in no file
    for name, tensor in tensors_of(model).items():
        tensor.data = torch.empty_like(tensor.data, dtype=tensors[name].dtype)
    model.load_state_dict(tensors, strict=True)


def _check_momentum(value: Any) -> float | None:
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise ValueError(f"momentum must be a number or None, not {value!r}")
    return value


SETTINGS: Mapping[str, Callable[[Any], Any]] = {
    "momentum": _check_momentum,
    "noise": check_noise,
    "noise_kind": check_noise_kind,
}
"""What runs set on a layer and only training depends on, with what checks it."""


def training_settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of each normalization layer that has some, as JSON values."""
    layers = (NormalityMixin, nn.modules.batchnorm._NormBase)
    rows = {name: vars(layer) for name, layer in model.named_modules() if isinstance(layer, layers)}
    return {name: {key: values[key] for key in SETTINGS if key in values} for name, values in rows.items()}


def set_training_settings(model: nn.Module, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Give layers what `training_settings` returned for those of another network of the same structure.

    Raises:
        AttributeError, TypeError, ValueError: If it did not come from `training_settings`.
    """
    for name, values in settings.items():
        layer = model.get_submodule(name)
        for key, value in values.items():
            if key in vars(layer):
                setattr(layer, key, SETTINGS[key](value))
