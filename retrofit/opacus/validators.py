"""Which layers Opacus refuses, and why."""

from __future__ import annotations

import inspect

from opacus.validators.errors import IllegalModuleConfigurationError, ShouldReplaceModuleError, UnsupportedModuleError
from opacus.validators.utils import register_module_validator
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import nn

from retrofit import layers
from retrofit.layers.batch_norm import RunningNormality
from retrofit.layers.batch_statistics_mixin import BatchStatisticsMixin

OF_BATCHES: list[type[nn.Module]] = [
    found for found in vars(layers).values() if inspect.isclass(found) and issubclass(found, BatchStatisticsMixin)
]
OF_SAMPLES: list[type[nn.Module]] = [
    layers.FrozenBatchNorm,
    layers.FrozenBatchNormAct,
    layers.GroupNormalNorm,
    layers.GroupNormalNormAct,
    layers.InstanceNormalNorm1d,
    layers.InstanceNormalNorm2d,
    layers.InstanceNormalNorm3d,
    layers.LayerNormalNorm,
    layers.LayerNormalNorm2d,
    layers.LayerNormalNormAct,
    layers.LayerNormalNormAct2d,
    layers.MigratedGroupNorm,
    layers.MigratedGroupNormAct,
    layers.ProxyNorm,
    layers.WeightStandardizedConv1d,
    layers.WeightStandardizedConv2d,
    layers.WeightStandardizedConv3d,
]
"""The layers whose outputs for one sample no other sample changes."""


@register_module_validator([*OF_BATCHES, BatchNormAct2d, SyncBatchNormAct])
def refuse_batch_statistics(module: nn.Module) -> list[UnsupportedModuleError]:
    """Refuse layers whose statistics span the batch."""
    what = type(module).__name__
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
