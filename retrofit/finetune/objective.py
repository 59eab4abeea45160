"""What a step minimizes."""

from typing import Any

import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional

from retrofit.finetune.recipe import Recipe


class Objective:
    """The loss of a run, that of the labels and that of a teacher, by the recipe's weights.

    A teacher in evaluation gives the Kullback-Leibler divergence of the class probabilities. The
    temperature divides both networks' scores, and its square multiplies the loss, so that gradients
    keep their size (Hinton et al. 2015).

    Args:
        recipe: The settings of the run.
        classes: How many outputs there are, for mixup.
        teacher: The network to learn from; None for the labels alone.
    """

    def __init__(self, recipe: Recipe, classes: int, teacher: nn.Module | None) -> None:
        self._recipe = recipe
        self._teacher = teacher
        self._mixup: Any = None
        self._task: nn.Module = LabelSmoothingCrossEntropy(recipe.smoothing)
        if recipe.mixup or recipe.cutmix:
            self._mixup = Mixup(
                recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=classes
            )
            self._task = SoftTargetCrossEntropy()

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch, (N, C, H, W) and (N,), with itself, if the recipe says so; the targets
        become (N, classes).
        """
        if self._mixup is None:
            return images, targets
        return self._mixup(images, targets)

    def loss(self, scores: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `scores`, (N, classes), on what `mix` gave."""
        recipe = self._recipe
        total = scores.new_zeros(())
        if recipe.task_loss_weight:
            total = total + recipe.task_loss_weight * self._task(scores.float(), targets)
        if self._teacher is not None and recipe.distill_loss_weight:
            with torch.no_grad():
                taught = self._teacher(images)
            total = total + recipe.distill_loss_weight * self._divergence(scores, taught)
        return total

    def _divergence(self, scores: Tensor, taught: Tensor) -> Tensor:
        temperature = self._recipe.kd_temperature
        log_target = functional.log_softmax(taught.float() / temperature, dim=1)
        log_probability = functional.log_softmax(scores.float() / temperature, dim=1)
        divergence = functional.kl_div(
            log_probability, log_target, reduction="batchmean", log_target=True
        )
        return temperature**2 * divergence
