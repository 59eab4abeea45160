"""The tensors of a network's state dict: written to a file once each, compared with a file's, and
filled from them.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.utils.text import shortlist


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict themselves (aliases are the same objects), without other
    extra state.
    """
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tensor that goes by several to its first name."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(tensor), name) for name, tensor in state_tensors(model).items()
    }
    return {name: original for name, original in names.items() if name != original}


def tensors_to_write(model: nn.Module, twin: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for a file: each one once, contiguous, on the CPU, with storage of its
    own.

    Args:
        model: The network.
        twin: The network as it will be built again, which tells which tensors are one.

    Raises:
        RetrofitError: If two that are one there differ here.
    """
    tensors = {name: tensor.detach() for name, tensor in state_tensors(model).items()}
    for name, original in _aliases(twin).items():
        if not torch.equal(tensors[name], tensors[original]):
            raise RetrofitError(
                f"{name} and {original} are one tensor in the library's network, two here; tie them"
            )
        del tensors[name]
    layout = torch.contiguous_format
    return {
        name: tensor.to("cpu", copy=True, memory_format=layout) for name, tensor in tensors.items()
    }


def under_all_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors also under the further names that they have in the network."""
    further = {
        name: tensors[original] for name, original in _aliases(model).items() if original in tensors
    }
    return further | dict(tensors)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a file's tensors, with their names, shapes and types."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fits(wanted: Tensor, given: Tensor) -> bool:
    """Whether a tensor can take another's values: both have the same shape, and both are real,
    complex or whole numbers.
    """
    return (
        wanted.shape == given.shape
        and wanted.is_floating_point() == given.is_floating_point()
        and wanted.is_complex() == given.is_complex()
    )


def misfit(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """Say how given tensors differ from those that a network wants; empty if they do not."""
    missing = [name for name in wanted if name not in given]
    unexpected = sorted(given.keys() - wanted.keys())
    unfit = [
        name for name, tensor in wanted.items() if name in given and not fits(tensor, given[name])
    ]
    return list_misfit(wanted, given, missing, unexpected, unfit)


def list_misfit(
    wanted: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    missing: Sequence[str],
    unexpected: Sequence[str],
    unfit: Iterable[str],
) -> str:
    """Count and list the names of tensors that are missing, unexpected, or do not fit."""
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape or type": [
            f"{name} {described(given[name])} for {described(wanted[name])}" for name in unfit
        ],
    }
    return ", ".join(
        f"{len(names)} {problem} ({shortlist(names, limit=120)})"
        for problem, names in problems.items()
        if names
    )


def described(tensor: Tensor) -> str:
    """Return a tensor's shape and type: "[64, 3, 7, 7] float32"."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {kind}"


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a file's tensors, which fit, strictly, each into new memory of its own type on the
    model's device.
    """
    tensors = under_all_names(model, tensors)
    targets = state_tensors(model)
    parameter_types = {
        tensors[name].dtype
        for name, target in targets.items()
        if isinstance(target, nn.Parameter) and tensors[name].is_floating_point()
    }
    if len(parameter_types) == 1:
        # Also the buffers that are in no file.
        _cast(model, parameter_types.pop())
    # Asked again: a cast puts other tensors in the place of buffers.
    for name, target in state_tensors(model).items():
        target.data = torch.empty_like(target.data, dtype=tensors[name].dtype)
    model.load_state_dict(versioned(model, tensors), strict=True)


def versioned(model: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors as a state dict that tells the versions of a network's modules, which some of
    torchvision's ask for.

    Tensors with other names than the network's may be of other versions: they are left as they are.
    """
    own = model.state_dict()
    if not tensors.keys() <= own.keys():
        return tensors
    state = OrderedDict(tensors)
    state._metadata = own._metadata  # type: ignore[attr-defined]
    return state


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a network's floating-point numbers a type; `to` would make real numbers of complex
    ones too.
    """
    model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
