"""What Opacus's validators say of our layers, and of layers that mix samples without being trained.

Opacus has a registry of validators, which hears of trained layers of the registered class alone. So
its checks of a whole network, `ModuleValidator.validate` and `GradSampleHooks.validate`, are
replaced by ours, which call them. There is no registry for these. The same holds for
`GradSampleHooks.add_hooks`, in front of which in-place activations are turned off, and for
`remove_hooks`, behind which they are turned on again.
"""

from collections.abc import Collection
from typing import Any

from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.utils.module_utils import has_trainable_params, trainable_modules
from opacus.validators import ModuleValidator
from opacus.validators.errors import (
    IllegalModuleConfigurationError,
    ShouldReplaceModuleError,
    UnsupportedModuleError,
)
from opacus.validators.utils import register_module_validator
from timm.layers import BatchNormAct2d, EvoNorm2dB0, EvoNorm2dB1, EvoNorm2dB2, SyncBatchNormAct
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from retrofit.layers import ProxyNorm
from retrofit.layers.batch_norm import RunningNormality
from retrofit.layers.frozen_batch_norm import ConstantAffine
from retrofit.layers.sample_norms import _InstanceNormalNorm
from retrofit.opacus.layer_classes import BATCH_DEPENDENT, BATCH_INDEPENDENT
from retrofit.utils.text import ROOT, shortlist

_OF_BATCHES = (_BatchNorm, EvoNorm2dB0, EvoNorm2dB1, EvoNorm2dB2)
# They have running statistics, and do not use them in training.
_AVERAGING = (_InstanceNorm, _InstanceNormalNorm)

opacus_validate: Any = ModuleValidator.validate
_opacus_add_hooks = GradSampleHooks.add_hooks
_opacus_remove_hooks = GradSampleHooks.remove_hooks
# The attribute of Opacus's hooks for the modules that worked in place before.
_IN_PLACE = "_retrofit_in_place"


@register_module_validator([*BATCH_DEPENDENT, BatchNormAct2d, SyncBatchNormAct])
def _refuse_batch_statistics(module: nn.Module) -> list[UnsupportedModuleError]:
    name = type(module).__name__
    if getattr(module, "frozen", False):
        return [
            IllegalModuleConfigurationError(
                f"{name} is frozen, and Opacus gives what evaluates no gradients of its samples; "
                "set requires_grad of its weight and bias to False, or convert the source "
                "network to frozen"
            )
        ]
    remedy = "ModuleValidator.fix(model) replaces it"
    if type(module) in BATCH_DEPENDENT:
        remedy = "convert the source network to ln, gn or frozen instead"
    return [
        ShouldReplaceModuleError(
            f"{name} normalizes each sample by its batch, so no gradient is one's own; {remedy}"
        )
    ]


@register_module_validator(BATCH_INDEPENDENT)
def _refuse_randomness(module: Any) -> list[UnsupportedModuleError]:
    """Refuse running statistics that move in training, and noise: gradients come from a second run
    of the layer.
    """
    name = type(module).__name__
    if isinstance(module, RunningNormality) and module.track_running_stats:
        return [
            ShouldReplaceModuleError(
                f"{name} averages statistics of private samples; build it without tracking"
            )
        ]
    if getattr(module, "noise", 0) > 0:
        return [
            IllegalModuleConfigurationError(f"{name} adds noise of its own; set its noise to 0")
        ]
    dropout = getattr(module, "drop", None)
    if getattr(dropout, "p", 0) or getattr(dropout, "drop_prob", 0):
        return [
            IllegalModuleConfigurationError(
                f"{name} holds a dropout; set its `drop` to nn.Identity()"
            )
        ]
    return []


def _mixes_samples(layer: Any) -> bool:
    """Whether a layer normalizes by the batch as it stands."""
    return isinstance(layer, _OF_BATCHES) and (layer.training or layer.running_var is None)


def _averages_samples(layer: Any) -> bool:
    """Whether a layer normalizes each sample by itself, but averages its statistics into the
    network.
    """
    return isinstance(layer, _AVERAGING) and layer.training and layer.running_mean is not None


def _refusals(model: nn.Module, judged: Collection[nn.Module] = ()) -> list[str]:
    """Return sentences that refuse layers, trained or not, that are none of the `judged` ones."""
    named = {name or ROOT: layer for name, layer in model.named_modules() if layer not in judged}
    mixing = {name: layer for name, layer in named.items() if _mixes_samples(layer)}
    averaging = {name: layer for name, layer in named.items() if _averages_samples(layer)}
    refusals = []
    if mixing:
        refusals.append(_refusal_of_mixing(mixing))
    if averaging:
        refusals.append(
            f"{_classes_of(averaging)} averages statistics of private samples, trained or not "
            f"({shortlist(list(averaging))}); build it with track_running_stats=False"
        )
    return refusals


def _classes_of(layers: dict[str, nn.Module]) -> str:
    return shortlist(sorted({type(layer).__name__ for layer in layers.values()}))


def _refusal_of_mixing(layers: dict[str, nn.Module]) -> str:
    remedy = (
        "call retrofit.freeze_norms(model), or, before you set requires_grad to False, "
        "ModuleValidator.fix(model, to='frozen')"
    )
    if any(type(layer) in BATCH_DEPENDENT for layer in layers.values()):
        # The fixer replaces none of ours.
        remedy = "call retrofit.freeze_norms(model), or convert the source network to frozen"
    if not all(isinstance(layer, _BatchNorm) for layer in layers.values()):
        remedy = "put them in evaluation by `eval()` after each `train()`"
    if any(layer.running_var is None for layer in layers.values()):
        remedy = (
            "build those without running statistics with track_running_stats=True and train them; "
            f"then {remedy}"
        )
    return (
        f"{_classes_of(layers)} normalizes each sample by its batch, trained or not "
        f"({shortlist(list(layers))}); {remedy}"
    )


def _validate_network(
    cls: type[ModuleValidator], module: nn.Module, *, strict: bool = False
) -> list[UnsupportedModuleError]:
    """Opacus's check of the trained layers, and ours of the others: they too mix the samples."""
    errors: list[UnsupportedModuleError] = opacus_validate(module)
    judged = {layer for _, layer in trainable_modules(module) if type(layer) in cls.VALIDATORS}
    errors += [ShouldReplaceModuleError(refusal) for refusal in _refusals(module, judged)]
    if strict and errors:
        raise UnsupportedModuleError(errors)
    return errors


def _validate_hooks(
    cls: type, module: nn.Module, *, strict: bool = False
) -> list[NotImplementedError]:
    """Opacus's check for buffers, which may hold statistics, but those of our layers count as
    constants.

    Layers that mix the samples are refused too, trained or not.
    """
    errors = _errors_of_buffers(module)
    errors += [NotImplementedError(refusal) for refusal in _refusals(module)]
    errors += _errors_of_proxies(module)
    if strict and errors:
        raise NotImplementedError(errors)
    return errors


def _errors_of_buffers(model: nn.Module) -> list[NotImplementedError]:
    """Return an error for each trained layer with buffers that are no constants of ours, but for
    layers that are refused anyway.
    """
    constants = {
        id(buffer)
        for layer in model.modules()
        if type(layer) in (*BATCH_INDEPENDENT, ConstantAffine)
        for buffer in layer.buffers()
    }
    errors = []
    for name, layer in trainable_modules(model):
        if _mixes_samples(layer) or _averages_samples(layer):
            continue
        if any(id(buffer) not in constants for buffer in layer.buffers()):
            errors.append(
                NotImplementedError(
                    f"{name or 'the model'} ({type(layer).__name__}) is trained and holds buffers"
                )
            )
    return errors


def _errors_of_proxies(model: nn.Module) -> list[NotImplementedError]:
    """Return an error for each proxy without trained parameters that hands its norm a gradient."""
    errors = []
    for name, layer in model.named_modules():
        if not isinstance(layer, ProxyNorm) or layer.norm is None or has_trainable_params(layer):
            continue
        if has_trainable_params(layer.norm) and layer not in layer.norm.modules():
            errors.append(
                NotImplementedError(
                    f"{name} gives gamma and beta a gradient but has no parameters trained: no "
                    "hook reaches it"
                )
            )
    return errors


def _add_hooks(self: GradSampleHooks, **options: Any) -> None:
    """Opacus's hooks, on modules that leave their input as it is while they are there: an output
    behind a hook cannot be changed in place.
    """
    modules = list(self._module.modules())
    in_place: Any = [module for module in modules if getattr(module, "inplace", False) is True]
    for module in in_place:
        module.inplace = False
    vars(self)[_IN_PLACE] = in_place
    _opacus_add_hooks(self, **options)


def _remove_hooks(self: GradSampleHooks) -> None:
    _opacus_remove_hooks(self)
    for module in vars(self).pop(_IN_PLACE, ()):
        module.inplace = True


ModuleValidator.validate = classmethod(_validate_network)
GradSampleHooks.validate = classmethod(_validate_hooks)
GradSampleHooks.add_hooks = _add_hooks
GradSampleHooks.remove_hooks = _remove_hooks
