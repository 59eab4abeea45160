"""A run that learns nothing, and the likely cause."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from retrofit.evaluation import Accuracy
from retrofit.finetune.recipe import Recipe
from retrofit.utils.forward_pass import device_of, evaluating

# A network that has begun to learn has a loss below this share of that of guessing.
_NEAR = 0.95
# Outputs do not depend on the image if they differ between images by less than this share of their
# difference between classes.
_SAME = 0.05


@dataclass
class ChanceWatch:
    """Warns once, after warm-up, that a run learns nothing, and says why; or in the end that its
    top-1 is that of the most frequent class.
    """

    # The settings of the run.
    recipe: Recipe
    # The optimizer steps of the run.
    steps: int
    # The number of classes; None if it is unknown.
    classes: int | None
    # Whether the run began with random weights.
    untrained: bool
    # Names of the outputs.
    names: Sequence[str] | None = None
    _in_a_row: int = 0
    _has_warned: bool = False

    def warning(
        self, row: dict[str, Any], accuracy: Accuracy, model: nn.Module, few: Iterator[Tensor]
    ) -> str | None:
        """Return a warning after an epoch, or None.

        Args:
            row: The epoch's metrics.
            accuracy: What they were taken from.
            model: The network.
            few: Gives some images, (N, C, H, W), if asked.
        """
        recipe = self.recipe
        classes = self.classes
        epoch = row["epoch"]
        top1 = row["val_top1"]
        loss = row["val_loss"]
        if self._has_warned or loss is None or classes is None:
            return None
        doubt = accuracy.no_better_than_one_answer(self.names)
        if accuracy.majority_top1 == 100:
            self._has_warned = True
            return f"warning: {doubt}"
        is_last = epoch >= recipe.epochs
        is_early = epoch < max(2, recipe.warmup + 1)
        if is_early and not is_last:
            return None
        if not at_chance(top1, loss, accuracy.images, classes):
            self._in_a_row = 0
            return f"warning: {doubt}" if doubt and is_last else None
        self._in_a_row += 1
        # A rising strength may cost accuracy for an epoch.
        if self._in_a_row < 2 and not is_last:
            return None
        self._has_warned = True
        collapsed = any(all_alike(model, some) for some in few)
        why = explanation(recipe, self.steps, collapsed, self.untrained)
        figures = f"top-1 {top1:.1f}% of {classes} classes, loss {loss:.2f}"
        return (
            f"warning: after epoch {epoch} the network does no better than guessing "
            f"({figures}): {why}"
        )


def at_chance(top1: float, loss: float, images: int, classes: int) -> bool:
    """Whether top-1 in percent, and mean cross-entropy, are those of guessing, up to two standard
    errors.
    """
    if classes < 2:
        return False
    guess = 1 / classes
    error = math.sqrt(guess * (1 - guess) / images)
    return top1 / 100 <= guess + 2 * error and loss >= _NEAR * math.log(classes)


def all_alike(model: nn.Module, images: Tensor) -> bool:
    """Whether a network's outputs are the same for all images, (N, C, H, W).

    A new classifier, whose outputs are all zero, does not count.
    """
    with evaluating(model):
        scores = model(images.to(device_of(model))).float()
    by_class = scores - scores.mean(dim=1, keepdim=True)
    by_image = by_class - by_class.mean(dim=0)
    return bool(by_image.abs().max() < _SAME * by_class.abs().max())


def explanation(recipe: Recipe, steps: int, collapsed: bool, untrained: bool) -> str:
    """Say what a run at chance most likely suffers from, and what to change."""
    if collapsed:
        cause = "its features have collapsed, all images get the same answer"
    elif untrained:
        return "it began with random weights: train it longer, or begin with trained ones"
    else:
        cause = f"{steps} steps may be too few"
    return (
        f"{cause}, or the learning rate {recipe.lr:g} is too high; lower `lr`, raise "
        "`warmup_epochs`, or train it longer"
    )
