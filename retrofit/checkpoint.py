"""Weights from files that others wrote."""

from __future__ import annotations

import argparse
import pickle
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.library import one_line, shortlist

# Where training scripts put the weights, the averaged ones first (timm.models.load_state_dict's order).
_NESTS = ("state_dict_ema", "model_ema", "state_dict", "model")
_COUNTER = "num_batches_tracked"
_ROLES = {"weight", "bias", "running_mean", "running_var"}


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint, without executing anything from it.

    Nested training checkpoints are opened as timm opens them: averaged weights before plain ones. The prefixes of
    DistributedDataParallel and torch.compile are removed.

    Args:
        path: A .safetensors file, or what torch.save wrote (.pth, .pt, .bin, .tar, ...).

    Raises:
        RetrofitError: If the file is missing, a folder, damaged, holds more than weights, or no tensor.
    """
    from timm.models import clean_state_dict

    file = Path(path)
    if file.is_dir():
        raise RetrofitError(f"{path} is a folder; name the checkpoint file in it")
    if not file.is_file():
        raise RetrofitError(f"there is no checkpoint at {path}; check the path")
    if file.suffix in {".npz", ".npy"}:
        raise RetrofitError(f"{path} is a NumPy file; give a .safetensors, .pth, .pt or .bin checkpoint")
    content = _safetensors(file) if file.suffix == ".safetensors" else _pickle(file)
    state = clean_state_dict(dict(_unwrapped(content, path)))
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _safetensors(file: Path) -> dict[str, Tensor]:
    import safetensors
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (safetensors.SafetensorError, OSError) as error:
        raise RetrofitError(f"{file} is not a whole safetensors file ({one_line(error)}); fetch it again") from error


def _pickle(file: Path) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises anything on a damaged file
        if isinstance(error, pickle.UnpicklingError) and (named := _forbidden(file, str(error))):
            raise RetrofitError(
                f"{file} holds Python objects ({named}), not only weights, and loading them could run code; "
                "save the model's state_dict() alone"
            ) from error
        if "TorchScript" in str(error):
            raise RetrofitError(
                f"{file} is a TorchScript archive, not a checkpoint; save the model's state_dict() instead"
            ) from error
        raise RetrofitError(f"{file} is not a whole checkpoint that torch can read; fetch or save it again") from error


def _forbidden(file: Path, said: str) -> str:
    """Name the Python objects that kept a checkpoint from loading; empty if that was not the reason."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # not the zip format
        _, found, rest = said.partition("Unsupported global: GLOBAL ")
        names = rest.split()[:1] if found else []
    return shortlist(names)


def _unwrapped(content: Any, path: str | Path) -> Mapping[str, Any]:
    """Find the state dict in what a checkpoint holds."""
    if isinstance(content, Mapping):
        for key in _NESTS:
            if _has_tensors(content.get(key)):
                return dict(content[key])
        if _has_tensors(content):
            return content
        nests = [key for key, value in content.items() if _has_tensors(value)]
        if len(nests) == 1:
            return dict(content[nests[0]])
        if nests:
            raise RetrofitError(
                f"{path} holds several sets of weights ({shortlist(list(map(str, nests)))}); save one of them alone"
            )
    raise RetrofitError(f"there are no tensors in {path}; give a checkpoint with a model's state_dict")


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def load_into(model: nn.Module, state: Mapping[str, Tensor], match: Literal["name", "order"] = "name") -> list[str]:
    """Load a checkpoint's tensors into a network: all of them, into all of its tensors.

    Only BatchNorm's `num_batches_tracked` may be absent on either side.

    Args:
        model: The network, changed in place.
        state: Tensors by name.
        match: "name", or "order" to pair tensors by position and shape whatever they are called. By name, what timm's
            own converter for the architecture makes of foreign names and sizes is accepted too.

    Returns:
        Warnings for the user: NaN or infinite weights, pairs that look wrong.

    Raises:
        UsageError: If `match` is neither.
        RetrofitError: If the tensors do not fit; the network may then be half loaded.
    """
    if match not in ("name", "order"):
        raise UsageError(f"unknown --match {match!r}; choose name or order")
    said = _load_by_name(model, state) if match == "name" else _load_by_order(model, state)
    broken = [
        name
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if broken:
        said.append(f"{len(broken)} tensors of the checkpoint hold NaN or infinite values: {shortlist(broken)}")
    return said


def _load_by_name(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    misfit = _Misfit.of(model, state)
    if misfit:
        converted = _converted_by_timm(model, state)
        if converted is None or _Misfit.of(model, converted):
            raise RetrofitError(misfit.explain(model, state))
    return []


class _Misfit:
    """What does not fit between a network and a checkpoint."""

    def __init__(self, missing: list[str], unexpected: list[str], reshaped: list[str]) -> None:
        self.missing = [name for name in missing if not name.endswith(_COUNTER)]
        self.unexpected = [name for name in unexpected if not name.endswith(_COUNTER)]
        self.reshaped = reshaped

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    @classmethod
    def of(cls, model: nn.Module, state: Mapping[str, Tensor]) -> _Misfit:
        """Load what can be loaded: torch's own hooks may rename what older versions of a network called otherwise."""
        own = _tensors(model)
        reshaped = [name for name in own if name in state and state[name].shape != own[name].shape]
        if reshaped:
            return cls([n for n in own if n not in state], [n for n in state if n not in own], reshaped)
        try:
            result = model.load_state_dict(dict(state), strict=False)
        except RuntimeError as error:
            raise RetrofitError(
                f"the checkpoint does not fit this {type(model).__name__} ({one_line(error)}); check whose it is"
            ) from error
        return cls(result.missing_keys, result.unexpected_keys, [])

    def explain(self, model: nn.Module, state: Mapping[str, Tensor]) -> str:
        """Say what differs, and what the user may try."""
        own = _tensors(model)
        shapes = [f"{name} {list(state[name].shape)} for {list(own[name].shape)}" for name in self.reshaped]
        parts = ((self.missing, self.missing, "missing"), (self.unexpected, self.unexpected, "unexpected"))
        listed = [f"{len(names)} {word} ({shortlist(shown)})" for names, shown, word in parts if names]
        if shapes:
            listed.append(f"{len(shapes)} of another shape ({shortlist(shapes)})")
        return f"the checkpoint does not fit this {type(model).__name__}: {', '.join(listed)}; {self._hint(own, state)}"

    def _hint(self, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
        if self.reshaped and not self.missing and not self.unexpected:
            pairs = [(own[name].shape, state[name].shape) for name in self.reshaped]
            classes = {theirs[0] for ours, theirs in pairs if ours[1:] == theirs[1:]}
            if len(classes) == 1 and all(ours[1:] == theirs[1:] for ours, theirs in pairs):
                return f"only the classifier differs: pass --num-classes {classes.pop()}"
            ours, theirs = pairs[0]
            if len(pairs) == 1 and len(ours) == 4 and (ours[0], *ours[2:]) == (theirs[0], *theirs[2:]):
                return f"only the input channels differ: pass --in-chans {theirs[1]}"
        if _order_problem(own, state) is None:
            return "all tensors pair up in order and shape: pass --match order"
        return "check which network the checkpoint is of"


def _converted_by_timm(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Translate a checkpoint's names and sizes with the function that timm has for the architecture, if it has one."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return None
    try:
        converted = convert(dict(state), model)
    except Exception:  # it was written for other checkpoints, and fails on this one in its own way
        return None
    return {name: value for name, value in converted.items() if isinstance(value, Tensor)}


def _load_by_order(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    own = _tensors(model)
    if problem := _order_problem(own, state):
        raise RetrofitError(f"the checkpoint does not fit this {type(model).__name__} in order: {problem}")
    pairs = list(zip(_ordinary(own), _ordinary(state), strict=True))
    counters = [[name for name in names if name.endswith(_COUNTER)] for names in (own, state)]
    if len(counters[0]) == len(counters[1]):
        pairs += zip(*counters, strict=True)
    model.load_state_dict({ours: state[theirs] for ours, theirs in pairs}, strict=False)
    odd = [f"{theirs} as {ours}" for ours, theirs in pairs if _roles_differ(ours, theirs)]
    return [f"{len(odd)} tensors were paired against their names: {shortlist(odd)}"] if odd else []


def _order_problem(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str | None:
    """Say where the tensors of a network and of a checkpoint stop pairing up; None if they all do."""
    ours, theirs = _ordinary(own), _ordinary(state)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        if own[a].shape != state[b].shape:
            return (
                f"tensor {k} is {a} {list(own[a].shape)} in the network, {b} {list(state[b].shape)} in the checkpoint; "
                "check which network it is of"
            )
    if len(ours) != len(theirs):
        k = min(len(ours), len(theirs))
        side, name = ("network", ours[k]) if len(ours) > k else ("checkpoint", theirs[k])
        return (
            f"the network has {len(ours)} tensors, the checkpoint {len(theirs)} (the first left over is {name} of the "
            f"{side}); check which network it is of"
        )
    return None


def _roles_differ(ours: str, theirs: str) -> bool:
    a, b = ours.rpartition(".")[2], theirs.rpartition(".")[2]
    return a != b and {a, b} <= _ROLES


def _ordinary(names: Mapping[str, Tensor]) -> list[str]:
    return [name for name in names if not name.endswith(_COUNTER)]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
