"""The images of a run: those to train on, in what order and how augmented, and those to validate
on.

The order of an epoch and the augmentation of an image depend on the seed, the epoch and the image
alone: not on the number of workers or processes, and not on whether the run was interrupted.
"""

import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from timm.data import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from retrofit.errors import RetrofitError, UsageError
from retrofit.evaluation import Accuracy, evaluate, predictions
from retrofit.finetune.recipe import Recipe
from retrofit.images.dataset import (
    TO_VALIDATE,
    ImageData,
    has_part,
    heed_no_signals,
    open_images,
    parts_in,
)
from retrofit.record import Preprocess
from retrofit.utils.text import one_line, shortlist, shown

UNLABELLED = "train without labels: `teacher='source'` and `task_loss_weight=0`"
# where the data has no part to validate on and the recipe names no fraction
_HELD_OUT = 0.1
# a transform, which pickles
_AS_IT_IS = nn.Identity()
# epoch, number of the image
Key = tuple[int, int]


@dataclass(frozen=True)
class Images:
    """The images of a run."""

    train: ImageData
    # to validate on
    val: ImageData | None
    names: (
        tuple[str, ...] | None
    )  # of the outputs that the network needs; None where the data does not tell
    # sentences for the user
    notes: tuple[str, ...] = ()


def open_data(recipe: Recipe, labels: Sequence[str] | None, channels: int) -> Images:
    """Open the images that a recipe names, for a network of such labels and channels; an error says
    what is wrong.
    """
    class_map = recipe.class_map if recipe.labelled else None
    opened = partial(
        open_images, recipe.data_dir, dataset=recipe.dataset, class_map=class_map, channels=channels
    )
    train = opened(split=_train_split(recipe))
    if isinstance(train.images, IterableDataset):
        raise UsageError(
            f"{recipe.dataset} is a stream, in which no run can be resumed; unpack it, or use hfds/"
        )
    if recipe.labelled and train.classes == 1:
        raise RetrofitError(
            f"the data has a single class; give a folder per class, or {UNLABELLED}"
        )
    keeps_classifier = (
        len(labels or ()) in (train.classes, recipe.num_classes) or recipe.teacher == "source"
    )
    if recipe.labelled and keeps_classifier and train.matched == "order":
        train = train.mapped(labels=labels)
    names = tuple(labels or ()) if train.matched == "labels" else train.names
    notes, val_split = train.notes, recipe.val_split
    if isinstance(val_split, str) and not has_part(recipe.data_dir, recipe.dataset, val_split):
        if val_split not in TO_VALIDATE:
            raise UsageError(
                f"the data has no part {val_split!r}; give `val_split` the name of one, or a fraction"
            )
        val_split = _HELD_OUT
        notes += (
            f"the data has no part to validate on: {_HELD_OUT:.0%} of it are held out (`val_split`)",
        )
    if not recipe.labelled:
        names = None
    if isinstance(val_split, float):
        return Images(*_hold_out(train, val_split, recipe.seed), names, notes)
    # by order alone, a missing class would move others
    val = opened(split=val_split, labels=names)
    if val.contradicts(names):
        apart = sorted({*(names or ())} ^ {*(val.names or ())}) or val.names or ()
        what = f"the classes of {val_split!r} are not those of {recipe.train_split!r} ({shortlist(apart)})"
        raise RetrofitError(f"{what}; give both the same folders, or a `class_map`")
    return Images(train, val, names, notes)


def _train_split(recipe: Recipe) -> str:
    """Return the part to train on: all of a folder or tar that has no parts."""
    if has_part(recipe.data_dir, recipe.dataset, recipe.train_split):
        return recipe.train_split
    others = parts_in(recipe.data_dir)
    if isinstance(recipe.val_split, str) and has_part(
        recipe.data_dir, recipe.dataset, recipe.val_split
    ):
        others = others or [recipe.val_split]
    if others or recipe.train_split != Recipe.model_fields["train_split"].default:
        beside = f", but {shortlist(others)}" if others else ""
        what = f"the data has no part {shown(recipe.train_split)}{beside}"
        raise UsageError(f"{what}; give `train_split` the name of one")
    return "."


def _hold_out(data: ImageData, fraction: float, seed: int) -> tuple[ImageData, ImageData | None]:
    if fraction == 0:
        return data, None
    count = len(data.images)
    held = round(count * fraction)
    if not 0 < held < count:
        what = f"{fraction:.0%} of {count} images leaves none for training or validation"
        raise RetrofitError(f"{what}; give more images")
    order = torch.randperm(
        count, generator=torch.Generator().manual_seed(seed), device="cpu"
    ).tolist()
    train, val = (Part(data.images, sorted(indices)) for indices in (order[held:], order[:held]))
    return replace(data, images=train), replace(data, images=val)


class Part(Dataset[Any]):
    """Some images of a map-style dataset (all without `indices`), with a transform of their own.

    `targets`, once set, take the place of the dataset's; those of unreadable images stay negative.
    """

    targets: Sequence[int] | None = None

    def __init__(
        self,
        images: Any,
        indices: Sequence[int] | None = None,
        transform: Callable[[Any], Any] = _AS_IT_IS,
    ) -> None:
        self.images = copy.copy(images)
        self.images.transform = _AS_IT_IS
        self.indices = range(len(images)) if indices is None else indices
        # timm's create_loader sets another
        self.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, target = self.images[self.indices[index]]
        if self.targets is not None and target >= 0:
            target = self.targets[index]
        return self.transform(image), target

    def unreadable(self, target: int) -> str:
        """Return the name of the file behind a negative target."""
        return str(self.images.unreadable(target))

    def batches(self, count: int, batch_size: int) -> Iterator[Tensor]:
        """Give `count` images, those that can be read, in batches (N, C, H, W).

        They are spread over all images, and so are those of each batch: sorted by class, neighbours
        would be of one.
        """
        count = min(count, len(self))
        chosen = [place * len(self) // count for place in range(count)]
        batches = math.ceil(count / batch_size)
        for first in range(batches):
            readable = [
                image
                for image, target in map(self.__getitem__, chosen[first::batches])
                if target >= 0
            ]
            if readable:
                yield torch.stack(readable)


class Augmented(Part):
    """Images whose augmentation is drawn from (seed, epoch, image): ask for a list of (epoch,
    number).
    """

    def __init__(self, images: Any, transform: Callable[[Any], Any], seed: int) -> None:
        super().__init__(images, transform=transform)
        self._seed = seed

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """Read a batch, and leave Python's, numpy's and torch's CPU generators as they were."""
        states = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        )  # slow, so once a batch
        try:
            return [self._read(*key) for key in keys]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])

    def _read(self, epoch: int, number: int) -> Any:
        seed = _hash(self._seed, epoch, number)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        return self[number]


def training_transform(recipe: Recipe, preprocess: Preprocess) -> Callable[[Any], Any]:
    """Build timm's training augmentation, all on the CPU and image by image; a UsageError says why
    timm cannot.
    """
    given = recipe.model_dump(
        include={"no_aug", "scale", "ratio", "hflip", "color_jitter"}
    )  # timm's names
    try:
        return create_transform(
            preprocess.input_size,
            is_training=True,
            **given,
            auto_augment=recipe.aa,
            interpolation=recipe.train_interpolation,
            mean=preprocess.mean,
            std=preprocess.std,
            re_prob=recipe.reprob,
            re_mode="pixel",
        )
    # timm asserts, and raises KeyError and ValueError
    except Exception as error:
        what = f"timm cannot build the augmentation ({one_line(error)})"
        raise UsageError(f"{what}; check `aa`, `train_interpolation` and `scale`") from error


class Order:
    """The batches of `epoch` for one process, from batch `start` on: set both before each pass.

    The processes' batches together are those that a single process with the whole batch size gives.
    """

    def __init__(self, count: int, batch_size: int, rank: int, world: int, seed: int) -> None:
        self.count, self.batch_size, self.rank, self.world, self.seed = (
            count,
            batch_size,
            rank,
            world,
            seed,
        )
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.count // (
            self.batch_size * self.world
        )  # what is left over at an epoch's end is left out

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(_hash(self.seed, self.epoch))
        order = torch.randperm(self.count, generator=generator, device="cpu").tolist()
        for batch in range(self.start, len(self)):
            first = (batch * self.world + self.rank) * self.batch_size
            yield [(self.epoch, number) for number in order[first : first + self.batch_size]]


class Batches:
    """The training batches of one process, epoch by epoch; a RetrofitError if the images are too
    few for one.
    """

    def __init__(
        self, images: Any, recipe: Recipe, preprocess: Preprocess, rank: int, world: int
    ) -> None:
        batch_size = min(recipe.batch_size, len(images) // world)
        if recipe.mixup or recipe.cutmix:
            batch_size -= batch_size % 2
        if batch_size < 1:
            raise RetrofitError(
                f"{len(images)} images to train on are too few for {world} processes; give more"
            )
        self._order = Order(len(images), batch_size, rank, world, recipe.seed)
        self._images = Augmented(images, training_transform(recipe, preprocess), recipe.seed)
        self._loader = DataLoader(
            self._images,
            # which does not hold the loader: workers end when nothing does
            batch_sampler=self._order,
            num_workers=recipe.workers,
            worker_init_fn=heed_no_signals,
            persistent_workers=recipe.workers > 0,
            pin_memory=torch.cuda.is_available(),
            # the loader draws from it, and not from the one that the network draws from
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return len(self._order)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Give an epoch's batches of (images, targets), from batch `start` on."""
        self._order.epoch, self._order.start = number, start
        return iter(self._loader)

    def replace_unreadable(self, images: Tensor, targets: Tensor) -> list[str]:
        """Replace a batch's unreadable images by readable ones and return their names; a
        RetrofitError if all are.
        """
        answers = targets.tolist()
        readable = [place for place, target in enumerate(answers) if target >= 0]
        names = {
            place: self._images.unreadable(target)
            for place, target in enumerate(answers)
            if target < 0
        }
        if not readable:
            unreadable = f"none of a batch's {len(names)} images can be read ({shortlist(list(names.values()))})"
            raise RetrofitError(f"{unreadable}; check the files")
        for place, substitute in zip(names, cycle(readable), strict=False):
            images[place], targets[place] = images[substitute], targets[substitute]
        return list(names.values())


def _hash(*key: int) -> int:
    """Return a 32-bit number that depends on all of `key`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")


def validation_share(
    images: ImageData | None,
    preprocess: Preprocess,
    teacher: nn.Module | None,
    accelerator: Accelerator,
) -> ImageData | None:
    """Return the images that this process validates on; a RetrofitError if there are fewer images
    than processes.

    A teacher labels them, so that accuracy is agreement with it.
    """
    if images is None:
        return None
    count, processes = len(images.images), accelerator.num_processes
    if count < processes:
        advice = "give more, or a larger `val_split`"
        raise RetrofitError(
            f"{count} images to validate on are too few for {processes} processes; {advice}"
        )
    share = range(accelerator.process_index, count, processes)
    part = Part(images.images, share, create_transform(**preprocess.to_dict()))
    if teacher is None:
        return replace(images, images=part)
    part.targets = predictions(
        teacher, (batch[0].to(accelerator.device) for batch in DataLoader(part, 32))
    )
    return replace(images, images=part, outputs=None)


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
    own = result.images - result.not_finite
    counts = [
        result.images,
        result.correct1,
        result.correct5,
        own,
        result.loss * own if own else 0.0,
    ]
    seen, correct1, correct5, finite, loss = summed(counts, accelerator)
    mean_loss = loss / finite if finite else math.nan
    return replace(
        result,
        images=round(seen),
        correct1=round(correct1),
        correct5=round(correct5),
        loss=mean_loss,
    )


def summed(figures: list[float], accelerator: Accelerator) -> list[float]:
    """Return the sums of figures over all processes."""
    device = accelerator.device if accelerator.device.type == "cuda" else "cpu"
    return accelerator.reduce(torch.tensor(figures, dtype=torch.float64, device=device)).tolist()
