"""Runs that fail to learn: which layer diverged first, or why a network stays at chance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit.finetune.recipe import Recipe
from retrofit.layers import FrozenBatchNorm, MigratedGroupNorm, StrengthMixin
from retrofit.utils.running import device_of, evaluating, hooked

Fault = Literal["loss", "gradient", "state"]

_NORMS = (StrengthMixin, FrozenBatchNorm, _NormBase, nn.LayerNorm, nn.GroupNorm)
_NEAR = 0.95  # of the loss of guessing: a network that has begun to learn is below
_FEW = 100  # steps, of a run that may have ended before it began to learn
_SAME = 0.05  # share of what answers differ by between classes, below which they do not differ between images


def not_finite(model: nn.Module) -> str | None:
    """Name the first tensor of the network's state that holds NaN or infinity; None if none does."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            return name
    return None


def divergence_of(model: nn.Module, images: Tensor, fault: Fault, recipe: Recipe) -> tuple[str, str]:
    """Say what diverged first, shown by a batch of images (N, C, H, W), and what to do."""
    advice = "lower `lr` or `noise`, or lengthen `strength_ramp`"
    if (layer := first_to_diverge(model, images)) is not None:
        return f"{layer} went first", advice
    if fault == "loss":
        return "all layers are finite, the loss alone is not", advice
    if fault == "state":
        return "no layer's output is affected", advice
    retry = "start again with `amp=False`" if recipe.amp else "start again on another `device`"
    return "the loss and all layers are finite, so the cause is not `lr`", retry


def first_to_diverge(model: nn.Module, images: Tensor) -> str | None:
    """Name the first layer, in the order of the computation, whose statistics or outputs are not finite.

    Normalization layers come before all others: their statistics show a divergence before the loss does.
    """
    names = {module: name for name, module in model.named_modules()}
    diverged: list[nn.Module] = []

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [*module.buffers(recurse=False), *([output] if isinstance(output, Tensor) else [])]
        if not all(tensor.isfinite().all() for tensor in tensors):
            diverged.append(module)

    with hooked(module.register_forward_hook(look) for module in names), torch.no_grad():
        model(images)
    norms: list[nn.Module] = [module for module in diverged if isinstance(module, _NORMS)]
    for module in norms or [module for module in diverged if not list(module.children())] or diverged:
        return f"{names[module] or 'the network'} ({type(module).__name__})"
    return None


class ChanceWatch:
    """Says once, after warm-up, that a run learns nothing, and why; `untrained`: it began with random weights."""

    def __init__(self, recipe: Recipe, steps: int, classes: int | None, untrained: bool) -> None:
        self._recipe, self._steps, self._classes, self._untrained = recipe, steps, classes, untrained
        self._in_a_row, self._done = 0, False

    def warning(
        self, row: dict[str, Any], images: int, model: nn.Module, few: Callable[[], Tensor | None]
    ) -> str | None:
        """Return a warning after an epoch, by metrics on so many images; `few` reads some, (N, C, H, W)."""
        epoch, top1, loss, last = row["epoch"], row["val_top1"], row["val_loss"], row["epoch"] >= self._recipe.epochs
        early = epoch < max(2, self._recipe.warmup + 1) and not last
        if self._done or early or loss is None or self._classes is None:
            return None
        self._in_a_row = self._in_a_row + 1 if at_chance(top1, loss, images, self._classes) else 0
        if self._in_a_row < (1 if last else 2):  # the walk may stumble for an epoch
            return None
        self._done = True
        collapsed = (few_images := few()) is not None and all_alike(model, few_images)
        why = explanation(model, self._recipe, self._steps, collapsed, self._untrained)
        return (
            f"warning: after epoch {epoch} the network does no better than guessing (top-1 {top1:.1f}% of "
            f"{self._classes} classes, loss {loss:.2f}): {why}"
        )


def at_chance(top1: float, loss: float, images: int, classes: int) -> bool:
    """Whether top-1 in percent, and mean cross-entropy, are those of guessing, up to two standard errors."""
    guess = 1 / classes
    error = math.sqrt(guess * (1 - guess) / images)
    return classes > 1 and top1 / 100 <= guess + 2 * error and loss >= _NEAR * math.log(classes)


def all_alike(model: nn.Module, images: Tensor) -> bool:
    """Whether a network answers the same to all images, (N, C, H, W); a new classifier, all zero, answers nothing."""
    with evaluating(model):
        answers = model(images.to(device_of(model))).float()
    by_class = answers - answers.mean(dim=1, keepdim=True)
    by_image = by_class - by_class.mean(dim=0)
    return bool(by_image.abs().max() < _SAME * by_class.abs().max())


def explanation(model: nn.Module, recipe: Recipe, steps: int, collapsed: bool, untrained: bool) -> str:
    """Say what a run at chance most likely suffers from, and what to change."""
    if untrained and not collapsed:
        return "it began with random weights: train it longer, or begin with trained ones"
    if steps < _FEW and not collapsed:
        return f"{steps} steps are few: train it longer, and if that does not help lower `lr` or raise `warmup_epochs`"
    what = "its features have collapsed, all images get the same answer: " if collapsed else ""
    migrated = any(isinstance(module, MigratedGroupNorm) for module in model.modules())
    layers = " for layers that take no statistics of the batch" if migrated else ""
    warmup, more = ("", "raise `warmup_epochs`") if recipe.warmup else (" without warm-up", "give `warmup_epochs=1`")
    return f"{what}the learning rate {recipe.lr:g} is probably too high{layers}{warmup}; lower `lr` or {more}"
