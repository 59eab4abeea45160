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
    """The loss of a run, for a network with so many outputs, and a teacher in evaluation.

    Raises:
        UsageError: If mixup is asked for and the number of outputs is unknown.
    """

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
    """The loss that a teacher gives: Kullback-Leibler divergence of the class probabilities at a temperature.

    Args:
        teacher: Network in evaluation that gives class scores (N, classes).
        temperature: Divides both networks' scores; the loss is multiplied by its square, so that gradients keep their
            size (Hinton et al. 2015).
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
    """Refuse a network that was trained since its conversion: at strength 0 it is no longer its source.

    Training raises the strength, and `finetune` writes its steps down beside the weights.
    """
    if network.weights.get("steps") or any(layer.strength for layer in strength_layers(network.model)):
        raise RetrofitError(
            "`teacher='source'` is the network at strength 0, but this one was trained since its conversion, or its "
            "strength raised; convert the source anew, at strength 0, and train that, or drop `teacher`"
        )


def source_network(model: nn.Module) -> nn.Module:
    """Return the network that an untrained `model` was converted from, in evaluation, frozen: `model` at strength 0.

    Raises:
        RetrofitError: If the model holds no converted layer.
    """
    source = copy.deepcopy(model)
    try:
        set_strength(source, 0.0)
    except RetrofitError:
        raise RetrofitError(
            "`teacher='source'` needs a converted network whose layers have a strength; convert it first, with "
            "`retrofit.convert` or `retrofit convert`"
        ) from None
    return source.eval().requires_grad_(False)
