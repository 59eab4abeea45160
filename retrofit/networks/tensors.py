"""The tensors of a network and of a file: which there are, how they are written, and how they come back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.utils.text import shortlist

Header = Mapping[str, tuple[tuple[int, ...], str]]
"""The shape and the safetensors type of each tensor of a file."""

_FLOATS = ("F64", "F32", "F16", "BF16")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict themselves (aliases are the same objects), without other extra state."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of the state dict."""
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}


def aliases(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tensor that goes by several to its first name."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(model).items()}
    return {name: original for name, original in names.items() if name != original}


def to_write(model: nn.Module, twin: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for a file: each one once, contiguous, with storage of its own.

    Args:
        model: The network.
        twin: The network as it will be built again; it tells which tensors are one.

    Raises:
        RetrofitError: If the network holds as two tensors what will be built as one.
    """
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    for name, original in aliases(twin).items():
        if not torch.equal(tensors[name], tensors[original]):
            raise RetrofitError(
                f"{name} and {original} are one tensor in the library's network, two here; make them equal to save it"
            )
        del tensors[name]
    stored: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        storage = whole.untyped_storage()
        if storage.data_ptr() in stored or storage.nbytes() != whole.nbytes:
            whole = whole.clone(memory_format=torch.contiguous_format)
        stored.add(whole.untyped_storage().data_ptr())
        tensors[name] = whole
    return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a file's tensors, with their names, shapes and types."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def misfit(model: nn.Module, header: Header) -> str | None:
    """Say how a file's tensors differ from a network's, in name, shape or type; None if they do not."""
    own = tensors_of(model)
    found = dict(header)
    for name, original in aliases(model).items():
        if original in found:
            found.setdefault(name, found[original])
    missing = [name for name in own if name not in found]
    unexpected = [name for name in found if name not in own]
    both = [name for name in own if name in found]
    shapes = [
        f"{name} {list(found[name][0])} for {list(own[name].shape)}"
        for name in both
        if found[name][0] != tuple(own[name].shape)
    ]
    types = [
        f"{name} {found[name][1]}" for name in both if (found[name][1] in _FLOATS) != own[name].is_floating_point()
    ]
    parts = ((missing, "missing"), (unexpected, "unexpected"), (shapes, "of another shape"), (types, "of another type"))
    problems = [f"{len(names)} {word} ({shortlist(names)})" for names, word in parts if names]
    return ", ".join(problems) or None


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a file's tensors, which fit, strictly, each into new memory of its own type on the model's device.

    Args:
        model: The network, changed in place.
        tensors: The file's.
    """
    tensors = dict(tensors)
    for name, original in aliases(model).items():
        tensors.setdefault(name, tensors[original])
    parameters = [name for name, tensor in tensors_of(model).items() if isinstance(tensor, nn.Parameter)]
    floating = {tensors[name].dtype for name in parameters if tensors[name].is_floating_point()}
    if len(floating) == 1:
        model.to(dtype=floating.pop())  # also the buffers that are in no file
    for name, tensor in tensors_of(model).items():
        tensor.data = torch.empty_like(tensor.data, dtype=tensors[name].dtype)
    model.load_state_dict(tensors, strict=True)
