"""Fine-tuning: walk a converted network from its old layers to the new ones."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrofit.finetune.distill import Distillation
    from retrofit.finetune.loop import finetune
    from retrofit.finetune.recipe import Recipe
    from retrofit.finetune.strength import StrengthSchedule
    from retrofit.finetune.sync import local_norms, sync_norms
    from retrofit.finetune.watch import Result, Watcher

_HOME = {
    "Distillation": "distill",
    "Recipe": "recipe",
    "Result": "watch",
    "StrengthSchedule": "strength",
    "Watcher": "watch",
    "finetune": "loop",
    "local_norms": "sync",
    "sync_norms": "sync",
}

__all__ = ["Distillation", "Recipe", "Result", "StrengthSchedule", "Watcher", "finetune", "local_norms", "sync_norms"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first asked for: a schedule alone needs neither timm nor accelerate."""
    if name in _HOME:
        return getattr(importlib.import_module(f"retrofit.finetune.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
