"""Settings of a layer that its state dict holds: plain Python values that its function depends on, beside its tensors.

A layer reads such a value as an attribute (`layer.alpha`), which costs nothing at run time. Its state dict holds it as
a 0-dim buffer, `setting_alpha`, so that a layer which loads the state dict of another becomes that function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Kind = Callable[[Any], Any] | tuple[str, ...]
"""What a setting may be: a function that returns a number or raises ValueError; or words, held by their index."""

PREFIX = "setting_"


class SettingsMixin(nn.Module):
    """A layer of ours, whose methods write and read what `hold_settings` names."""

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _write(self)
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _read(self, state_dict, prefix, *args)
        super()._load_from_state_dict(state_dict, prefix, *args)


def hold_settings(module: nn.Module, settings: Mapping[str, Kind], device: Any = None) -> None:
    """Let the state dict of `module` hold some of its attributes; state dicts that lack them leave them as they are.

    Args:
        module: The layer; the attributes are set.
        settings: By attribute, what it may be.
        device: Device of the buffers.
    """
    if "_held_settings" not in vars(module):
        vars(module).update(_held_settings={}, _written_settings={})
        if not isinstance(module, SettingsMixin):  # a library's layer
            module.register_state_dict_pre_hook(_write)
            module.register_load_state_dict_pre_hook(_read)
    vars(module)["_held_settings"].update(settings)
    for name in settings:
        module.register_buffer(PREFIX + name, torch.empty((), dtype=torch.float32, device=device))
    _write(module)


def move_settings(module: nn.Module, device: torch.device) -> None:
    """Make the buffers of the settings anew on `device`, from the meta device for example."""
    held: dict[str, Kind] = getattr(module, "_held_settings", {})
    if held:
        hold_settings(module, held, device)


def check_groups(channels: int, groups: int) -> int:
    """Return `groups` if they divide the channels."""
    if groups < 1 or channels % groups:
        raise ValueError(f"{groups} groups do not divide {channels} channels")
    return groups


def later_entries(model: nn.Module) -> set[str]:
    """Names of the entries of `model`'s state dict that the state dicts of earlier versions lack."""
    found = set()
    for name, module in model.named_modules():
        entries = [PREFIX + setting for setting in getattr(module, "_held_settings", {})]
        found |= {f"{name}.{entry}".lstrip(".") for entry in (*entries, *getattr(module, "later_entries", ()))}
    return found


def _write(module: nn.Module, *_: Any) -> None:
    """Bring the buffers up to date with the attributes, which may have been set since."""
    written = vars(module).get("_written_settings", {})
    for name, kind in vars(module).get("_held_settings", {}).items():
        value, buffer = getattr(module, name), module._buffers[PREFIX + name]
        if buffer is None or buffer.is_meta or (name in written and written[name] == value):
            continue
        module._buffers[PREFIX + name] = torch.full_like(buffer, _number(value, kind))
        written[name] = value


def _read(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Set the attributes by what is about to be loaded."""
    _write(module)
    errors: list[str] = rest[-1]
    for name, kind in vars(module).get("_held_settings", {}).items():
        key, own = prefix + PREFIX + name, module._buffers[PREFIX + name]
        found = state_dict.setdefault(key, own)
        if found is own or not isinstance(found, Tensor) or found.numel() != 1 or found.is_meta:
            continue
        number, current = found.item(), getattr(module, name)
        rounded = (
            torch.tensor(_number(current, kind), dtype=dtype, device="cpu").item()
            for dtype in (torch.float32, found.dtype)
        )
        if number in rounded:
            continue  # a value that a buffer's type rounds stays exact
        if math.isfinite(number) and abs(number - round(number)) < 1e-3:  # others average state dicts, and round
            number = round(number)
        try:
            value = kind[int(number)] if isinstance(kind, tuple) else kind(type(current)(number))
        except (ValueError, IndexError, OverflowError) as error:
            errors.append(f"{key} holds {number}: {error}")
            continue
        setattr(module, name, value)
        vars(module)["_written_settings"][name] = value


def _number(value: Any, kind: Kind) -> float:
    return float(kind.index(value) if isinstance(kind, tuple) else value)
