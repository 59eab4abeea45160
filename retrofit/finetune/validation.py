"""Validation of a run over all of its processes."""

import math
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from timm.data import create_transform
from torch import nn
from torch.utils.data import DataLoader

from retrofit.errors import RetrofitError
from retrofit.evaluation import Accuracy, evaluate, predictions
from retrofit.finetune.accelerator import summed
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_images import ImageSubset
from retrofit.images.dataset import ImageData
from retrofit.record import Preprocess

# Images that a network labels at a time.
_LABELLED_BATCH = 32


def validation_share(
    images: ImageData | None,
    preprocess: Preprocess,
    labeller: nn.Module | None,
    accelerator: Accelerator,
) -> ImageData | None:
    """Return the images that this process validates on.

    A labeller, if there is one, labels them: accuracy is then agreement with it.

    Raises:
        RetrofitError: If there are fewer images than processes.
    """
    if images is None:
        return None
    count = len(images.images)
    processes = accelerator.num_processes
    if count < processes:
        raise RetrofitError(
            f"{count} images to validate on are too few for {processes} processes; "
            "give more, or a larger `val_split`"
        )
    share = range(accelerator.process_index, count, processes)
    subset = ImageSubset(images.images, share, create_transform(**preprocess.to_dict()))
    if labeller is None:
        return replace(images, images=subset)
    batches = DataLoader(subset, _LABELLED_BATCH)
    subset.targets = predictions(labeller, (batch[0].to(accelerator.device) for batch in batches))
    return replace(images, images=subset, outputs=None)


def validate(
    model: nn.Module,
    images: ImageData,
    preprocess: Preprocess,
    recipe: Recipe,
    accelerator: Accelerator,
) -> Accuracy:
    """Return the accuracy over all processes of the first one's network, whose running statistics
    are saved.

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
    finite = result.images - result.not_finite
    loss_sum = 0.0
    if finite:
        loss_sum = result.loss * finite
    counts = [result.images, result.correct1, result.correct5, finite, loss_sum]
    sums = summed([*counts, *result.class_counts], accelerator)
    seen, correct1, correct5, finite_seen, loss, *class_counts = sums
    return replace(
        result,
        images=round(seen),
        correct1=round(correct1),
        correct5=round(correct5),
        loss=loss / finite_seen if finite_seen else math.nan,
        class_counts=tuple(map(round, class_counts)),
    )
