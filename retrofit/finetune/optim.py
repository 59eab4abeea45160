"""What is trained, and by which optimizer and schedule of timm's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.layers import FrozenBatchNorm, ProxyNorm, StrengthMixin
from retrofit.layers.frozen_batch_norm import TrainedAffine
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.utils.text import one_line

_FUSED = ("adam", "adamw", "momentum", "nesterov", "sgd")  # torch's: one pass over the weights, and a flag to skip it


def freeze_all_but_norm(model: nn.Module, also: Collection[str] = ()) -> int:
    """Freeze all but converted normalization layers and the parameters named in `also`.

    Return how many numbers are still trained; a RetrofitError if none is.
    """
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, StrengthMixin | FrozenBatchNorm) and not isinstance(module, WeightStandardization):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(True)
    for name, parameter in model.named_parameters():
        if name in also:
            parameter.requires_grad_(True)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not trained:
        raise RetrofitError("freezing all but the converted layers leaves nothing to train; drop `freeze`")
    return trained


def unconverted_norms(model: nn.Module) -> list[nn.Module]:
    """Return the layers with running statistics that are not converted: `freeze_all_but_norm` leaves them out."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and not isinstance(m, StrengthMixin)]


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float | None = None, decay_norms: bool = False
) -> list[dict[str, Any]]:
    """Group parameters as timm does, except that ProxyNorm's own are decayed: for any optimizer of torch's or timm's.

    timm leaves out everything one-dimensional, which these are; the paper decays them (Labatie et al. 2021, appendix
    A.1).

    Args:
        model: The network; what takes no gradient is left out.
        weight_decay: Decay of everything but biases and norms.
        layer_decay: Factor of the learning rate from each layer to the one before; None for none.
        decay_norms: Whether everything is decayed, as both papers do with ResNets.
    """
    affines = {id(module.weight) for module in model.modules() if isinstance(module, TrainedAffine)}  # (C, 1, 1) each
    undecayed = {name for name, parameter in model.named_parameters() if id(parameter) in affines}
    undecayed |= {*getattr(model, "no_weight_decay", lambda: ())()}
    if layer_decay is None:
        groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=undecayed)
    else:
        groups = param_groups_layer_decay(model, weight_decay, no_weight_decay_list=undecayed, layer_decay=layer_decay)
    if decay_norms:
        return [{**group, "weight_decay": weight_decay} for group in groups if group["params"]]
    proxy_norms = [module for module in model.modules() if isinstance(module, ProxyNorm)]
    proxies = {id(parameter) for module in proxy_norms for parameter in (module.proxy_bias, module.proxy_scale)}
    split: list[dict[str, Any]] = []
    for group in groups:
        ours = [parameter for parameter in group["params"] if id(parameter) in proxies]
        others = [parameter for parameter in group["params"] if id(parameter) not in proxies]
        split += [{**group, "params": others}] if others else []
        split += [{**group, "params": ours, "weight_decay": weight_decay}] if ours else []
    return split


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Build the recipe's optimizer over what is trained; a UsageError if timm cannot, or if it has no eps to set."""
    groups = parameter_groups(model, recipe.weight_decay, recipe.layer_decay, recipe.decay_norms)
    given: dict[str, Any] = {"fused": True} if recipe.opt.lower() in _FUSED else {}
    if recipe.opt_eps is not None:
        given["eps"] = recipe.opt_eps
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            groups, recipe.opt, recipe.lr, recipe.weight_decay, recipe.momentum, **given
        )
    except Exception as error:  # optimizers assert, or miss a package
        raise UsageError(
            f"timm cannot build the optimizer {recipe.opt} ({one_line(error)}); choose another `opt`"
        ) from error
    if recipe.opt_eps is not None and "eps" not in optimizer.defaults:
        raise UsageError(f"the optimizer {recipe.opt} has no eps; leave `opt_eps` out")
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> Any:
    """Build the recipe's schedule of the learning rate; `step_update(steps done)` moves it. None: a constant rate."""
    resolved = {"warmup_epochs": recipe.warmup, "warmup_lr": min(recipe.warmup_lr, recipe.lr), "step_on_epochs": False}
    kwargs = {**scheduler_kwargs(recipe), **resolved}  # timm's reader of its own settings, whose names a recipe has
    return create_scheduler_v2(optimizer, **kwargs, updates_per_epoch=steps_per_epoch)[0]
