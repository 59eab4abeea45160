"""Order and augmentation of the training images, and what reaches the device."""

import multiprocessing
import subprocess
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch.utils.data import BatchSampler

from retrofit.finetune.batches import Batches, Order, seed_generators, training_transform
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_images import open_data
from retrofit.record import Preprocess
from tests.finetune.conftest import assert_same

CPU = torch.device("cpu")
PREPROCESS = Preprocess((3, 16, 16), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def batches(pictures: Path, rank: int = 0, world: int = 1, **settings: Any) -> Batches:
    defaults = {"batch_size": 4, "workers": 0, "aa": "rand-m9", "reprob": 0.5, "val_split": 0.0}
    recipe = Recipe(**{"data_dir": str(pictures), **defaults, **settings})
    return Batches(open_data(recipe, None, 3).train.images, recipe, PREPROCESS, rank, world, CPU)


def drawn(
    size: int, rank: int = 0, world: int = 1, seed: int = 1, epoch: int = 0
) -> list[list[tuple[int, int]]]:
    """The batches of an epoch of 22 images."""
    order = Order(range(22), world, rank, seed=seed, drop_last=True)
    order.set_epoch(epoch)
    return list(BatchSampler(order, size, drop_last=True))


def test_an_epoch_holds_every_image_once_and_the_processes_share_it() -> None:
    whole, shares = drawn(6), [drawn(3, rank, 2) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(a) for a in whole]
    epochs = [
        [number for batch in of for _, number in batch]
        for of in (whole, drawn(6, epoch=1), drawn(6, seed=7))
    ]
    assert len(epochs[0]) == len(set(epochs[0])) == 18  # what makes no whole batch is left out
    assert len(set(map(tuple, epochs))) == 3


def test_workers_end_with_the_batches_also_within_an_epoch(pictures: Path) -> None:
    begun = batches(pictures)
    epoch, loader = begun.epoch(0), weakref.ref(begun._loader)
    next(epoch)
    del begun, epoch
    assert (
        loader() is None
    )  # without waiting for the garbage collector, which does not run when a process exits


def test_the_pictures_do_not_depend_on_workers_start_or_what_was_drawn_before(
    pictures: Path,
) -> None:
    alone, helped = batches(pictures), batches(pictures, workers=2)
    one = list(alone.epoch(3))
    torch.rand(5)
    other = list(helped.epoch(3, start=2))
    assert len(one) == len(alone) == 6
    assert_same(one[2:], other)


def test_a_signal_to_the_whole_group_leaves_the_decoders_at_work(pictures: Path) -> None:
    epoch = batches(pictures, workers=1).epoch(0)
    next(epoch)
    for worker in multiprocessing.active_children():
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        subprocess.run(["kill", "-INT", str(worker.pid)], check=True)
    assert len(list(epoch)) == 5


def test_the_main_process_ends_its_decoders(pictures: Path) -> None:
    epoch = batches(pictures, workers=1).epoch(0)
    next(epoch)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == 0


def test_two_processes_augment_as_one_does(pictures: Path) -> None:
    whole = next(batches(pictures).epoch(0))[0]
    halves = [next(batches(pictures, rank, 2, batch_size=2).epoch(0))[0] for rank in (0, 1)]
    assert torch.equal(whole, torch.stack(halves, dim=1).flatten(0, 1))


@pytest.mark.parametrize("channels", [3, 1])
def test_images_are_normalized_as_timm_does(pictures: Path, channels: int) -> None:
    """Without augmentation, a batch holds what timm's transform gives image by image."""
    recipe = Recipe(data_dir=str(pictures), batch_size=4, workers=0, no_aug=True, val_split=0.0)
    preprocess = Preprocess(
        (channels, 16, 16), PREPROCESS.mean[:channels], PREPROCESS.std[:channels]
    )
    images = open_data(recipe, None, channels).train.images
    made = Batches(images, recipe, preprocess, rank=0, world=1, device=CPU)
    (pixels, targets) = next(made.epoch(0))
    assert pixels.dtype == torch.float32
    numbers = [number for _, number in next(iter(made._batches))]
    images.transform = create_transform(
        preprocess.input_size,
        is_training=True,
        no_aug=True,
        mean=preprocess.mean,
        std=preprocess.std,
    )
    expected = torch.stack([images[number][0] for number in numbers])
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-6)
    assert targets.tolist() == [images[number][1] for number in numbers]


def test_random_erasing_draws_normalized_pixels(pictures: Path) -> None:
    plain = torch.cat([images for images, _ in batches(pictures, reprob=0.0).epoch(0)])
    erased = torch.cat([images for images, _ in batches(pictures, reprob=1.0).epoch(0)])
    changed = (plain - erased).abs().amax(1) > 1e-5
    assert (changed.flatten(1).any(1)).all()
    torch.testing.assert_close(
        *(x.movedim(1, -1)[~changed] for x in (plain, erased)), rtol=0, atol=1e-5
    )
    drawn = erased.movedim(1, -1)[changed]
    assert abs(drawn.mean()) < 0.1
    assert abs(drawn.std() - 1) < 0.1


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "v0"])
def test_a_policy_that_leaves_a_pixel_no_bit_leaves_it_one(policy: str) -> None:
    transform = training_transform(Recipe(aa=policy), PREPROCESS)
    image = Image.new("RGB", (16, 16), (200, 100, 0))
    for number in range(200):
        seed_generators(number)
        assert transform(image).shape == (3, 16, 16)


def test_unreadable_images_are_replaced_and_named_once(pictures: Path) -> None:
    (pictures / "ant" / "0.png").write_bytes(b"no picture")
    made = batches(pictures, aa=None, reprob=0.0)
    seen = [(images, targets) for images, targets in made.epoch(0)]
    assert made.take_unreadable() == ["ant/0.png"]
    assert made.take_unreadable() == []
    assert all((targets >= 0).all() for _, targets in seen)
