"""Callbacks that raise the strength in other people's trainers; each needs its own package, and is imported alone.

    trainer = lightning.Trainer(callbacks=[retrofit.callbacks.LightningStrength(ramp=0.5)])
    trainer = transformers.Trainer(..., callbacks=[retrofit.callbacks.TransformersStrength(ramp=0.5)])

Their arguments are `StrengthSchedule`'s; `total_steps` is the trainer's own unless given. The shape "there-and-back" is
refused: at its turn it needs `retrofit.recentre`, and images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.utils import lazy_names

if TYPE_CHECKING:
    from retrofit.callbacks.lightning import LightningStrength
    from retrofit.callbacks.transformers import TransformersStrength

__all__ = ["LightningStrength", "TransformersStrength"]

__getattr__ = lazy_names(__name__, {"lightning": ("LightningStrength",), "transformers": ("TransformersStrength",)})
