"""Fine-tuning: walk a converted network from its old layers to the new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.utils.lazy import lazy_names

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

_HOMES = {
    "batch_statistics": ("local_norms", "sync_norms"),
    "loop": ("finetune",),
    "objective": ("Distillation",),
    "optim": ("parameter_groups",),
    "recipe": ("Recipe",),
    "run_callback": ("Result", "RunCallback"),
    "strength_schedule": ("StrengthSchedule",),
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = lazy_names(__name__, _HOMES)  # a schedule alone needs neither timm nor accelerate
