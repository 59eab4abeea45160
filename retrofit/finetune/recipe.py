"""A recipe: everything that decides how a run goes, with timm's argument names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from retrofit.conversion_options import OPTIONS
from retrofit.utils.files import atomic_write
from retrofit.utils.text import did_you_mean, printable, shown

if TYPE_CHECKING:
    from retrofit.layers.noise import NoiseKind
else:
    # Without torch, so that --help and the shell's completion answer at once.
    NoiseKind = Literal[OPTIONS["noise_kind"].words]

# The interval of timm's step schedule where none is given.
_TIMMS_DECAY_EPOCHS = 90

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


def _listed(value: Any) -> Any:
    """Take "0.8 1", "0.8,1" or "[0.8, 1]", as a command line gives it, for a list."""
    if isinstance(value, str):
        return value.strip("[]").replace(",", " ").split()
    return value


def _parts(value: Any) -> Any:
    """Take a split's name, or a fraction of the training images.

    Raises:
        PydanticCustomError: If it is a number that is no fraction.
    """
    try:
        fraction = float(value)
    except (TypeError, ValueError, OverflowError):
        fraction = math.nan
        if isinstance(value, str):
            return value
    if not 0 <= fraction < 1:
        raise PydanticCustomError("split", "Input should be a split's name, or from 0 to below 1")
    return fraction


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise PydanticCustomError("order", "two numbers, the smaller first")
    return pair


Range = Annotated[tuple[Positive, Positive], BeforeValidator(_listed), AfterValidator(_ascending)]
Milestones = Annotated[list[Count], BeforeValidator(_listed)]
Split = Annotated[str | float, BeforeValidator(_parts)]


def _as(default: Any, description: str) -> Any:
    """Return a setting's default, with its help."""
    return Field(default, description=description)


class Recipe(BaseModel):
    """All settings of a run, with timm's names where timm has them; each is a flag of `retrofit
    finetune`.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), str_strip_whitespace=True
    )

    model: str | None = _as(None, "Artifact or network to train.")
    pretrained: bool = _as(False, "Fetch the library's weights, if MODEL is a name.")
    checkpoint: str | None = _as(None, "Weights, if MODEL is a name.")
    match: Literal["name", "order"] | None = _as(
        None, "Pair the weights' tensors by name or order (default: name)."
    )

    data_dir: str | None = _as(
        None, "Folder or .tar with train and val, each with a folder per class; or a dataset name."
    )
    dataset: str = _as(
        "", "timm dataset name (torch/cifar10, hfds/...), or digits, which is built in."
    )
    train_split: str = _as("train", "Split to train on.")
    val_split: Split = _as(
        "validation",
        "Split to validate on, or fraction of train to hold out; 0.1 if there is no such split.",
    )
    class_map: str | None = _as(None, "File with class names in the order of the outputs.")
    num_classes: Count | None = _as(None, "Number of outputs, if the data does not say.")
    img_size: Count | None = _as(None, "Image height and width (default: the network's own).")
    crop_pct: Annotated[float, Field(ge=0.1, le=1)] | None = _as(
        None, "Center crop for validation (default: the network's own)."
    )

    batch_size: Count = _as(64, "Images per process and step.")
    grad_accum_steps: Count = _as(1, "Batches to accumulate gradients over for each step.")
    epochs: Count = _as(10, "Passes over the training images.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = _as(42, "Seed of every random choice.")

    opt: str = _as("adamw", "timm's optimizer.")
    lr: Positive = _as(
        3e-4, "Learning rate; try 1e-4 with batches of 1 or 2, 1e-3 with batch statistics."
    )
    weight_decay: NotNegative = _as(
        0.05, "Weight decay; skips biases and norms, but not ProxyNorm's parameters."
    )
    decay_norms: bool = _as(False, "Also decay biases, gamma and beta: everything that is trained.")
    opt_eps: Positive | None = _as(None, "The optimizer's eps (default: timm's).")
    momentum: Fraction = _as(0.9, "Momentum, for optimizers that have one.")
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = _as(
        None, "Layer-wise learning rate decay."
    )
    clip_grad: NotNegative | None = _as(1.0, "Clip the gradient to this norm; 0: no clipping.")
    sched: Literal["cosine", "tanh", "step", "multistep", "poly", "constant", "none"] = _as(
        "cosine", "timm's learning rate schedule; constant has a warm-up, none does not."
    )
    warmup_epochs: NotNegative | None = _as(
        None,
        "Epochs of linear warm-up (default: a tenth of the run, at least one, at most half of it).",
    )
    warmup_lr: NotNegative = _as(1e-6, "Learning rate at the start of warm-up.")
    min_lr: NotNegative = _as(0.0, "Learning rate at the end of the decay.")
    decay_epochs: Positive | None = _as(None, "Interval of a step schedule (default: 90).")
    decay_milestones: Milestones = _as([30, 60], "Epochs of a multistep schedule.")
    decay_rate: Positive = _as(0.1, "Factor of a step schedule, power of a poly one.")

    strength_sched: Literal["linear", "cosine", "there-and-back", "off"] = _as(
        "linear",
        "Course of the strength t; there-and-back rises to 1, then returns to its end (which you "
        "must set).",
    )
    strength_ramp: Fraction = _as(0.5, "Fraction of training over which the strength changes.")
    strength_end: Fraction = _as(1.0, "Strength at the end.")
    noise: NotNegative | None = _as(None, "Noise factor xi at the end (default: what convert set).")
    noise_kind: NoiseKind | None = _as(None, "Kind of noise (default: what convert set).")
    noise_start: Fraction = _as(0.5, "Fraction of training at which the noise starts.")
    noise_ramp: Fraction = _as(0.1, "Fraction of training over which the noise grows.")
    bn_momentum: Fraction | None = _as(None, "Weight of the latest batch in running statistics.")
    precise_bn: Annotated[int, Field(ge=2)] | None = _as(
        None, "Before each validation, re-estimate running statistics on this many training images."
    )
    freeze: Literal["none", "all-but-norm"] = _as(
        "none",
        "What to freeze; all-but-norm trains only the converted layers, and the classifier if it "
        "is new.",
    )
    sync_norm: bool = _as(False, "Compute batch statistics over all processes.")

    teacher: Literal["none", "source"] = _as(
        "none", "Teacher; source is the network before its conversion."
    )
    distill_loss_weight: NotNegative = _as(1.0, "Weight of the distillation loss.")
    task_loss_weight: NotNegative = _as(
        1.0, "Weight of the loss on the labels; 0 for images without labels."
    )
    kd_temperature: Positive = _as(
        1.0, "Temperature that softens the outputs of teacher and student."
    )

    no_aug: bool = _as(False, "Disable all augmentation.")
    scale: Range = _as((0.08, 1.0), "Area of random crops.")
    ratio: Range = _as((0.75, 4 / 3), "Aspect ratio of random crops.")
    train_interpolation: str = _as("random", "Interpolation of random crops.")
    hflip: Fraction = _as(0.5, "Probability of a horizontal flip.")
    color_jitter: NotNegative = _as(0.4, "Strength of color jitter.")
    aa: str | None = _as(None, "AutoAugment policy (rand-m9-mstd0.5-inc1, ...).")
    reprob: Fraction = _as(0.0, "Probability of random erasing.")
    smoothing: Annotated[float, Field(ge=0, lt=1)] = _as(0.1, "Label smoothing.")
    mixup: NotNegative = _as(0.0, "Mixup alpha.")
    cutmix: NotNegative = _as(0.0, "CutMix alpha.")

    model_ema: bool = _as(
        False, "Keep an average of the weights; it is validated, and saved as best."
    )
    model_ema_decay: Fraction = _as(0.9998, "Decay of that average.")

    workers: Annotated[int, Field(ge=0, le=1024)] = _as(2, "Processes that decode images.")
    device: str | None = _as(
        None, "Device to run on (default: an accelerator if available, else cpu)."
    )
    amp: bool = _as(False, "Use mixed precision.")
    amp_dtype: Literal["float16", "bfloat16"] | None = _as(
        None, "Its data type (default: float16; bfloat16 on cpu)."
    )
    channels_last: bool = _as(False, "Use the channels-last memory format.")
    checkpoint_every: Annotated[int, Field(ge=0)] = _as(
        0, "Steps between saved states; 0: once per epoch."
    )
    log_with: Annotated[list[str], BeforeValidator(_listed)] = _as(
        [], "accelerate trackers to log to."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse YAML's yes and no for a number: pydantic takes them for 1 and 0."""
        if (
            isinstance(value, bool)
            and cls.model_fields[str(info.field_name)].annotation is not bool
        ):
            raise PydanticCustomError("value", "Input should be a value")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        from timm.optim import list_optimizers

        wrong = list(self._contradictions())
        optimizers = list_optimizers()
        optimizer = self.opt.lower()
        if optimizer not in optimizers:
            hint = did_you_mean(optimizer, optimizers)
            wrong.append(f"opt {shown(self.opt)} is unknown to timm{hint}")
        if wrong:
            raise ValueError(", ".join(wrong))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Give a sentence for each contradiction between settings."""
        yield from self._objective_contradictions()
        yield from self._schedule_contradictions()
        yield from self._rate_contradictions()
        if self.amp_dtype and not self.amp:
            yield "amp_dtype chooses the data type of mixed precision; set amp: true too"
        augmented = [name for name in ("aa", "reprob") if getattr(self, name)]
        if self.no_aug and augmented:
            names = " and ".join(augmented)
            yield f"no_aug does not apply {names}; set no_aug: false or drop them"
        dataset = self.dataset
        needs_no_folder = dataset in ("", "digits")
        is_downloaded = dataset.startswith("hf")
        if not (self.data_dir or needs_no_folder or is_downloaded):
            shortened = printable(dataset, 64)
            yield f"dataset {shortened} needs data_dir too, the folder that holds it"

    def _schedule_contradictions(self) -> Iterator[str]:
        if self.strength_sched == "there-and-back" and self.strength_end == 1:
            yield (
                "there-and-back returns to a strength below 1; set strength_end, 0 for the "
                "source's cost"
            )
        ignored = [name for name in ("warmup_epochs", "layer_decay") if getattr(self, name)]
        if self.sched == "none" and ignored:
            names = " and ".join(ignored)
            yield f"sched none does not apply {names}; set sched: constant, which does"

    def _rate_contradictions(self) -> Iterator[str]:
        """Give a sentence for each way in which the learning rate would not go as it is named."""
        epochs = self.epochs
        if self.warmup > epochs:
            yield (
                f"the warm-up takes {self.warmup:g} epochs and the run {epochs}, so that lr is "
                "never reached; lower warmup_epochs"
            )
        if self.min_lr > self.lr:
            yield f"min_lr {self.min_lr:g} is above lr {self.lr:g}; lower it"
        first_steps = {
            "step": self.decay_epochs or _TIMMS_DECAY_EPOCHS,
            "multistep": min(self.decay_milestones, default=math.inf),
        }
        first = first_steps.get(self.sched, 0)
        if first >= epochs:
            setting = "decay_epochs" if self.sched == "step" else "decay_milestones"
            yield (
                f"sched {self.sched} would first lower lr after {first:g} epochs, and the run has "
                f"{epochs}; set {setting}"
            )

    def _objective_contradictions(self) -> Iterator[str]:
        mixed = bool(self.mixup or self.cutmix)
        if mixed and self.batch_size % 2:
            yield "mixup and cutmix need an even batch_size"
        if self.labelled:
            return
        if self.teacher == "none":
            yield "task_loss_weight 0 needs teacher: source"
            return
        if self.distill_loss_weight == 0:
            yield "one of distill_loss_weight and task_loss_weight must be above 0"
        if mixed:
            yield "mixup and cutmix act on labels; set task_loss_weight above 0 or drop them"

    @property
    def labelled(self) -> bool:
        """Whether the images' labels are used."""
        return self.task_loss_weight > 0

    @property
    def warmup(self) -> float:
        """Epochs of warm-up, as resolved."""
        if self.sched == "none":
            return 0.0
        if self.warmup_epochs is not None:
            return self.warmup_epochs
        return min(max(1.0, self.epochs / 10), self.epochs / 2)

    def save(self, path: Path) -> None:
        """Write the recipe so that `--recipe` reads it back."""
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)
        with atomic_write(path, force=True) as temporary:
            temporary.write_text(text)


# What may differ between the parts of an interrupted run: it changes how the work is done, not its
# result.
FREE = frozenset({"workers", "device", "checkpoint_every", "log_with"})
# These may have moved; what lies there is looked at.
PLACES = frozenset({"model", "checkpoint", "data_dir", "class_map"})
