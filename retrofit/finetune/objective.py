"""What a step minimizes: the labels' loss, the teacher's, or both."""

from __future__ import annotations

from typing import Any

from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
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
        self._off = recipe.mixup_off_epoch
        mixing = recipe.mixup > 0 or recipe.cutmix > 0
        if mixing:
            if classes is None:
                raise UsageError(
                    "`mixup` and `cutmix` need to know how many outputs the network has; set `num_classes`"
                )
            self._mixup = Mixup(
                mixup_alpha=recipe.mixup,
                cutmix_alpha=recipe.cutmix,
                prob=recipe.mixup_prob,
                switch_prob=recipe.mixup_switch_prob,
                mode=recipe.mixup_mode,
                label_smoothing=recipe.smoothing,
                num_classes=classes,
            )
        self._loss: nn.Module
        if recipe.bce_loss:
            self._loss = BinaryCrossEntropy(smoothing=0.0 if mixing else recipe.smoothing)
        elif mixing:
            self._loss = SoftTargetCrossEntropy()
        else:
            self._loss = LabelSmoothingCrossEntropy(recipe.smoothing)

    def start_epoch(self, epoch: int) -> None:
        """Stop mixing where the recipe says so; from then on only targets are smoothed."""
        if self._mixup is not None and self._off:
            self._mixup.mixup_enabled = epoch < self._off

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
