"""What a run needs before its first step: devices, a network that fits the data, images to validate on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from timm.data import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader

from retrofit.errors import RetrofitError, UsageError
from retrofit.evaluation.accuracy import predictions
from retrofit.finetune.classifier import outputs_of, with_classes, with_images
from retrofit.finetune.loaders import Images, Part, Relabelled
from retrofit.finetune.recipe import Recipe
from retrofit.images.dataset import ImageData
from retrofit.networks.models import Network
from retrofit.record import set_record
from retrofit.utils.evaluating import evaluating
from retrofit.utils.files import termination_unwinds
from retrofit.utils.text import one_line, shortlist


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Set up the devices and processes of a run, as `torchrun` or `accelerate launch` started them.

    Raises:
        UsageError: If the device or a tracker does not exist.
    """
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if recipe.device not in (None, "cpu") and (present is None or recipe.device != present.type):
        have = f"there is {present.type}" if present else "there is no accelerator"
        raise UsageError(f"cannot use `device={recipe.device!r}`: {have}; leave it out or use cpu")
    cpu = recipe.device == "cpu" or present is None
    precision = "no"
    if recipe.amp:
        name = recipe.amp_dtype or ("bfloat16" if cpu else "float16")
        precision = "bf16" if name == "bfloat16" else "fp16"
        if cpu and precision == "fp16":
            raise UsageError("mixed precision on a CPU is bfloat16's; drop `amp_dtype='float16'`")
    trackers = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    if missing := [name for name in recipe.log_with if name not in trackers]:
        have = f"installed here: {', '.join(trackers)}" if trackers else "none is installed here"
        raise UsageError(
            f"`log_with={missing[:1]!r}` is no tracker of accelerate that can be used ({have}); install it"
        )
    return Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=recipe.grad_accum_steps,
        log_with=recipe.log_with or None,
        project_dir=str(folder),
    )


def check_unused(folder: Path) -> None:
    """Refuse a folder that something lies in.

    Raises:
        RetrofitError: If that is so, or it is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RetrofitError(f"{folder} exists; give another `folder`, or go on with the run in it by `resume`")


def make_folder(folder: Path) -> None:
    """Make a folder and those that it lies in.

    Raises:
        RetrofitError: If that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RetrofitError(f"cannot make the folder {folder} ({error.strerror}); give another `folder`") from error


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove a folder that was not there, or empty one that was empty, if the body fails or is interrupted."""
    there = folder.exists()
    with termination_unwinds():
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if there:
                folder.mkdir(exist_ok=True)
            raise


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
        RetrofitError: If the network does not take the images, or its classifier would have to be replaced and cannot
            be, or has to teach; or if it has to teach, and calls its outputs otherwise than the data its classes.
    """
    own = network.preprocess.input_size
    network = with_images(network, recipe.img_size, recipe.crop_pct)
    check_images(network, own)
    present = outputs_of(network.model)
    wanted = recipe.num_classes or images.outputs or present
    fresh: tuple[str, ...] = ()
    if wanted is not None and present is not None and wanted != present:
        if recipe.teacher == "source":
            raise RetrofitError(
                f"the source network has {present} outputs and cannot teach {wanted} classes; give `class_map`, "
                "or train without labels: `task_loss_weight=0`"
            )
        network, fresh = with_classes(network, wanted)
        note(f"new classifier: {wanted} outputs in place of {present}, zero")
    if recipe.labelled and images.train.contradicts(network.labels):  # a new classifier has no labels
        classes, outputs = shortlist(images.train.names or ()), shortlist(network.labels or ())
        what = f"the data's classes ({classes}) are not what the network calls its outputs ({outputs})"
        if recipe.teacher == "source":
            raise RetrofitError(
                f"{what}, so that its teacher may contradict the labels; give `class_map`, or train without labels: "
                "`task_loss_weight=0`"
            )
        note(f"{what}: they were taken for its outputs in their order; if that is wrong, give `class_map`")
    if images.names is not None:  # where outputs are left over, the network's own names are none of theirs
        set_record(network.model, labels=list(images.names) if len(images.names) == wanted else None)
    return network, fresh


def check_images(network: Network, own: tuple[int, int, int]) -> None:
    """Run the network once, as in training, on an empty image.

    Args:
        network: The network, on the CPU; its preprocessing says how large the image is.
        own: (C, H, W) that it was built for.

    Raises:
        RetrofitError: If it does not take such an image, or gives no class scores for it.
    """
    size = network.preprocess.input_size
    shape = " x ".join(str(side) for side in size[1:])
    with evaluating(network.model):
        network.model.training = True  # of this module alone: networks with several heads ask it which to use
        try:
            answer = network.model(torch.zeros(1, *size))
        except Exception as error:
            what = f"{network.source} does not take images of {shape} pixels ({one_line(error)})"
            if size == own:
                raise RetrofitError(f"{what}; give another `img_size`") from error
            build = f"build it for this size before it is converted (`retrofit convert --img-size {size[-1]}`)"
            raise RetrofitError(f"{what}; give `img_size={own[-1]}`, or {build}") from error
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        what = f"a tensor of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
        raise RetrofitError(
            f"{network.source} gives {what} in training, not class scores; use an image classifier with one output"
        )


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
            "more, or a larger `val_split`"
        )
    part = Part(images.images, range(accelerator.process_index, len(images.images), accelerator.num_processes))
    if teacher is None:
        return replace(images, images=part)
    part.transform = create_transform(**network.preprocess.to_dict())
    answers = predictions(teacher, (batch[0].to(accelerator.device) for batch in DataLoader(part, 32)))
    return replace(images, images=Relabelled(part, answers), outputs=None)
