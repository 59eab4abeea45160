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

    def _load_from_state_dict(self, *args: Any) -> None:
        _read(self, *args)
        super()._load_from_state_dict(*args)


def hold_settings(module: nn.Module, settings: Mapping[str, Callable[[float], Any]], device: Any = None) -> None:
    """Let the state dict of a layer, by hooks if it is a library's, hold some of its attributes. `settings` has for
    each a function that makes its value of a stored number, or raises a ValueError.
    """
    if "_held_settings" not in vars(module) and not isinstance(module, SettingsMixin):
        module.register_state_dict_pre_hook(_write)
        module.register_load_state_dict_pre_hook(_read)
    vars(module)["_held_settings"] = dict(settings)
    for name in settings:
        module.register_buffer(PREFIX + name, torch.zeros((), dtype=torch.float32, device=device))
    _write(module)  # a trace saves the buffers as they are


def check_groups(channels: int, groups: float) -> int:
    """Return the whole number of groups if it divides the channels; averages of state dicts are rounded."""
    whole = round(groups)
    if abs(groups - whole) > 1e-3 or whole < 1 or channels % whole:
        raise ValueError(f"{groups:g} groups do not divide {channels} channels")
    return whole


@torch.no_grad()
def _write(module: nn.Module, *_: Any) -> None:
    """Bring the buffers up to date with the attributes, before they are saved."""
    for name in vars(module).get("_held_settings", ()):
        value, buffer = getattr(module, name), module.get_buffer(PREFIX + name)
        module._buffers[PREFIX + name] = (
            torch.full_like(buffer, value) if buffer.is_inference() else buffer.fill_(value)
        )


def _read(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Set the attributes by what is about to be loaded; a value that the stored type rounds stays exact."""
    _write(module)
    for name, check in vars(module).get("_held_settings", {}).items():
        key, own = prefix + PREFIX + name, torch.tensor(getattr(module, name), dtype=torch.float32, device="cpu")
        stored = state_dict.setdefault(key, module._buffers[PREFIX + name])
        if not isinstance(stored, Tensor) or stored.numel() != 1 or stored.is_meta:
            continue
        if (number := stored.item()) != own.to(stored.dtype).item():
            try:
                setattr(module, name, check(number))
            except (ValueError, OverflowError) as error:
                rest[-1].append(f"{key} holds {number}: {error}")
