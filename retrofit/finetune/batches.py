"""The training batches of a run, in what order and how augmented.

The order of an epoch and the augmentation of an image depend on the seed, the epoch and the image
alone: not on the number of workers or processes, and not on whether the run was interrupted.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from timm.data import create_transform
from timm.data.loader import PrefetchLoader
from torch import Tensor
from torch.utils.data import DataLoader

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_images import ImageSubset
from retrofit.images.dataset import heed_no_signals
from retrofit.record import Preprocess
from retrofit.utils.forward_pass import other_random_states_kept
from retrofit.utils.text import one_line, shortlist

# Epoch, and number of the image.
Key = tuple[int, int]
Sample = tuple[Tensor, int]
CPU = torch.device("cpu")


class Augmented(ImageSubset):
    """Images whose augmentation is drawn from (seed, epoch, image): ask for a list of (epoch,
    number).
    """

    def __init__(self, images: Any, transform: Callable[[Any], Any], seed: int) -> None:
        super().__init__(images, transform=transform)
        self._seed = seed

    def __getitems__(self, keys: list[Key]) -> list[Sample]:
        """Read a batch, and leave Python's, numpy's and torch's CPU generators as they were."""
        # Once a batch, as this is slow.
        with torch.random.fork_rng([]), other_random_states_kept():
            return [self._read(*key) for key in keys]

    def _read(self, epoch: int, number: int) -> Sample:
        seed = _hash(self._seed, epoch, number)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        return self[number]


def training_transform(recipe: Recipe, preprocess: Preprocess) -> Callable[[Any], Tensor]:
    """Build timm's training augmentation, all on the CPU and image by image.

    Images are bytes, a quarter the size of floats, until the device normalizes them. Only random
    erasing, which draws normalized pixels, needs normalized images.

    Raises:
        UsageError: If timm cannot build it.
    """
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
            normalize=_erases(recipe),
            re_prob=recipe.reprob,
            re_mode="pixel",
        )
    # timm asserts, and raises KeyError and ValueError.
    except Exception as error:
        raise UsageError(
            f"timm cannot build the augmentation ({one_line(error)}); "
            "check `aa`, `train_interpolation` and `scale`"
        ) from error


def _erases(recipe: Recipe) -> bool:
    return recipe.reprob > 0 and not recipe.no_aug


class Order:
    """The batches of `epoch` for one process, from batch `start` on: set both before each pass.

    The processes' batches together are those that a single process with the whole batch size gives.
    """

    def __init__(self, count: int, batch_size: int, rank: int, world: int, seed: int) -> None:
        self.count = count
        self.batch_size = batch_size
        self.rank = rank
        self.world = world
        self.seed = seed
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        # What is left over at an epoch's end is left out.
        return self.count // (self.batch_size * self.world)

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(_hash(self.seed, self.epoch))
        order = torch.randperm(self.count, generator=generator, device="cpu").tolist()
        for batch in range(self.start, len(self)):
            first = (batch * self.world + self.rank) * self.batch_size
            yield [(self.epoch, number) for number in order[first : first + self.batch_size]]


class Batches:
    """The training batches of one process, epoch by epoch.

    Args:
        images: The images to train on.
        recipe: The settings of the run.
        preprocess: How the network takes its images.
        rank: The number of this process.
        world: The number of processes.
        device: Where the network is.

    Raises:
        UsageError: If timm cannot build the augmentation.
        RetrofitError: If the images are too few for one batch.
    """

    def __init__(
        self,
        images: Any,
        recipe: Recipe,
        preprocess: Preprocess,
        rank: int,
        world: int,
        device: torch.device = CPU,
    ) -> None:
        count = len(images)
        batch_size = min(recipe.batch_size, count // world)
        if recipe.mixup or recipe.cutmix:
            batch_size -= batch_size % 2
        if batch_size < 1:
            raise RetrofitError(
                f"{count} images to train on are too few for {world} processes; give more"
            )
        augmented = Augmented(images, training_transform(recipe, preprocess), recipe.seed)
        self._order = Order(count, batch_size, rank, world, recipe.seed)
        self._host = _HostBatches(augmented, self._order, recipe, device)
        # It copies a batch to the device, and normalizes it there, while the one before is used.
        self._loader = PrefetchLoader(
            self._host,
            **_normalization(recipe, preprocess),
            channels=preprocess.input_size[0],
            device=device,
        )

    def __len__(self) -> int:
        return len(self._order)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Give an epoch's batches from batch `start` on: images, (N, C, H, W), and targets, (N,),
        on the device.
        """
        self._order.epoch = number
        self._order.start = start
        return iter(self._loader)

    def take_unreadable(self) -> list[str]:
        """Return the names of images that could not be read since this was last asked; others took
        their place.
        """
        names = self._host.unreadable
        self._host.unreadable = []
        return names


def _normalization(recipe: Recipe, preprocess: Preprocess) -> dict[str, tuple[float, ...]]:
    """Return the mean and deviation, of pixels from 0 to 1, by which the loader normalizes."""
    if not _erases(recipe):
        return {"mean": preprocess.mean, "std": preprocess.std}
    channels = preprocess.input_size[0]
    # The loader multiplies both by 255: it subtracts 0 and divides by 1.
    return {"mean": (0.0,) * channels, "std": (1 / 255,) * channels}


class _HostBatches:
    """Batches in the host's memory, in which readable images replace unreadable ones."""

    def __init__(
        self, images: Augmented, order: Order, recipe: Recipe, device: torch.device
    ) -> None:
        self._images = images
        self.unreadable: list[str] = []
        self._loader = DataLoader(
            images,
            # The order does not hold the loader: workers end when nothing holds it.
            batch_sampler=order,
            num_workers=recipe.workers,
            worker_init_fn=heed_no_signals,
            persistent_workers=recipe.workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=_channels_last_batch if recipe.channels_last else _batch,
            # A generator of its own, so that the loader takes nothing from the network's.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, targets in self._loader:
            self.unreadable += replace_unreadable(images, targets, self._images)
            yield images, targets


def _batch(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return images as (N, C, H, W) and targets as (N,)."""
    images, targets = _channels_last_batch(samples)
    return images.contiguous(), targets


def _channels_last_batch(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return images as (N, C, H, W) in the channels-last memory format, and targets as (N,).

    An image in bytes is a view, (C, H, W), of pixels in that format already.
    """
    pixels = torch.stack([image.movedim(0, -1) for image, _ in samples])
    targets = torch.tensor([target for _, target in samples], device="cpu")
    return pixels.movedim(-1, 1), targets


def replace_unreadable(images: Tensor, targets: Tensor, dataset: ImageSubset) -> list[str]:
    """Replace a batch's unreadable images by readable ones, and return their names.

    Raises:
        RetrofitError: If none can be read.
    """
    readable = []
    unreadable = []
    names = []
    for position, target in enumerate(targets.tolist()):
        if target >= 0:
            readable.append(position)
        else:
            unreadable.append(position)
            names.append(dataset.unreadable(target))
    if not readable:
        raise RetrofitError(
            f"none of a batch's {len(names)} images can be read ({shortlist(names)}); "
            "check the files"
        )
    for position, substitute in zip(unreadable, cycle(readable), strict=False):
        images[position] = images[substitute]
        targets[position] = targets[substitute]
    return names


def _hash(*key: int) -> int:
    """Return a 32-bit number that depends on all of `key`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")
