"""What a step minimizes, and by which optimizer and schedule of timm's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import Tensor, nn
from torch.nn import functional

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.layers import ProxyNorm
from retrofit.layers.frozen_batch_norm import TrainedAffine
from retrofit.networks.models import Network
from retrofit.surgery import set_strength, strength_layers
from retrofit.utils.text import one_line

_FUSED = ("adam", "adamw", "momentum", "nesterov", "sgd")  # torch's: one pass over the weights, and a flag to skip it


class Objective:
    """The loss of a run, that of the labels and that of a teacher, by the recipe's weights.

    A teacher in evaluation gives the Kullback-Leibler divergence of the class probabilities. The temperature divides
    both networks' scores, and its square multiplies the loss, so that gradients keep their size (Hinton et al. 2015).
    Mixup has to know how many outputs (`classes`) there are.
    """

    def __init__(self, recipe: Recipe, classes: int, teacher: nn.Module | None) -> None:
        self._recipe, self._teacher = recipe, teacher
        self._mixup: Any = None
        self._task: nn.Module = LabelSmoothingCrossEntropy(recipe.smoothing)
        if recipe.mixup or recipe.cutmix:
            self._mixup = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=classes)
            self._task = SoftTargetCrossEntropy()

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch, (N, C, H, W) and (N,), with itself, if the recipe says so; the targets become (N, classes)."""
        return (images, targets) if self._mixup is None else self._mixup(images, targets)

    def loss(self, scores: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `scores`, (N, classes), on what `mix` gave."""
        recipe, total = self._recipe, scores.new_zeros(())
        if recipe.task_loss_weight:
            total = total + recipe.task_loss_weight * self._task(scores.float(), targets)
        if self._teacher is not None and recipe.distill_loss_weight:
            temperature = recipe.kd_temperature
            with torch.no_grad():
                taught = functional.log_softmax(self._teacher(images).float() / temperature, dim=1)
            learned = functional.log_softmax(scores.float() / temperature, dim=1)
            divergence = functional.kl_div(learned, taught, reduction="batchmean", log_target=True)
            total = total + recipe.distill_loss_weight * (temperature**2 * divergence)
        return total


def source_network(network: Network, resumed: bool = False) -> nn.Module:
    """Return a converted network's source, to teach it: a frozen copy at strength 0.

    A RetrofitError says that no layer has a strength, or that the network was trained since its conversion, as steps or
    strength tell: it is no longer its source. That of a `resumed` run was asked before the run set its first strength.
    """
    layers = strength_layers(network.model)
    if not layers:
        raise RetrofitError("`teacher='source'` needs layers that have a strength; convert first, or drop `teacher`")
    trained = network.weights.get("steps") or any(layer.strength for layer in layers)
    if trained and not resumed:
        what = "`teacher='source'` is the network at strength 0, but this was trained, or raised, since its conversion"
        raise RetrofitError(f"{what}; convert the source anew and train that, or drop `teacher`")
    source = copy.deepcopy(network.model)
    set_strength(source, 0.0)
    return source.eval().requires_grad_(False)


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
    proxy_norms = [module for module in model.modules() if isinstance(module, ProxyNorm)]
    proxies = [parameter for module in proxy_norms for parameter in (module.proxy_bias, module.proxy_scale)]
    decayed = {id(parameter) for parameter in (model.parameters() if decay_norms else proxies)}
    split: list[dict[str, Any]] = []
    for group in groups:
        for ours, own in ((False, {}), (True, {"weight_decay": weight_decay})):
            params = [parameter for parameter in group["params"] if (id(parameter) in decayed) is ours]
            split += [{**group, "params": params, **own}] if params else []
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
        raise UsageError(f"cannot build the optimizer {recipe.opt} ({one_line(error)}); take another `opt`") from error
    if recipe.opt_eps is not None and "eps" not in optimizer.defaults:
        raise UsageError(f"the optimizer {recipe.opt} has no eps; leave `opt_eps` out")
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> Any:
    """Build the recipe's schedule of the learning rate; `step_update(steps done)` moves it. None: a constant rate."""
    resolved = {"warmup_epochs": recipe.warmup, "warmup_lr": min(recipe.warmup_lr, recipe.lr), "step_on_epochs": False}
    kwargs = {**scheduler_kwargs(recipe), **resolved}  # timm's reader of its own settings, whose names a recipe has
    return create_scheduler_v2(optimizer, **kwargs, updates_per_epoch=steps_per_epoch)[0]
