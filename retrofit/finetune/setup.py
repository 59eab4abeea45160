"""What a run needs before its first step: devices, a network that fits the data, images to validate on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit.errors import RetrofitError, UsageError
from retrofit.evaluation.strengths import odd_strengths
from retrofit.finetune.classifier import outputs_of, with_classes, with_images
from retrofit.finetune.data import Images
from retrofit.finetune.divergence import not_finite
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.running_statistics import estimated_layers
from retrofit.finetune.strength_schedule import StrengthSchedule
from retrofit.layers import NormalityMixin
from retrofit.layers.batch_norm import RunningNormality
from retrofit.networks.models import Network
from retrofit.record import set_record
from retrofit.surgery import strength_layers
from retrofit.utils.evaluating import evaluating
from retrofit.utils.text import one_line, shortlist

_OLD = 0.05  # share of the source's running statistics at the end of a run, above which it is said


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
        RetrofitError: If the network holds NaN or infinity or does not take the images; if its classifier would have to
            be replaced and cannot be, or has to teach; if it has to teach and its class names differ from the data's.
    """
    if (name := not_finite(network.model)) is not None:
        raise RetrofitError(
            f"{name} of {network.source} holds NaN or infinity before the first step; train from other weights"
        )
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


def adjust_layers(model: nn.Module, recipe: Recipe, batches: int, note: Callable[[str], None]) -> None:
    """Set the layers' momentum and kind of noise as a recipe says, and say which of its settings do nothing.

    Args:
        model: The network.
        recipe: Its settings.
        batches: Of the whole run.
        note: Called with a sentence for the user.
    """
    for module in model.modules():
        if recipe.bn_momentum is not None and isinstance(module, _NormBase):
            module.momentum = recipe.bn_momentum
        if recipe.noise_kind is not None and isinstance(module, NormalityMixin):
            module.noise_kind = recipe.noise_kind
    running = [m.momentum for m in model.modules() if isinstance(m, RunningNormality) and m.momentum is not None]
    if running and recipe.precise_bn is None and (old := (1 - min(running)) ** batches) > _OLD:
        note(
            f"warning: running statistics move by {min(running):g} a batch, so after {batches} batches {old:.0%} "
            "of them are those from before; raise `bn_momentum`"
        )
    if recipe.precise_bn is not None and not estimated_layers(model):
        note("no layer of the network tracks batch statistics: `precise_bn` does nothing")
    converted = bool(strength_layers(model))
    if (recipe.noise or recipe.noise_kind) and converted and not draws_noise(model):
        note("no layer of the network draws noise: `noise` and `noise_kind` of the recipe do nothing")
    if not converted:
        note("no layer of the network has a strength: this is plain training")
    if recipe.strength_sched == "off" and (odd := odd_strengths(model)):
        note(f"warning: {odd}")


def draws_noise(model: nn.Module) -> bool:
    """Whether a layer of the network draws noise in training."""
    return any(isinstance(module, NormalityMixin) for module in model.modules())


def strength_schedule(
    model: nn.Module, average: nn.Module | None, steps: int, recipe: Recipe
) -> StrengthSchedule | None:
    """Return what moves the strength of a network and of the average of its weights; None if no layer has one."""
    if not strength_layers(model):
        return None
    return StrengthSchedule(
        model if average is None else nn.ModuleList([model, average]),
        steps,
        shape=recipe.strength_sched,
        ramp=recipe.strength_ramp,
        start=recipe.strength_start,
        end=recipe.strength_end,
        noise=recipe.noise if draws_noise(model) else None,
        noise_start=recipe.noise_start,
        noise_ramp=recipe.noise_ramp,
    )
