"""Validation: each process evaluates its share of the images, and the counts are summed."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from timm.data import create_transform
from torch import nn
from torch.utils.data import DataLoader

from retrofit.errors import RetrofitError
from retrofit.evaluation.accuracy import Accuracy, evaluate, predictions
from retrofit.finetune.loaders import Part
from retrofit.finetune.recipe import Recipe
from retrofit.images.dataset import ImageData
from retrofit.record import Preprocess


def validation_share(
    images: ImageData | None, preprocess: Preprocess, teacher: nn.Module | None, accelerator: Accelerator
) -> ImageData | None:
    """Return the images that this process validates on; a RetrofitError if there are fewer images than processes.

    A teacher labels them, so that accuracy is agreement with it.
    """
    if images is None:
        return None
    count, processes = len(images.images), accelerator.num_processes
    if count < processes:
        raise RetrofitError(
            f"{count} images to validate on are too few for {processes} processes; give more, or a larger `val_split`"
        )
    part = Part(images.images, range(accelerator.process_index, count, processes))
    if teacher is None:
        return replace(images, images=part)
    part.transform = create_transform(**preprocess.to_dict())
    part.targets = predictions(teacher, (batch[0].to(accelerator.device) for batch in DataLoader(part, 32)))
    return replace(images, images=part, outputs=None)


def validate(
    model: nn.Module, images: ImageData, preprocess: Preprocess, recipe: Recipe, accelerator: Accelerator
) -> Accuracy:
    """Return the accuracy over all processes of the first one's network, whose running statistics are saved.

    The names of unreadable images are those of this process alone.
    """
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer.contiguous()))
    result = evaluate(
        model,
        images,
        preprocess,
        batch_size=recipe.batch_size,
        workers=recipe.workers,
        device=accelerator.device,
        amp={"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision),
        channels_last=recipe.channels_last,
    )
    own = result.images - result.not_finite
    counts = [result.images, result.correct1, result.correct5, own, result.loss * own if own else 0.0]
    seen, correct1, correct5, finite, loss = summed(counts, accelerator)
    mean_loss = loss / finite if finite else math.nan
    return replace(result, images=round(seen), correct1=round(correct1), correct5=round(correct5), loss=mean_loss)


def summed(figures: list[float], accelerator: Accelerator) -> list[float]:
    """Return the sums of figures over all processes."""
    device = accelerator.device if accelerator.device.type == "cuda" else "cpu"
    return accelerator.reduce(torch.tensor(figures, dtype=torch.float64, device=device)).tolist()
