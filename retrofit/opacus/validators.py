"""Which layers Opacus refuses, and why."""

from __future__ import annotations

import inspect
from typing import Any

from opacus.utils.module_utils import trainable_modules
from opacus.validators import ModuleValidator
from opacus.validators.errors import IllegalModuleConfigurationError, ShouldReplaceModuleError, UnsupportedModuleError
from opacus.validators.utils import register_module_validator
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from retrofit import layers
from retrofit.layers.batch_norm import BatchStatisticsMixin, RunningNormality
from retrofit.layers.sample_norms import _InstanceNormalNorm
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.utils.text import ROOT, shortlist

_OURS = [found for found in vars(layers).values() if inspect.isclass(found)]
_NORMS = (layers.FrozenBatchNorm, layers.GroupNormalNorm, layers.LayerNormalNorm, layers.MigratedGroupNorm)
_INDEPENDENT = (*_NORMS, _InstanceNormalNorm, layers.ProxyNorm, WeightStandardization)

OF_BATCHES: list[type[nn.Module]] = [found for found in _OURS if issubclass(found, BatchStatisticsMixin)]
OF_SAMPLES: list[type[nn.Module]] = [found for found in _OURS if issubclass(found, _INDEPENDENT)]
"""The layers whose outputs for one sample no other sample changes."""


@register_module_validator([*OF_BATCHES, BatchNormAct2d, SyncBatchNormAct])
def refuse_batch_statistics(module: nn.Module) -> list[UnsupportedModuleError]:
    """Refuse layers whose statistics span the batch."""
    what = type(module).__name__
    if getattr(module, "frozen", False):
        why = "is frozen, and Opacus gives what evaluates no gradients of its samples"
        fix = "set requires_grad of its weight and bias to False, or convert the source network to frozen"
        return [IllegalModuleConfigurationError(f"{what} {why}; {fix}")]
    fix = "ModuleValidator.fix(model) replaces it"
    if type(module) in OF_BATCHES:
        fix = "convert the source network to ln, gn or frozen instead"
    return [ShouldReplaceModuleError(f"{what} normalizes each sample by its batch, so no gradient is one's own; {fix}")]


@register_module_validator(OF_SAMPLES)
def refuse_randomness(module: nn.Module) -> list[UnsupportedModuleError]:
    """Refuse running statistics that move in training, and noise: gradients come from a second run of the layer."""
    what = type(module).__name__
    drop = getattr(module, "drop", None)
    if isinstance(module, RunningNormality) and module.track_running_stats:
        return [ShouldReplaceModuleError(f"{what} averages statistics of private samples; build it without tracking")]
    if getattr(module, "noise", 0) > 0:
        return [IllegalModuleConfigurationError(f"{what} adds noise of its own; set its noise to 0")]
    if getattr(drop, "p", 0) or getattr(drop, "drop_prob", 0):
        return [IllegalModuleConfigurationError(f"{what} holds a dropout; set its `drop` to nn.Identity()")]
    return []


def over_batches(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the layers that normalize by the batch as they stand, whether or not they are trained."""
    return {
        name or ROOT: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    }


def refusal(found: dict[str, nn.Module]) -> str:
    """Say what is wrong with layers over batches, and what to do."""
    kinds = shortlist(sorted({type(layer).__name__ for layer in found.values()}))
    held = "call retrofit.freeze_norms(model), or convert the source network to frozen"
    if any(layer.running_mean is None for layer in found.values()):
        held = "build those without running statistics with track_running_stats=True and train them; then " + held
    return f"{kinds} normalizes each sample by its batch, trained or not ({shortlist(list(found))}); {held}"


def _validate(cls: type[ModuleValidator], module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
    """Opacus's check of the trained layers, and ours of the others: they too mix the samples."""
    errors: list[UnsupportedModuleError] = _opacus_validate(module)
    checked = [layer for _, layer in trainable_modules(module) if type(layer) in cls.VALIDATORS]
    if rest := {name: layer for name, layer in over_batches(module).items() if layer not in checked}:
        errors.append(ShouldReplaceModuleError(refusal(rest)))
    if strict and errors:
        raise UnsupportedModuleError(errors)
    return errors


# Validators can be registered, but hear of trained layers of their very type alone.
_opacus_validate: Any = ModuleValidator.validate
ModuleValidator.validate = classmethod(_validate)
