"""Fine-tuning: walk a converted network from its old layers to the new ones."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrofit.finetune.batch_statistics import local_norms, sync_norms
    from retrofit.finetune.distillation import Distillation
    from retrofit.finetune.loop import finetune
    from retrofit.finetune.optim import parameter_groups
    from retrofit.finetune.recipe import Recipe
    from retrofit.finetune.run_callback import Result, RunCallback
    from retrofit.finetune.strength_schedule import StrengthSchedule

_HOME = {
    "Distillation": "distillation",
    "Recipe": "recipe",
    "Result": "run_callback",
    "StrengthSchedule": "strength_schedule",
    "RunCallback": "run_callback",
    "finetune": "loop",
    "local_norms": "batch_statistics",
    "parameter_groups": "optim",
    "sync_norms": "batch_statistics",
}

__all__ = [
    "Distillation",
    "Recipe",
    "Result",
    "RunCallback",
    "StrengthSchedule",
    "finetune",
    "local_norms",
    "parameter_groups",
    "sync_norms",
]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first asked for: a schedule alone needs neither timm nor accelerate."""
    if name in _HOME:
        return getattr(importlib.import_module(f"retrofit.finetune.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
