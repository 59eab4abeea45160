"""Fine-tuning: walk a converted network from its old layers to the new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.utils import lazy_names

if TYPE_CHECKING:
    from retrofit.finetune.prepare import parameter_groups
    from retrofit.finetune.strength_schedule import StrengthSchedule

__all__ = ["StrengthSchedule", "parameter_groups"]
__getattr__ = lazy_names(  # a schedule alone needs no timm
    __name__, {"prepare": ("parameter_groups",), "strength_schedule": ("StrengthSchedule",)}
)
