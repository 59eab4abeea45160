"""The tensors of a network and of a file: which there are, how they are written, and how they come back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.layers.base import as_strength_code
from retrofit.layers.settings import later_entries
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


def emptied(model: nn.Module, device: str) -> nn.Module:
    """Return a copy of a network whose tensors have no values yet: on the meta device no memory either."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo: dict[int, object] = {}
    for tensor in chain(model.parameters(), model.buffers(), held):
        empty = torch.empty_like(tensor, device=device, requires_grad=False)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


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


def misfit(model: nn.Module, header: Header) -> str | None:
    """Say how a file's tensors differ from a network's, in name, shape or type; None if they do not."""
    own = tensors_of(model)
    found = dict(header)
    for name, original in aliases(model).items():
        if original in found:
            found.setdefault(name, found[original])
    for name in own.keys() & found.keys():
        if _is_strength(name, own[name]) and found[name] == ((), "F32"):  # of an earlier version, `fill` understands it
            found[name] = (tuple(own[name].shape), "I64")
    later = later_entries(model)
    missing = [name for name in own if name not in found and name not in later]
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


def fill(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Load a file's tensors, which fit, strictly.

    Args:
        model: The network, changed in place.
        tensors: The file's.
        dtype: What to hold all floats in; each in the file's own if None.
    """
    tensors = dict(tensors)
    own = tensors_of(model)
    for name, original in aliases(model).items():
        if original in tensors:
            tensors.setdefault(name, tensors[original])
    for name in own.keys() & tensors.keys():
        if _is_strength(name, own[name]):
            tensors[name] = as_strength_code(tensors[name])
    for name in later_entries(model):
        tensors.setdefault(name, own[name].detach().clone())
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    floating = {tensors[name].dtype for name in parameters if tensors[name].is_floating_point()}
    if dtype is not None or len(floating) == 1:
        model.to(dtype=dtype or floating.pop())  # also the buffers that are in no file
    if dtype is None:
        for name, tensor in tensors_of(model).items():
            tensor.data = tensor.data.to(tensors[name].dtype)
    model.load_state_dict(tensors, strict=True)


def wide_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the type to compute in, to compare what networks answer: float32, or float64 if all floats are that."""
    floating = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() and tensor.ndim}
    return torch.float64 if floating == {torch.float64} else torch.float32


def _is_strength(name: str, tensor: Tensor) -> bool:
    return name.rpartition(".")[2] == "strength" and not tensor.is_floating_point()
