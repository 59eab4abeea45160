"""What a run sets up before its first step: devices and processes, and the layers' momentum and noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit.errors import UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.running_statistics import estimated_layers
from retrofit.layers import NormalityMixin
from retrofit.layers.batch_norm import RunningNormality
from retrofit.networks.models import odd_strengths
from retrofit.surgery import strength_layers

_OLD = 0.05  # share of the source's running statistics at the end of a run, above which the user is warned


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Set up the run that `torchrun` or `accelerate launch` started; a UsageError names a missing device or tracker."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if recipe.device not in (None, "cpu") and (present is None or recipe.device != present.type):
        have = f"there is {present.type}" if present else "there is no accelerator"
        raise UsageError(f"cannot use `device={recipe.device!r}`: {have}; leave it out or use cpu")
    cpu = recipe.device == "cpu" or present is None
    precision = "no"
    if recipe.amp:
        precision = {"bfloat16": "bf16", "float16": "fp16", None: "bf16" if cpu else "fp16"}[recipe.amp_dtype]
        if cpu and precision == "fp16":
            raise UsageError("mixed precision on a CPU is bfloat16's; drop `amp_dtype='float16'`")
    trackers = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    if missing := [name for name in recipe.log_with if name not in trackers]:
        have = f"installed here: {', '.join(trackers)}" if trackers else "none is installed here"
        raise UsageError(
            f"`log_with={missing[:1]!r}` is no tracker of accelerate that can be used ({have}); install it"
        )
    return Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=recipe.grad_accum_steps,
        log_with=recipe.log_with or None,
        project_dir=str(folder),
    )


def adjust_layers(model: nn.Module, recipe: Recipe, batches: int, note: Callable[[str], None]) -> None:
    """Set the layers' momentum and kind of noise as a recipe says, and note which of its settings do nothing."""
    for module in model.modules():
        if recipe.bn_momentum is not None and isinstance(module, _NormBase):
            module.momentum = recipe.bn_momentum
        if recipe.noise_kind is not None and isinstance(module, NormalityMixin):
            module.noise_kind = recipe.noise_kind
    if recipe.precise_bn is None:
        momenta = [m.momentum for m in model.modules() if isinstance(m, RunningNormality) and m.momentum is not None]
        if momenta and (old := (1 - min(momenta)) ** batches) > _OLD:
            note(
                f"warning: running statistics move by {min(momenta):g} a batch, so after {batches} batches {old:.0%} "
                "of them are those from before; raise `bn_momentum`"
            )
    elif not estimated_layers(model):
        note("no layer of the network tracks batch statistics: `precise_bn` does nothing")
    if not strength_layers(model):
        note("no layer of the network has a strength: this is plain training")
    elif (recipe.noise or recipe.noise_kind) and not draws_noise(model):
        note("no layer of the network draws noise: `noise` and `noise_kind` of the recipe do nothing")
    if recipe.strength_sched == "off" and (odd := odd_strengths(model)):
        note(f"warning: {odd}")


def draws_noise(model: nn.Module) -> bool:
    """Whether a layer of the network draws noise in training."""
    return any(isinstance(module, NormalityMixin) for module in model.modules())
