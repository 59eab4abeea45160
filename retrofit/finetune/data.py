"""The images of a run: those to train on, and those to validate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import IterableDataset

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.loaders import Part
from retrofit.finetune.recipe import Recipe
from retrofit.images.dataset import TO_VALIDATE, ImageData, has_part, open_images, parts_in
from retrofit.utils.text import shortlist, shown

_HELD_OUT = 0.1  # where the data has no part to validate on and the recipe names no fraction


@dataclass(frozen=True)
class Images:
    """The images of a run."""

    train: ImageData
    val: ImageData | None  # to validate on
    outputs: int | None  # that the network needs; None where the data does not tell
    names: tuple[str, ...] | None  # of the outputs, as far as known
    notes: tuple[str, ...] = ()  # sentences for the user


def open_data(recipe: Recipe, labels: Sequence[str] | None, channels: int) -> Images:
    """Open the images that a recipe names, for a network of such labels and channels; an error says what is wrong."""

    def opened(split: str, labels: Sequence[str] | None = None) -> ImageData:
        class_map = recipe.class_map if recipe.labelled else None
        return open_images(
            recipe.data_dir, dataset=recipe.dataset, split=split, class_map=class_map, labels=labels, channels=channels
        )

    train = opened(_train_split(recipe))
    if isinstance(train.images, IterableDataset):
        raise UsageError(
            f"{recipe.dataset} is a stream, whose order an interrupted run could not go on with; unpack it into a "
            "folder or tar, or use hfds/"
        )
    if recipe.labelled and train.classes == 1:
        raise RetrofitError(
            "the data has a single class; give one folder a class, or train without labels: `teacher='source'` "
            "and `task_loss_weight=0`"
        )
    keeps_classifier = len(labels or ()) in (train.classes, recipe.num_classes) or recipe.teacher == "source"
    if recipe.labelled and keeps_classifier and train.matched == "order":
        train = train.mapped(labels=labels)
    outputs, names = train.classes, train.names
    if train.matched == "labels":
        outputs, names = len(labels or ()), tuple(labels or ())
    elif train.matched == "class map" and names is not None:
        outputs = len(names)

    notes, val_split = train.notes, recipe.val_split
    if isinstance(val_split, str) and not has_part(recipe.data_dir, recipe.dataset, val_split):
        if val_split not in TO_VALIDATE:
            raise UsageError(f"the data has no part {val_split!r}; give `val_split` the name of one, or a fraction")
        val_split = _HELD_OUT
        notes += (f"the data has no part to validate on: {_HELD_OUT:.0%} of it are held out (`val_split`)",)
    val: ImageData | None
    if isinstance(val_split, str):
        val = opened(val_split, names if recipe.labelled else None)  # by order alone, a missing class would move others
        matched_by_order = recipe.labelled and val.matched == "order"
        if matched_by_order and names is not None and val.names is not None and val.names != names:
            apart = sorted({*names} ^ {*val.names}) or val.names
            raise RetrofitError(
                f"the classes of {val_split!r} are not those of {recipe.train_split!r} ({shortlist(apart)}); give both "
                "the same folders, or a `class_map`"
            )
    else:
        train, val = _hold_out(train, val_split, recipe.seed)
    if not recipe.labelled:
        outputs, names = None, None
    return Images(train, val, outputs, names, notes)


def _train_split(recipe: Recipe) -> str:
    """Return the part to train on: all of a folder or tar that has no parts."""
    if has_part(recipe.data_dir, recipe.dataset, recipe.train_split):
        return recipe.train_split
    others = parts_in(recipe.data_dir)
    if isinstance(recipe.val_split, str) and has_part(recipe.data_dir, recipe.dataset, recipe.val_split):
        others = others or [recipe.val_split]
    if others or recipe.train_split != Recipe.model_fields["train_split"].default:
        beside = f", but {shortlist(others)}" if others else ""
        raise UsageError(
            f"the data has no part {shown(recipe.train_split)}{beside}; give `train_split` the name of one"
        )
    return "."


def _hold_out(data: ImageData, fraction: float, seed: int) -> tuple[ImageData, ImageData | None]:
    if fraction == 0:
        return data, None
    count = len(data.images)
    held = round(count * fraction)
    if not 0 < held < count:
        raise RetrofitError(
            f"{fraction:.0%} of {count} images leaves none for training or validation; give more images"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    train, val = (Part(data.images, sorted(indices)) for indices in (order[held:], order[:held]))
    return replace(data, images=train), replace(data, images=val)
