"""Fine-tuning: walk a converted network from its old layers to the new ones."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrofit.finetune.batch_statistics import local_norms as local_norms
    from retrofit.finetune.batch_statistics import sync_norms as sync_norms
    from retrofit.finetune.loop import finetune as finetune
    from retrofit.finetune.objective import Distillation as Distillation
    from retrofit.finetune.optim import parameter_groups as parameter_groups
    from retrofit.finetune.recipe import Recipe as Recipe
    from retrofit.finetune.run_callback import Result as Result
    from retrofit.finetune.run_callback import RunCallback as RunCallback
    from retrofit.finetune.strength_schedule import StrengthSchedule as StrengthSchedule

_HOME = {
    "Distillation": "objective",
    "Recipe": "recipe",
    "Result": "run_callback",
    "RunCallback": "run_callback",
    "StrengthSchedule": "strength_schedule",
    "finetune": "loop",
    "local_norms": "batch_statistics",
    "parameter_groups": "optim",
    "sync_norms": "batch_statistics",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import the public names when they are first asked for: a schedule alone needs neither timm nor accelerate."""
    if name in _HOME:
        return getattr(importlib.import_module(f"retrofit.finetune.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
