"""Callbacks that raise the strength in other people's trainers; each needs its own package, and is imported alone.

    trainer = lightning.Trainer(callbacks=[retrofit.callbacks.LightningStrength(ramp=0.5)])
    trainer = transformers.Trainer(..., callbacks=[retrofit.callbacks.TransformersStrength(ramp=0.5)])

Their arguments are `StrengthSchedule`'s; `total_steps` is the trainer's own unless given. The shape "there-and-back" is
refused: at its turn it needs `retrofit.recentre`, and images.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrofit.callbacks.lightning import LightningStrength
    from retrofit.callbacks.transformers import TransformersStrength

_HOME = {"LightningStrength": "lightning", "TransformersStrength": "transformers"}

__all__ = ["LightningStrength", "TransformersStrength"]


def __getattr__(name: str) -> Any:
    """Import a callback, and with it its trainer, when it is first asked for."""
    if name in _HOME:
        return getattr(importlib.import_module(f"retrofit.callbacks.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
