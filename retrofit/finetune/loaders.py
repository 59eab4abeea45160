"""The training images of a run: in what order, how augmented.

The order of an epoch and the augmentation of an image depend on the seed, the epoch and the image alone: not on the
number of workers or processes, and not on whether the run was interrupted.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from timm.data import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.images.dataset import heed_no_signals
from retrofit.record import Preprocess
from retrofit.utils.text import shortlist

Key = tuple[int, int]  # epoch, number of the image


class Part(Dataset[Any]):
    """Some images of a map-style dataset (all without `indices`), with a transform of their own.

    `targets` take the place of the dataset's; those of unreadable images stay negative.
    """

    transform: Callable[[Any], Any]  # timm's create_loader sets it

    def __init__(self, images: Any, indices: Sequence[int] | None = None, targets: Sequence[int] | None = None) -> None:
        self.images = copy.copy(images)
        self.images.transform = nn.Identity()  # which pickles
        self.indices = range(len(images)) if indices is None else indices
        self.targets = targets

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

    def read(self, indices: Iterable[int]) -> Tensor | None:
        """Return those images that can be read, (N, C, H, W); None if there is none."""
        readable = [image for image, target in map(self.__getitem__, indices) if target >= 0]
        return torch.stack(readable) if readable else None

    def spread(self, count: int) -> Tensor | None:
        """Return `count` images, as `read` does, spread over all of them and so over the classes."""
        return self.read(place * len(self) // count for place in range(count))

    def batches(self, count: int, batch_size: int, seed: int) -> Iterator[Tensor]:
        """Give a random choice of `count` images, that of `seed`, in batches of every class."""
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        for places in chosen.tensor_split(math.ceil(len(chosen) / batch_size)):
            if (images := self.read(places.tolist())) is not None:
                yield images


class Augmented(Part):
    """Images whose augmentation is drawn from (seed, epoch, image): ask for a list of (epoch, number)."""

    def __init__(self, images: Any, transform: Callable[[Any], Any], seed: int) -> None:
        super().__init__(images)
        self.transform = transform
        self._seed = seed

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """Read a batch, and leave Python's, numpy's and torch's CPU generators as they were."""
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # slow, so once a batch
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
    """Build timm's training augmentation, all on the CPU and image by image; a UsageError says why timm cannot."""
    try:
        return create_transform(
            preprocess.input_size,
            is_training=True,
            no_aug=recipe.no_aug,
            scale=recipe.scale,
            ratio=recipe.ratio,
            hflip=recipe.hflip,
            color_jitter=recipe.color_jitter,
            auto_augment=recipe.aa,
            interpolation=recipe.train_interpolation,
            mean=preprocess.mean,
            std=preprocess.std,
            re_prob=recipe.reprob,
            re_mode="pixel",
        )
    except Exception as error:  # timm asserts, and raises KeyError and ValueError
        raise UsageError(
            f"timm cannot build the augmentation ({error or type(error).__name__}); check `aa`, "
            "`train_interpolation` and `scale`"
        ) from error


class Order(Sampler[list[Key]]):
    """The batches of `epoch` for one process, from batch `start` on: set both before each pass.

    The processes' batches together are those that a single process with the whole batch size gives.
    """

    def __init__(self, count: int, batch_size: int, rank: int, world: int, seed: int) -> None:
        self.count, self.batch_size, self.rank, self.world, self.seed = count, batch_size, rank, world, seed
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; what is left over at its end is left out."""
        return self.count // (self.batch_size * self.world)

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(_hash(self.seed, self.epoch))
        order = torch.randperm(self.count, generator=generator, device="cpu").tolist()
        for batch in range(self.start, len(self)):
            first = (batch * self.world + self.rank) * self.batch_size
            yield [(self.epoch, index) for index in order[first : first + self.batch_size]]


class Batches:
    """The training batches of one process, epoch by epoch; a RetrofitError if the images are too few for one."""

    def __init__(self, images: Any, transform: Callable[[Any], Any], recipe: Recipe, rank: int, world: int) -> None:
        batch_size = min(recipe.batch_size, len(images) // world)
        if recipe.mixup or recipe.cutmix:
            batch_size -= batch_size % 2
        if batch_size < 1:
            raise RetrofitError(f"{len(images)} images to train on are too few for {world} processes; give more")
        self._order = Order(len(images), batch_size, rank, world, recipe.seed)
        self._images = Augmented(images, transform, recipe.seed)
        self._loader = DataLoader(
            self._images,
            batch_sampler=self._order,
            num_workers=recipe.workers,
            worker_init_fn=heed_no_signals,
            persistent_workers=recipe.workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # the loader draws from it, and not from the one that the network draws from
        )

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._order)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Give an epoch's batches of (images, targets), from batch `start` on."""
        self._order.epoch, self._order.start = number, start
        return iter(self._loader)

    def replace_unreadable(self, images: Tensor, targets: Tensor) -> list[str]:
        """Replace a batch's unreadable images by readable ones and return their names; a RetrofitError if all are."""
        answers = targets.tolist()
        readable = [place for place, target in enumerate(answers) if target >= 0]
        unread = [place for place, target in enumerate(answers) if target < 0]
        names = [self._images.unreadable(answers[place]) for place in unread]
        if not readable:
            raise RetrofitError(
                f"none of a batch's {len(names)} images can be read ({shortlist(names)}); check the files"
            )
        for number, place in enumerate(unread):
            substitute = readable[number % len(readable)]
            images[place], targets[place] = images[substitute], targets[substitute]
        return names


def _hash(*key: int) -> int:
    """Return a 32-bit number that depends on all of `key`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")
