"""Import this to prepare Opacus (1.6) for the layers: it registers validators, a fixer and
per-sample gradients.

    import retrofit.opacus
    model = ModuleValidator.fix(model)            # BatchNorm keeps its trained function; see
    `fix_batch_norm` model, optimizer, loader = PrivacyEngine().make_private(module=model, ...)

- The validator refuses layers that mix the samples of a batch: bnn, dbn, dbnn, and timm's
BatchNormAct2d.
- GradSampleModule accepts batch-independent converted networks as they are, at any strength, in
mode "hooks". Modes
  "functorch" and "ew" accept them after `retrofit.plain`, and accept the layers that the fixer puts
  in for BatchNorm.

Running statistics are constants here. They are part of the model that training starts from, and
that model must not have seen the private data.
"""

import copy
import inspect
from collections import OrderedDict
from typing import Any

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.utils import register_grad_sampler
from opacus.utils.module_utils import has_trainable_params, trainable_modules
from opacus.validators import ModuleValidator, batch_norm
from opacus.validators.errors import (
    IllegalModuleConfigurationError,
    ShouldReplaceModuleError,
    UnsupportedModuleError,
)
from opacus.validators.utils import register_module_fixer, register_module_validator
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from retrofit import layers
from retrofit.errors import UsageError
from retrofit.layers.batch_norm import BatchStatisticsMixin, RunningNormality
from retrofit.layers.frozen_batch_norm import ConstantAffine, TrainedAffine
from retrofit.layers.proxy_norm import ProxyNorm
from retrofit.layers.sample_norms import _InstanceNormalNorm
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery import convert, set_strength
from retrofit.surgery.plain import plain_layer
from retrofit.utils.text import ROOT, shortlist

__all__ = ["fix_batch_norm"]

_OURS = [found for found in vars(layers).values() if inspect.isclass(found)]
_NORMS = (
    layers.FrozenBatchNorm,
    layers.GroupNormalNorm,
    layers.LayerNormalNorm,
    layers.MigratedGroupNorm,
)
_OTHERS = (_InstanceNormalNorm, ProxyNorm, WeightStandardization)
_OF_BATCHES: list[type[nn.Module]] = [
    found for found in _OURS if issubclass(found, BatchStatisticsMixin)
]
# The layers whose outputs for one sample no other sample changes.
_OF_SAMPLES: list[type[nn.Module]] = [
    found for found in _OURS if issubclass(found, (*_NORMS, *_OTHERS))
]


@register_module_validator([*_OF_BATCHES, BatchNormAct2d, SyncBatchNormAct])
def _refuse_batch_statistics(module: nn.Module) -> list[UnsupportedModuleError]:
    what = type(module).__name__
    if getattr(module, "frozen", False):
        why = "is frozen, and Opacus gives what evaluates no gradients of its samples"
        fix = "set requires_grad of its weight and bias to False, or convert the source network to frozen"
        return [IllegalModuleConfigurationError(f"{what} {why}; {fix}")]
    ours = type(module) in _OF_BATCHES
    fix = (
        "convert the source network to ln, gn or frozen instead"
        if ours
        else "ModuleValidator.fix(model) replaces it"
    )
    return [
        ShouldReplaceModuleError(
            f"{what} normalizes each sample by its batch, so no gradient is one's own; {fix}"
        )
    ]


@register_module_validator(_OF_SAMPLES)
def _refuse_randomness(module: nn.Module) -> list[UnsupportedModuleError]:
    """Refuse running statistics that move in training, and noise: gradients come from a second run
    of the layer.
    """
    what = type(module).__name__
    drop = getattr(module, "drop", None)
    if isinstance(module, RunningNormality) and module.track_running_stats:
        return [
            ShouldReplaceModuleError(
                f"{what} averages statistics of private samples; build it without tracking"
            )
        ]
    if getattr(module, "noise", 0) > 0:
        return [
            IllegalModuleConfigurationError(f"{what} adds noise of its own; set its noise to 0")
        ]
    if getattr(drop, "p", 0) or getattr(drop, "drop_prob", 0):
        return [
            IllegalModuleConfigurationError(
                f"{what} holds a dropout; set its `drop` to nn.Identity()"
            )
        ]
    return []


def _over_batches(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the layers that normalize by the batch as they stand, whether or not they
    are trained.
    """
    return {
        name or ROOT: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    }


def _refusal(found: dict[str, nn.Module]) -> str:
    kinds = shortlist(sorted({type(layer).__name__ for layer in found.values()}))
    held = "call retrofit.freeze_norms(model), or convert the source network to frozen"
    if any(layer.running_mean is None for layer in found.values()):
        held = (
            "build those without running statistics with track_running_stats=True and train them; then "
            + held
        )
    return f"{kinds} normalizes each sample by its batch, trained or not ({shortlist(list(found))}); {held}"


def _validate_network(
    cls: type[ModuleValidator], module: nn.Module, *, strict: bool = False
) -> list[UnsupportedModuleError]:
    """Opacus's check of the trained layers, and ours of the others: they too mix the samples."""
    errors: list[UnsupportedModuleError] = _opacus_validate(module)
    checked = [layer for _, layer in trainable_modules(module) if type(layer) in cls.VALIDATORS]
    if rest := {
        name: layer for name, layer in _over_batches(module).items() if layer not in checked
    }:
        errors.append(ShouldReplaceModuleError(_refusal(rest)))
    if strict and errors:
        raise UnsupportedModuleError(errors)
    return errors


@register_module_fixer(
    [
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
        BatchNormAct2d,
        SyncBatchNormAct,
    ]
)
def fix_batch_norm(module: Any, **kwargs: Any) -> nn.Module:
    """Return plain layers that replace a torch or timm BatchNorm, with its statistics as constants.

    Args:
        module: The BatchNorm.
        **kwargs: Arguments passed to `ModuleValidator.fix(model, ...)`. `to`: "frozen" keeps the
            function exactly, as a constant affine map with trainable gamma and beta; "ln" and "gn"
            normalize each sample, and stay close to the trained function. Default: "frozen" for a
            trained layer, "ln" for an untrained one. `num_groups`: groups for "gn", which becomes
            the default. `replace_bn_with_in`: use Opacus's own fixer.

    Raises:
        UsageError: If `to` is a target that Opacus cannot train.
    """
    if kwargs.get("replace_bn_with_in") or module.running_mean is None:
        own: nn.Module = batch_norm.fix(module, **kwargs)
        return nn.Sequential(own, module.drop, module.act) if hasattr(module, "act") else own
    var = module.running_var
    trained = bool(module.running_mean.any()) or not torch.equal(var, torch.ones_like(var))
    groups = kwargs.get("num_groups")
    to = kwargs.get("to") or ("gn" if groups else "frozen" if trained else "ln")
    if to not in ("frozen", "ln", "gn"):
        raise UsageError(f"`to={to!r}` is nothing that Opacus trains here; choose frozen, ln or gn")
    options: dict[str, Any] = {"groups": groups} if to == "gn" else {}
    holder, _ = convert(nn.Sequential(module), to, check=False, **options)
    if to != "frozen":
        set_strength(holder, 1.0)
    new = plain_layer(holder.get_submodule("0"))
    assert new is not None
    return new.train(module.training)


@register_grad_sampler(_OF_SAMPLES)
def _per_sample_gradients(
    layer: nn.Module, activations: list[Tensor], backprops: Tensor
) -> dict[Any, Tensor]:
    """Return, by parameter of one of our layers, the gradients of each sample, (N, *).

    A ProxyNorm's include those that reach gamma and beta of its norm through the proxy; where the
    norm holds it, the norm's own do.
    """
    run = _without_hooks(layer)
    norm = layer.norm if isinstance(layer, ProxyNorm) else None
    if norm is not None and layer not in norm.modules():
        run._modules["followed"] = new = _without_hooks(norm)
        run._norm = (new,)
    parameters = {
        name: parameter
        for name, parameter in run.named_parameters()
        if parameter.requires_grad
        # Opacus asks a child for its own
        and "." not in name.removeprefix("followed.")
    }
    held = (*run.named_parameters(), *run.named_buffers())
    others = {name: tensor for name, tensor in held if name not in parameters}

    def loss(trained: dict[str, Tensor], x: Tensor, backprop: Tensor) -> Tensor:
        out = functional_call(run, {**others, **trained}, (x.unsqueeze(0),))
        return (out * backprop.unsqueeze(0)).sum()

    with torch.enable_grad():
        detached = {name: p.detach() for name, p in parameters.items()}
        gradients = vmap(grad(loss), (None, 0, 0))(
            detached, activations[0].to(backprops.dtype), backprops
        )
    return {parameters[name]: value for name, value in gradients.items()}


@register_grad_sampler(TrainedAffine)
def _affine_gradients(
    layer: TrainedAffine, activations: list[Tensor], backprops: Tensor
) -> dict[Any, Tensor]:
    gradients: dict[Any, Tensor] = {}
    if layer.weight.requires_grad:
        gradients[layer.weight] = torch.einsum("nc...->nc", activations[0] * backprops)[
            ..., None, None
        ]
    if layer.bias is not None and layer.bias.requires_grad:
        gradients[layer.bias] = torch.einsum("nc...->nc", backprops)
    return gradients


def _without_hooks(module: nn.Module) -> Any:
    """Return a copy of a module around the same tensors, which calls no hooks."""
    new = copy.copy(module)
    for store in ("_parameters", "_buffers"):
        vars(new)[store] = dict(vars(module)[store])
    for key in [key for key in vars(new) if "_hooks" in key]:
        vars(new)[key] = OrderedDict()
    new._modules = {
        name: child and _without_hooks(child) for name, child in module._modules.items()
    }
    for child in new.modules():
        if isinstance(child, ProxyNorm) and child.norm is module:
            child._norm = (new,)
    return new


def _validate_hooks(
    cls: type, module: nn.Module, *, strict: bool = False
) -> list[NotImplementedError]:
    """Opacus's check for buffers, which may hold statistics, but those of our layers count as
    constants.

    Layers that mix the samples are refused too, trained or not.
    """
    mixing = _over_batches(module)
    ours = (*_OF_SAMPLES, ConstantAffine)
    constants = {
        id(buffer)
        for layer in module.modules()
        if type(layer) in ours
        for buffer in layer.buffers()
    }
    errors = [
        NotImplementedError(
            f"{name or 'the model'} ({type(layer).__name__}) is trained and holds buffers"
        )
        for name, layer in trainable_modules(module)
        if any(id(buffer) not in constants for buffer in layer.buffers())
        and layer not in mixing.values()
    ]
    if mixing:
        errors.append(NotImplementedError(_refusal(mixing)))
    errors += [
        NotImplementedError(
            f"{name} gives gamma and beta a gradient but has no parameters trained: no hook reaches it"
        )
        for name, layer in module.named_modules()
        if isinstance(layer, ProxyNorm) and not has_trainable_params(layer)
        if layer.norm is not None
        and has_trainable_params(layer.norm)
        and layer not in layer.norm.modules()
    ]
    if strict and errors:
        raise NotImplementedError(errors)
    return errors


def _add_hooks(self: GradSampleHooks, **options: Any) -> None:
    """Opacus's hooks, on modules that leave what they are given as it is: an output behind a hook
    cannot be changed.
    """
    for module in self._module.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False
    _opacus_add_hooks(self, **options)


# Layers can be registered, but the validator hears of trained layers of their very type alone; and
# which buffers are constants, and what may not happen in place, cannot be.
_opacus_validate: Any = ModuleValidator.validate
_opacus_add_hooks = GradSampleHooks.add_hooks
ModuleValidator.validate = classmethod(_validate_network)
GradSampleHooks.validate = classmethod(_validate_hooks)
GradSampleHooks.add_hooks = _add_hooks
