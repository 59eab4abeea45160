"""Settings of normalization layers on which only training depends: read for a file, and set again."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from retrofit.layers.noise import check_noise, check_noise_kind
from retrofit.layers.normality_mixin import NormalityMixin


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
    return {
        name: {key: values[key] for key in SETTINGS if key in values}
        for name, values in rows.items()
    }


def set_training_settings(model: nn.Module, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Give layers what `training_settings` returned; AttributeError, TypeError or ValueError for
    anything else.
    """
    for name, values in settings.items():
        layer = model.get_submodule(name)
        for key, value in values.items():
            if key in vars(layer):
                setattr(layer, key, SETTINGS[key](value))
