"""What a step minimizes: the labels' loss, the teacher's, or both."""

from __future__ import annotations

from typing import Any

from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from retrofit.errors import UsageError
from retrofit.finetune.distillation import Distillation
from retrofit.finetune.recipe import Recipe


class Objective:
    """The loss of a run.

    Args:
        recipe: Its settings.
        classes: Outputs of the network.
        distillation: The teacher's loss; None without a teacher.

    Raises:
        UsageError: If mixup is asked for and the number of outputs is unknown.
    """

    def __init__(self, recipe: Recipe, classes: int | None, distillation: Distillation | None) -> None:
        self._task, self._teach = recipe.task_loss_weight, recipe.distill_loss_weight
        self._distillation = distillation
        self._mixup: Any = None
        self._loss: nn.Module = LabelSmoothingCrossEntropy(recipe.smoothing)
        if recipe.mixup or recipe.cutmix:
            if classes is None:
                raise UsageError(
                    "`mixup` and `cutmix` need to know how many outputs the network has; set `num_classes`"
                )
            self._mixup = Mixup(
                mixup_alpha=recipe.mixup,
                cutmix_alpha=recipe.cutmix,
                label_smoothing=recipe.smoothing,
                num_classes=classes,
            )
            self._loss = SoftTargetCrossEntropy()

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch, (N, C, H, W) and (N,), with itself, if the recipe says so; the targets become (N, classes)."""
        if self._mixup is None:
            return images, targets
        mixed: tuple[Tensor, Tensor] = self._mixup(images, targets)
        return mixed

    def loss(self, scores: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `scores`, (N, classes), on what `mix` gave."""
        total = scores.new_zeros(())
        if self._task:
            total = total + self._task * self._loss(scores.float(), targets)
        if self._distillation is not None and self._teach:
            total = total + self._teach * self._distillation(scores, images)
        return total
