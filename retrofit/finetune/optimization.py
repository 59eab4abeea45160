"""The optimizer of a run and the schedule of its learning rate, both timm's."""

from collections.abc import Iterable
from typing import Any

import torch
from timm.optim import (
    create_optimizer_v2,
    get_optimizer_info,
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import nn

from retrofit.errors import UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.layers import ProxyNorm
from retrofit.layers.frozen_batch_norm import TrainedAffine
from retrofit.utils.text import one_line

# Optimizers whose fused form of torch walks over the weights once and can leave a step out.
_FUSED = ("adam", "adamw", "momentum", "nesterov", "sgd")


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    layer_decay: float | None = None,
    decay_norms: bool = False,
) -> list[dict[str, Any]]:
    """Return timm's parameter groups, but with weight decay on ProxyNorm; for torch's and timm's
    optimizers.

    timm does not decay one-dimensional parameters, such as ProxyNorm's; the ProxyNorm paper does
    (Labatie et al. 2021, appendix A.1).

    Args:
        model: The network; parameters that do not require gradients are left out.
        weight_decay: Weight decay of all parameters except biases and those of norms.
        layer_decay: Factor on the learning rate from each layer to the one before it; None for the
            same rate in all.
        decay_norms: Whether to decay all parameters, as both papers do for ResNets.
    """
    groups = _timms_groups(model, weight_decay, layer_decay)
    proxy_norms = [module for module in model.modules() if isinstance(module, ProxyNorm)]
    _move_beside_gamma(proxy_norms, groups)
    decayed = _own_parameters(proxy_norms)
    if decay_norms:
        decayed = list(model.parameters())
    decayed_ids = set(map(id, decayed))
    split: list[dict[str, Any]] = []
    for group in groups:
        parameters = group["params"]
        timms = [p for p in parameters if id(p) not in decayed_ids]
        ours = [p for p in parameters if id(p) in decayed_ids]
        split.append({**group, "params": timms})
        split.append({**group, "params": ours, "weight_decay": weight_decay})
    return [group for group in split if group["params"]]


def _own_parameters(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the layers' parameters, without those of modules in them."""
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def _timms_groups(
    model: nn.Module, weight_decay: float, layer_decay: float | None
) -> list[dict[str, Any]]:
    undecayed = _undecayed_names(model)
    if layer_decay is None:
        return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=undecayed)
    return param_groups_layer_decay(
        model, weight_decay, no_weight_decay_list=undecayed, layer_decay=layer_decay
    )


def _move_beside_gamma(proxy_norms: list[ProxyNorm], groups: list[dict[str, Any]]) -> None:
    """Move the parameters of each ProxyNorm into the group of the gamma before it.

    timm knows by its name which layer a parameter belongs to. It has no name for that of an
    activation outside the blocks, such as a ResNet's `act1`, and would give it the rate of the last
    layer.
    """
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    for proxy_norm in proxy_norms:
        home = group_of.get(id(getattr(proxy_norm.norm, "weight", None)))
        for parameter in _own_parameters([proxy_norm]):
            group = group_of.get(id(parameter))
            # Only what is trained is in a group.
            if home is None or group is None:
                continue
            group["params"] = [other for other in group["params"] if other is not parameter]
            home["params"].append(parameter)


def _undecayed_names(model: Any) -> set[str]:
    """Return what the network itself asks not to decay, and affine weights of shape (C, 1, 1), in
    which timm sees no norm.
    """
    modules = [module for module in model.modules() if isinstance(module, TrainedAffine)]
    affines = {id(module.weight) for module in modules}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in affines}
    if hasattr(model, "no_weight_decay"):
        names |= set(model.no_weight_decay())
    return names


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Build the recipe's optimizer over what is trained.

    Raises:
        UsageError: If timm cannot build it, it needs more than gradients, or it has no eps to set.
    """
    if get_optimizer_info(recipe.opt.lower()).second_order:
        raise UsageError(
            f"the optimizer {recipe.opt} needs second derivatives, which no run computes; take "
            "another `opt`"
        )
    groups = parameter_groups(model, recipe.weight_decay, recipe.layer_decay, recipe.decay_norms)
    name = recipe.opt
    options: dict[str, Any] = {}
    if name.lower() in _FUSED:
        options["fused"] = True
    if recipe.opt_eps is not None:
        options["eps"] = recipe.opt_eps
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            groups, name, recipe.lr, recipe.weight_decay, recipe.momentum, **options
        )
    # Optimizers assert, or miss a package.
    except Exception as error:
        raise UsageError(
            f"cannot build the optimizer {name} ({one_line(error)}); take another `opt`"
        ) from error
    if recipe.opt_eps is not None and "eps" not in optimizer.defaults:
        raise UsageError(f"the optimizer {name} has no eps; leave `opt_eps` out")
    return optimizer


def build_lr_schedule(
    optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int
) -> Any:
    """Build the recipe's schedule of the learning rate; `step_update(steps done)` moves it. None: a
    constant rate.
    """
    # timm reads these settings from its own command line's names, which a recipe shares.
    options = scheduler_kwargs(recipe)
    options["warmup_epochs"] = recipe.warmup
    options["warmup_lr"] = min(recipe.warmup_lr, recipe.lr)
    options["step_on_epochs"] = False
    scheduler, _epochs = create_scheduler_v2(
        optimizer, **options, updates_per_epoch=steps_per_epoch
    )
    return scheduler
