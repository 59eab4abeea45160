"""A run that learns nothing, and why."""

from __future__ import annotations

import math

from torch import Tensor, nn

from retrofit.finetune.recipe import Recipe
from retrofit.layers import MigratedGroupNorm
from retrofit.utils.evaluating import evaluating

_NEAR = 0.95  # of the loss of guessing: a network that has begun to learn is below
_FEW = 100  # steps, of a run that may have ended before it began to learn
_SAME = 0.05  # share of what answers differ by between classes, below which they do not differ between images


def at_chance(top1: float, loss: float, images: int, classes: int) -> bool:
    """Whether validation gives what guessing gives, up to two standard errors.

    Args:
        top1: Accuracy in percent.
        loss: Mean cross-entropy.
        images: How many were looked at.
        classes: How many there are to guess from.
    """
    guess = 1 / classes
    error = math.sqrt(guess * (1 - guess) / images)
    return classes > 1 and top1 / 100 <= guess + 2 * error and loss >= _NEAR * math.log(classes)


def all_alike(model: nn.Module, images: Tensor) -> bool:
    """Whether a network answers the same to all images, (N, C, H, W); a new classifier, all zero, answers nothing."""
    with evaluating(model):
        answers = model(images).float()
    by_class = answers - answers.mean(dim=1, keepdim=True)
    by_image = by_class - by_class.mean(dim=0)
    return bool(by_image.abs().max() < _SAME * by_class.abs().max())


def explanation(model: nn.Module, recipe: Recipe, steps: int, collapsed: bool, untrained: bool) -> str:
    """Say what a run at chance most likely suffers from, and what to change.

    Args:
        model: Its network.
        recipe: Its settings.
        steps: Of the whole run.
        collapsed: Whether all images get the same answer.
        untrained: Whether it began with random weights, which take their time.
    """
    if untrained and not collapsed:
        return "it began with random weights: train it longer, or begin with trained ones"
    if steps < _FEW and not collapsed:
        return f"{steps} steps are few: train it longer, and if that does not help lower `lr` or raise `warmup_epochs`"
    what = "its features have collapsed, all images get the same answer: " if collapsed else ""
    layers = ""
    if any(isinstance(module, MigratedGroupNorm) for module in model.modules()):
        layers = " for layers that take no statistics of the batch"
    warmup = " without warm-up" if recipe.warmup == 0 else ""
    more = "give `warmup_epochs=1`" if recipe.warmup == 0 else "raise `warmup_epochs`"
    return f"{what}the learning rate {recipe.lr:g} is probably too high{layers}{warmup}; lower `lr` or {more}"
