"""The training batches of a run, in what order and how augmented.

The order of an epoch and the augmentation of an image depend on the seed, the epoch and the image
alone: not on the number of workers or processes, and not on whether the run was interrupted.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from timm.data import auto_augment, create_transform
from timm.data.loader import PrefetchLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_images import ImageSubset
from retrofit.images.workers import heed_the_main_process
from retrofit.record import Preprocess
from retrofit.utils.forward_pass import replaced
from retrofit.utils.text import one_line, shortlist

# Epoch, and number of the image.
Key = tuple[int, int]


class Augmented(ImageSubset):
    """Images whose augmentation is drawn from (seed, epoch, image): ask for (epoch, number).

    Reading one leaves Python's, numpy's and torch's generators as its augmentation left them.
    """

    def __init__(self, images: Any, transform: Callable[[Any], Any], seed: int) -> None:
        super().__init__(images, transform=transform)
        self._seed = seed

    def __getitem__(self, key: Any) -> tuple[Tensor, int]:
        epoch, number = key
        seed_generators(self._seed, epoch, number)
        return super().__getitem__(number)


def _posterize(image: Any, bits: int, **_options: Any) -> Any:
    """Do what timm does, with at least one bit: it also asks for none, which Pillow 13 refuses."""
    return auto_augment.posterize(image, max(bits, 1))


# timm's operations of automatic augmentation, by name.
_OPERATIONS = {
    **auto_augment.NAME_TO_OP,
    **dict.fromkeys(("Posterize", "PosterizeOriginal", "PosterizeIncreasing"), _posterize),
}


def training_transform(recipe: Recipe, preprocess: Preprocess) -> Callable[[Any], Tensor]:
    """Build timm's training augmentation, all on the CPU and image by image.

    Images are bytes, a quarter the size of floats, until the device normalizes them. Only random
    erasing, which draws normalized pixels, needs normalized images.

    Raises:
        UsageError: If timm cannot build it.
    """
    operations = replaced(auto_augment, "NAME_TO_OP", _OPERATIONS)
    try:
        with operations:
            return create_transform(
                preprocess.input_size,
                is_training=True,
                **recipe.model_dump(include={"no_aug", "scale", "ratio", "hflip", "color_jitter"}),
                auto_augment=recipe.aa,
                interpolation=recipe.train_interpolation,
                mean=preprocess.mean,
                std=preprocess.std,
                normalize=recipe.reprob > 0,
                re_prob=recipe.reprob,
                re_mode="pixel",
            )
    # timm asserts, and raises KeyError and ValueError.
    except Exception as error:
        raise UsageError(
            f"timm cannot build the augmentation ({one_line(error)}); "
            "check `aa`, `train_interpolation` and `scale`"
        ) from error


class Order(DistributedSampler[Any]):
    """The images of an epoch for one process, from number `start` on: `set_epoch` before each pass.

    The processes' batches together are those that a single process with the whole batch size gives.
    """

    start = 0

    def __iter__(self) -> Iterator[Key]:
        for number in islice(super().__iter__(), self.start, None):
            yield self.epoch, number


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
        device: torch.device,
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
        # What is left over at an epoch's end is left out.
        self._order = Order(augmented, world, rank, seed=_hash(recipe.seed), drop_last=True)
        self._batches = BatchSampler(self._order, batch_size, drop_last=True)
        self._host = _HostBatches(
            augmented,
            # The order does not hold the loader: workers end when nothing holds it.
            batch_sampler=self._batches,
            num_workers=recipe.workers,
            worker_init_fn=heed_the_main_process,
            persistent_workers=recipe.workers > 0,
            pin_memory=device.type == "cuda",
        )
        # It copies a batch to the device, and normalizes it there, while the one before is used.
        self._loader = PrefetchLoader(
            self._host,
            **_normalization(recipe, preprocess),
            channels=preprocess.input_size[0],
            device=device,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Give an epoch's batches from batch `start` on: images, (N, C, H, W), and targets, (N,),
        on the device.
        """
        self._order.set_epoch(number)
        self._order.start = start * self._batches.batch_size
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
    if recipe.reprob == 0:
        return {"mean": preprocess.mean, "std": preprocess.std}
    channels = preprocess.input_size[0]
    # The loader multiplies both by 255: it subtracts 0 and divides by 1.
    return {"mean": (0.0,) * channels, "std": (1 / 255,) * channels}


class _HostBatches(DataLoader[Any]):
    """Batches in the host's memory, in which readable images replace unreadable ones."""

    def __init__(self, images: Augmented, **options: Any) -> None:
        super().__init__(images, **options)
        self.unreadable: list[str] = []

    def __iter__(self) -> Any:
        for images, targets in super().__iter__():
            self.unreadable += replace_unreadable(images, targets, self.dataset)
            yield images, targets


def replace_unreadable(images: Tensor, targets: Tensor, dataset: Any) -> list[str]:
    """Replace a batch's unreadable images by readable ones, and return their names.

    Raises:
        RetrofitError: If none can be read.
    """
    numbers = targets.tolist()
    readable = [position for position, target in enumerate(numbers) if target >= 0]
    names = [dataset.unreadable(target) for target in numbers if target < 0]
    if not readable:
        raise RetrofitError(
            f"none of a batch's {len(names)} images can be read ({shortlist(names)}); "
            "check the files"
        )
    is_unreadable = targets < 0
    images[is_unreadable] = images[readable[0]].clone()
    targets[is_unreadable] = targets[readable[0]].clone()
    return names


def seed_generators(*key: int) -> None:
    """Seed Python's, numpy's and torch's generators by all of `key`."""
    seed = _hash(*key)
    random.seed(seed)
    np.random.seed(seed)
    # `torch.manual_seed` takes 2 ms where CUDA has not been used.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def _hash(*key: int) -> int:
    """Return a 32-bit number that depends on all of `key`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")
