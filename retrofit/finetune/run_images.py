"""The images of a run: those to train on, and those to validate on."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.images.dataset import TO_VALIDATE, ImageData, has_split, open_images, split_of
from retrofit.images.samples import evenly_spread
from retrofit.utils.text import shortlist, shown

UNLABELLED = "train without labels: `teacher='source'` and `task_loss_weight=0`"
# The fraction to validate on where the data has no such split and the recipe names no fraction.
_HELD_OUT = 0.1
# A transform that changes nothing and can be pickled.
_IDENTITY = nn.Identity()


@dataclass(frozen=True)
class Images:
    """The images of a run."""

    train: ImageData
    # None if nothing is validated.
    val: ImageData | None
    # Names of the outputs that the network needs; None where the data does not tell.
    names: tuple[str, ...] | None
    # Sentences for the user.
    notes: tuple[str, ...] = ()


def open_data(recipe: Recipe, labels: Sequence[str] | None, channels: int) -> Images:
    """Open the images that a recipe names.

    Args:
        recipe: The settings of the run.
        labels: The names of the network's outputs.
        channels: The channels that the network takes.

    Raises:
        UsageError: If the data has no such split, or is a stream.
        RetrofitError: If the images cannot be read, have a single class, or leave none for a split.
    """
    train_split = _train_split(recipe)
    train = _open_split(recipe, train_split, channels)
    if isinstance(train.images, IterableDataset):
        raise UsageError(
            f"{recipe.dataset} is a stream, in which no run can be resumed; unpack it, or use hfds/"
        )
    names = None
    if recipe.labelled:
        train = _in_output_order(recipe, train, labels)
        names = train.names
    notes = train.notes
    val_split = _val_split(recipe)
    if val_split != recipe.val_split:
        share = f"{val_split:.0%} of it are held out (`val_split`)"
        notes += (f"the data has no split to validate on: {share}",)
    if isinstance(val_split, float):
        train, val = _hold_out(train, val_split, recipe.seed)
    else:
        if train_split == val_split or "." in (train_split, val_split):
            notes += (
                f"warning: the splits {shown(train_split)} and {shown(val_split)} share images, so "
                "that the run is validated on what it trains on; give `val_split` another one, or "
                "a fraction",
            )
        val = _open_split(recipe, val_split, channels, names)
        _refuse_other_classes(recipe, names, val)
    return Images(train, val, names, notes)


def _in_output_order(recipe: Recipe, train: ImageData, labels: Sequence[str] | None) -> ImageData:
    """Return the training images, with their classes in the order of the network's outputs where it
    keeps its classifier.
    """
    if train.classes == 1:
        raise RetrofitError(
            f"the data has a single class; give a folder per class, or {UNLABELLED}"
        )
    if train.classless:
        raise RetrofitError(
            f"{shortlist(train.classless)} lie beside the folders of the classes, in none of them; "
            "move or remove them"
        )
    if train.matched == "order" and _keeps_classifier(recipe, train, labels):
        return train.mapped(labels=labels)
    return train


def _open_split(
    recipe: Recipe, split: str, channels: int, labels: Sequence[str] | None = None
) -> ImageData:
    return open_images(
        recipe.data_dir,
        dataset=recipe.dataset,
        split=split,
        class_map=recipe.class_map if recipe.labelled else None,
        labels=labels,
        channels=channels,
    )


def _train_split(recipe: Recipe) -> str:
    """Return the split to train on: all of a folder or tar that has no splits."""
    default: str | None = Recipe.model_fields["train_split"].default
    val_split = recipe.val_split
    if isinstance(val_split, str) and has_split(recipe.data_dir, recipe.dataset, val_split):
        # All of the data would hold what is validated on.
        default = None
    advice = "give `train_split` the name of one"
    return split_of(recipe.data_dir, recipe.dataset, recipe.train_split, default, advice)


def _val_split(recipe: Recipe) -> str | float:
    """Return the split to validate on, or a fraction of the images to train on."""
    split = recipe.val_split
    if isinstance(split, float):
        return split
    if split in TO_VALIDATE and not has_split(recipe.data_dir, recipe.dataset, split):
        return _HELD_OUT
    advice = "give `val_split` the name of one, or a fraction"
    return split_of(recipe.data_dir, recipe.dataset, split, None, advice)


def _keeps_classifier(recipe: Recipe, train: ImageData, labels: Sequence[str] | None) -> bool:
    """Tell whether the network's outputs stay as they are, so that its labels are the data's."""
    if recipe.teacher == "source":
        return True
    return len(labels or ()) in (train.classes, recipe.num_classes)


def _refuse_other_classes(recipe: Recipe, names: tuple[str, ...] | None, val: ImageData) -> None:
    """Refuse classes to validate on that differ from the trained ones and are matched by order
    alone: a missing class would shift the others.
    """
    if not val.contradicts(names):
        return
    apart = sorted(set(names or ()) ^ set(val.names or ()))
    raise RetrofitError(
        f"the classes of {recipe.val_split!r} are not those of {recipe.train_split!r} "
        f"({shortlist(apart)}); give both the same folders, or a `class_map`"
    )


def _hold_out(data: ImageData, fraction: float, seed: int) -> tuple[ImageData, ImageData | None]:
    if fraction == 0:
        return data, None
    count = len(data.images)
    held = round(count * fraction)
    if not 0 < held < count:
        raise RetrofitError(
            f"{fraction:.0%} of {count} images leaves none for training or validation; "
            "give more images"
        )
    generator = torch.Generator()
    generator.manual_seed(seed)
    shuffled = torch.randperm(count, generator=generator, device="cpu")
    order = shuffled.tolist()
    trained = sorted(order[held:])
    validated = sorted(order[:held])
    train = ImageSubset(data.images, trained)
    val = ImageSubset(data.images, validated)
    train_data = replace(data, images=train)
    val_data = replace(data, images=val)
    return train_data, val_data


class ImageSubset(Dataset[Any]):
    """Some images of a map-style dataset, with a transform of their own.

    Args:
        images: The dataset.
        indices: Which of its images; None for all.
        transform: What becomes of each image.

    Attributes:
        targets: Once set, they take the place of the dataset's; those of unreadable images stay
            negative.
    """

    targets: Sequence[int] | None = None

    def __init__(
        self,
        images: Any,
        indices: Sequence[int] | None = None,
        transform: Callable[[Any], Any] = _IDENTITY,
    ) -> None:
        self.images = copy.copy(images)
        self.images.transform = _IDENTITY
        self.indices = range(len(images)) if indices is None else indices
        # timm's create_loader replaces this attribute.
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
        """Yield `count` images in batches (N, C, H, W), without those that cannot be read.

        The images of each batch are spread over all images: neighbours may be of one class.
        """
        chosen = evenly_spread(len(self), count)
        batches = math.ceil(len(chosen) / batch_size)
        for first in range(batches):
            samples = [self[index] for index in chosen[first::batches]]
            readable = [image for image, target in samples if target >= 0]
            if readable:
                yield torch.stack(readable)
