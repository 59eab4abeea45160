"""What a step minimizes: the labels' loss, that of the source network as a teacher, or both."""

from __future__ import annotations

import copy
from typing import Any

import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.networks.models import Network
from retrofit.surgery import set_strength, strength_layers


class Objective:
    """The loss of a run, with a teacher in evaluation; mixup has to know how many outputs (`classes`) there are."""

    def __init__(self, recipe: Recipe, classes: int | None, teacher: nn.Module | None) -> None:
        self._task_weight, self._distill_weight = recipe.task_loss_weight, recipe.distill_loss_weight
        self._distillation = None if teacher is None else Distillation(teacher, recipe.kd_temperature)
        self._mixup: Any = None
        self._loss: nn.Module = LabelSmoothingCrossEntropy(recipe.smoothing)
        if recipe.mixup or recipe.cutmix:
            if classes is None:
                raise UsageError(
                    "`mixup` and `cutmix` need to know how many outputs the network has; set `num_classes`"
                )
            self._mixup = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=classes)
            self._loss = SoftTargetCrossEntropy()

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch, (N, C, H, W) and (N,), with itself, if the recipe says so; the targets become (N, classes)."""
        return (images, targets) if self._mixup is None else self._mixup(images, targets)

    def loss(self, scores: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `scores`, (N, classes), on what `mix` gave."""
        total = scores.new_zeros(())
        if self._task_weight:
            total = total + self._task_weight * self._loss(scores.float(), targets)
        if self._distillation is not None and self._distill_weight:
            total = total + self._distill_weight * self._distillation(scores, images)
        return total


class Distillation(nn.Module):
    """The loss that a teacher in evaluation gives: Kullback-Leibler divergence of the class probabilities.

    The temperature divides both networks' scores, and its square multiplies the loss, so that gradients keep their size
    (Hinton et al. 2015).
    """

    def __init__(self, teacher: nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        self.teacher = teacher
        self.temperature = temperature

    def forward(self, scores: Tensor, images: Tensor) -> Tensor:
        """Return the mean loss of the student's `scores`, (N, classes), on `images`, (N, C, H, W)."""
        with torch.no_grad():
            target = functional.log_softmax(self.teacher(images).float() / self.temperature, dim=1)
        student = functional.log_softmax(scores.float() / self.temperature, dim=1)
        return self.temperature**2 * functional.kl_div(student, target, reduction="batchmean", log_target=True)


def check_untrained(network: Network) -> None:
    """Refuse a network that was trained since its conversion, as steps or strength tell: it is no longer its source."""
    if network.weights.get("steps") or any(layer.strength for layer in strength_layers(network.model)):
        raise RetrofitError(
            "`teacher='source'` is the network at strength 0, but this one was trained since its conversion, or its "
            "strength raised; convert the source anew, at strength 0, and train that, or drop `teacher`"
        )


def source_network(model: nn.Module) -> nn.Module:
    """Return an untrained `model`'s source, a frozen copy at strength 0; a RetrofitError if no layer has a strength."""
    source = copy.deepcopy(model)
    try:
        set_strength(source, 0.0)
    except RetrofitError:
        raise RetrofitError(
            "`teacher='source'` needs a converted network whose layers have a strength; convert it first, with "
            "`retrofit.convert` or `retrofit convert`"
        ) from None
    return source.eval().requires_grad_(False)
