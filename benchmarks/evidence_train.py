"""One run of the evidence: train an arm's network, and measure it on pictures that it has not seen."""

from __future__ import annotations

import math
import platform
import time
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from evidence_arms import ARMS, convert, strength_schedule, trained_network, training_mode
from evidence_data import Epochs, Normalization, Pictures, draw, normalization, still
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

import retrofit

BINS = 15  # of the calibration error
PAIRS = [  # two measurements of one training
    *((name, f"{name}-precise") for name in ("bn", "bn-noise-0.1", "bnn-0.1")),
    *((name, f"{name}-baked") for name in ("ln", "ln-pn")),
]
BAKED = 250  # pictures, half of them to fit on


def run(
    args: Namespace,
    data: Pictures,
    key: dict[str, Any],
    prepare: Callable[[nn.Module, Tensor], None] | None = None,
) -> list[dict[str, Any]]:
    """Train once and return a line for each arm that the run measures.

    Args:
        args: Model, checkpoint, image size, epochs, warm-up and clipping.
        data: The pictures.
        key: What tells the run from the others: arm, batch, images, lr, seed, ...
        prepare: Changes the source network in place, before its conversion; it is given the
            training pictures.

    Returns:
        A line, and for the arms of PAIRS a second one of the same weights, after PreciseBN or
        baking.
    """
    began, worked = time.monotonic(), time.process_time()
    arm = ARMS[key["arm"]]
    pictures = draw(data.pool, key["images"], key["seed"])
    normalize = normalization(args.model)
    tensors = partial(still, size=args.img_size, normalize=normalize)
    classes = 1 + max(label for _, label in data.test)
    model = trained_network(args.model, args.checkpoint, classes, key["seed"])
    if arm.recalibrated:
        prepare = take_statistics
    if prepare is not None:
        prepare(model, tensors(pictures)[0])
    model = convert(model, arm)
    epochs = Epochs(pictures, args.img_size, key["seed"], data.flip, normalize)
    loss = train(model, epochs, args, key)
    seconds, worked = time.monotonic() - began, time.process_time() - worked
    lines = []
    pairs = {arm: pair for pair in PAIRS for arm in pair}
    for name in pairs.get(key["arm"], (key["arm"],)):
        if ARMS[name].precise:
            take_statistics(model, tensors(pictures)[0])
        if ARMS[name].baked:
            some = draw(pictures, min(BAKED, len(pictures)), key["seed"])
            retrofit.bake(model, [tensors(some)[0]], tolerance=math.inf)
        lines.append(
            {
                **line_of(model, args, data, {**key, "arm": name}, seconds, worked),
                "train_loss": loss,
            }
        )
        if args.keep is not None:
            torch.save(model.state_dict(), args.keep / f"{file_name({**key, 'arm': name})}.pth")
    return lines


def line_of(
    model: nn.Module,
    args: Namespace,
    data: Pictures,
    key: dict[str, Any],
    seconds: float,
    worked: float,
) -> dict[str, Any]:
    """Measure a trained network, and return the line of its run; times are in seconds, `worked` the
    processor's.
    """
    val, test = (
        measure(model, *still_once(data, part, args.img_size, normalization(args.model)))
        for part in ("val", "test")
    )
    return {
        **key,
        "val": round(val["top1"], 2),
        "test": round(test["top1"], 2),
        "val_loss": round(val["loss"], 4),
        "test_loss": round(test["loss"], 4),
        "ece": round(test["ece"], 2),
        "test_images": len(data.test),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(worked, 1),
        "machine": machine(),
        "correct": test["correct"],
    }


def train(
    model: nn.Module, epochs: Epochs, args: Namespace, key: dict[str, Any], ramp: float = 0.5
) -> float | None:
    """Train a network in place and return the mean loss of the last epoch; None once the loss is
    not finite.
    """
    arm = ARMS[key["arm"]]
    steps = math.ceil(key["images"] / key["batch"])
    optimizer = create_optimizer_v2(model, args.opt, key["lr"], weight_decay=0.05, fused=True)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=args.epochs,
        warmup_epochs=args.warmup_epochs,
        warmup_lr=1e-6,
        min_lr=0.0,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    strength = strength_schedule(model, arm, args.epochs * steps, ramp)
    torch.manual_seed(key["seed"])
    done, total = 0, 0.0
    for epoch in range(args.epochs):
        training_mode(model, arm)
        total = 0.0
        for images, labels in epochs.batches(epoch, key["batch"]):
            loss = cross_entropy(model(images), labels)
            if not math.isfinite(value := loss.item()):
                return None
            loss.backward()
            if args.clip_grad:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
            done, total = done + 1, total + value * len(labels)
            scheduler.step_update(done)
            if strength is not None:
                strength.step()
                if strength.turning:
                    every, _ = still(epochs.pictures, args.img_size, normalization(args.model))
                    retrofit.recentre(every.split(50), model)
    return round(total / key["images"], 4)


def take_statistics(model: nn.Module, images: Tensor) -> None:
    """Set all running statistics to the mean over batches of 50 pictures in random order, as
    PreciseBN does.
    """
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    update_bn(images[order].split(50), model)


@cache
def still_once(
    data: Pictures, part: str, size: int, normalize: Normalization
) -> tuple[Tensor, Tensor]:
    """Return a part's pictures as tensors, made once a process."""
    return still(getattr(data, part), size, normalize)


@torch.inference_mode()
def measure(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return top-1 and calibration error in percent, the mean loss, and which pictures were right,
    as hex digits.
    """
    model.eval()
    logits = torch.cat([model(batch) for batch in images.split(100)]).nan_to_num()
    sure, chosen = logits.softmax(1).max(1)
    right = chosen == labels
    bins = (sure * BINS).long().clamp_max(BINS - 1)
    gaps = [(sure[bins == place].sum() - right[bins == place].sum()).abs() for place in range(BINS)]
    bits = "".join("01"[bool(one)] for one in right)
    return {
        "top1": 100 * right.float().mean().item(),
        "loss": cross_entropy(logits, labels).item(),
        "ece": 100 * float(sum(gaps)) / len(labels),
        "correct": f"{int(bits, 2):0{-(-len(bits) // 4)}x}",
    }


def file_name(key: dict[str, Any]) -> str:
    """Return a file name for a run."""
    return "_".join(f"{name}={value}" for name, value in key.items() if name != "model")


def machine() -> str:
    """Name the processor."""
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{name}, {max(1, len(names))} cores, {torch.get_num_threads()} used, torch {torch.__version__}"
