"""What a run needs before its first step: devices, a network that fits the data, images to validate on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from timm.data import create_transform
from torch import nn
from torch.utils.data import DataLoader

from retrofit.data import ImageData
from retrofit.errors import RetrofitError, UsageError
from retrofit.evaluate import predictions
from retrofit.finetune.data import Images, Part, Relabelled
from retrofit.finetune.head import outputs_of, with_classes, with_images
from retrofit.finetune.recipe import Recipe
from retrofit.models import Network


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Set up the devices and processes of a run, as `torchrun` or `accelerate launch` started them.

    Raises:
        UsageError: If the device or a tracker does not exist.
    """
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if recipe.device not in (None, "cpu") and (present is None or recipe.device != present.type):
        have = f"there is {present.type}" if present else "there is no accelerator"
        raise UsageError(f"cannot use --device {recipe.device}: {have}; leave it out or use cpu")
    cpu = recipe.device == "cpu" or present is None
    precision = "no"
    if recipe.amp:
        name = recipe.amp_dtype or ("bfloat16" if cpu else "float16")
        precision = "bf16" if name == "bfloat16" else "fp16"
        if cpu and precision == "fp16":
            raise UsageError("mixed precision on a CPU is bfloat16's; drop --amp-dtype float16")
    trackers = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    if missing := [name for name in recipe.log_with if name not in trackers]:
        have = f"installed here: {', '.join(trackers)}" if trackers else "none is installed here"
        raise UsageError(f"--log-with {missing[0]} is no tracker of accelerate that can be used ({have}); install it")
    return Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=recipe.grad_accum_steps,
        log_with=recipe.log_with or None,
        project_dir=str(folder),
    )


def fit_network(
    network: Network, images: Images, recipe: Recipe, note: Callable[[str], None]
) -> tuple[Network, tuple[str, ...]]:
    """Give a network the recipe's image size and the data's outputs and labels.

    Args:
        network: The network to train.
        images: The run's images.
        recipe: Its settings.
        note: Hears what was changed.

    Returns:
        The network, and the names of the tensors that are new.

    Raises:
        RetrofitError: If the classifier would have to be replaced and cannot be, or has to teach.
    """
    network = with_images(network, recipe.img_size, recipe.crop_pct)
    present = outputs_of(network.model)
    wanted = recipe.num_classes or images.outputs or present
    fresh: tuple[str, ...] = ()
    if wanted is not None and present is not None and wanted != present:
        if recipe.teacher == "source":
            raise RetrofitError(
                f"the source network has {present} outputs and cannot teach {wanted} classes; give --class-map, or "
                "train without labels: --task-loss-weight 0"
            )
        network, fresh = with_classes(network, wanted)
        note(f"new classifier: {wanted} outputs in place of {present}, zero")
    if images.names is not None and len(images.names) == wanted:
        network = replace(network, labels=list(images.names))
    return network, fresh


def validation_share(
    images: ImageData | None, network: Network, teacher: nn.Module | None, accelerator: Accelerator
) -> ImageData | None:
    """Return the images that this process validates on.

    Args:
        images: All of them.
        network: Its preprocessing is used.
        teacher: Labels the images, if given: the accuracy is then the agreement with it.
        accelerator: Knows the processes.

    Raises:
        RetrofitError: If there are fewer images than processes.
    """
    if images is None:
        return None
    if len(images.images) < accelerator.num_processes:
        raise RetrofitError(
            f"{len(images.images)} images to validate on are too few for {accelerator.num_processes} processes; give "
            "more, or a larger --val-split"
        )
    part = Part(images.images, range(accelerator.process_index, len(images.images), accelerator.num_processes))
    if teacher is None:
        return replace(images, images=part)
    part.transform = create_transform(**network.preprocess.to_dict())
    answers = predictions(teacher, (batch[0].to(accelerator.device) for batch in DataLoader(part, 32)))
    return replace(images, images=Relabelled(part, answers), outputs=None)
