"""Settings that a layer's state dict holds: what its function depends on and no shape shows, as numbers of groups.

A layer reads one as a plain attribute, `layer.alpha`. Its state dict holds it as a 0-dim buffer, `setting_alpha`, so
that a layer which loads the state dict of another becomes that function; one that lacks it leaves the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PREFIX = "setting_"


class SettingsMixin(nn.Module):
    """A layer of ours, whose methods write and read what `hold_settings` names."""

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _write(self)
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _read(self, state_dict, prefix, *args)
        super()._load_from_state_dict(state_dict, prefix, *args)


def hold_settings(module: nn.Module, settings: Mapping[str, Callable[[float], Any]], device: Any = None) -> None:
    """Let the state dict of `module` hold some of its attributes.

    Args:
        module: The layer; the attributes are set.
        settings: By attribute, what takes a number and returns the attribute's value, or raises ValueError.
        device: Device of the buffers.
    """
    if "_held_settings" not in vars(module) and not isinstance(module, SettingsMixin):  # a library's layer
        module.register_state_dict_pre_hook(_write)
        module.register_load_state_dict_pre_hook(_read)
    vars(module).update(_held_settings=dict(settings), _written_settings={})
    for name in settings:
        module.register_buffer(PREFIX + name, torch.zeros((), dtype=torch.float32, device=device))
    _write(module)


def move_settings(module: nn.Module, device: torch.device) -> None:
    """Make the buffers of the settings anew on `device`, from the meta device for example."""
    if "_held_settings" in vars(module):
        hold_settings(module, vars(module)["_held_settings"], device)


def check_groups(channels: int, groups: float) -> int:
    """Return the whole number of groups if it divides the channels; averages of state dicts are rounded."""
    whole = round(groups)
    if abs(groups - whole) > 1e-3 or whole < 1 or channels % whole:
        raise ValueError(f"{groups:g} groups do not divide {channels} channels")
    return whole


def _write(module: nn.Module, *_: Any) -> None:
    """Bring the buffers up to date with the attributes that were set since; the tensors themselves are not read."""
    written = vars(module).get("_written_settings", {})
    for name in vars(module).get("_held_settings", ()):
        value, buffer = getattr(module, name), module._buffers[PREFIX + name]
        if buffer is not None and not buffer.is_meta and written.get(name) != value:
            module._buffers[PREFIX + name] = torch.full_like(buffer, value)
            written[name] = value


def _read(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Set the attributes by what is about to be loaded."""
    _write(module)
    for name, check in vars(module).get("_held_settings", {}).items():
        key, own = prefix + PREFIX + name, getattr(module, name)
        held = state_dict.setdefault(key, module._buffers[PREFIX + name])
        if not isinstance(held, Tensor) or held.numel() != 1 or held.is_meta:
            continue
        number = held.item()
        if number in (torch.tensor(own, dtype=one, device="cpu").item() for one in (torch.float32, held.dtype)):
            continue  # a value that the buffer's type rounds stays exact
        try:
            setattr(module, name, check(number))
            vars(module)["_written_settings"][name] = getattr(module, name)
        except (ValueError, OverflowError) as error:
            rest[-1].append(f"{key} holds {number}: {error}")
