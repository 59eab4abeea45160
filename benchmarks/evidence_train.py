"""One run of the evidence: train an arm's network, and measure it on pictures that it has not
seen.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from evidence_arms import ARMS, convert, strength_schedule, trained_network, training_mode
from evidence_data import Epochs, Normalization, Pictures, draw, normalization, still
from harness import ANY_DEVIATION, Line, machine
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

import retrofit

BINS = 15  # of the calibration error
MEASURED_TWICE = [
    *((name, f"{name}-precise") for name in ("bn", "bn-noise-0.1", "bnn-0.1")),
    *((name, f"{name}-baked") for name in ("ln", "ln-pn")),
]
PAIRS = {arm: pair for pair in MEASURED_TWICE for arm in pair}
"""The two arms that share an arm's training."""
BAKED = 250  # pictures, half of them to fit on


def run(
    args: Namespace,
    data: Pictures,
    key: Line,
    prepare: Callable[[nn.Module, Tensor], None] | None = None,
) -> list[Line]:
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
    watch = Watch()
    arm = ARMS[key["arm"]]
    pictures = draw(data.pool, key["images"], key["seed"])
    normalize = normalization(args.model)
    tensors = partial(still, size=args.img_size, normalize=normalize)
    model = trained_network(args.model, args.checkpoint, data.classes, key["seed"])
    if arm.recalibrated:
        prepare = take_statistics
    if prepare is not None:
        prepare(model, tensors(pictures)[0])
    model = convert(model, arm)
    epochs = Epochs(pictures, args.img_size, key["seed"], data.flip, normalize)
    loss = train(model, epochs, args, key)
    times = watch.seconds()
    lines = []
    for name in PAIRS.get(key["arm"], (key["arm"],)):
        if ARMS[name].precise:
            take_statistics(model, tensors(pictures)[0])
        if ARMS[name].baked:
            some = draw(pictures, min(BAKED, len(pictures)), key["seed"])
            retrofit.bake(model, [tensors(some)[0]], tolerance=ANY_DEVIATION)
        own = {**key, "arm": name}
        lines.append({**line_of(model, args, data, own, times), "train_loss": loss})
        if args.keep is not None:
            torch.save(model.state_dict(), args.keep / f"{file_name(own)}.pth")
    return lines


class Watch:
    """Measures the time since it was made."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.worked = time.process_time()

    def seconds(self) -> dict[str, float]:
        """Return seconds of the clock and of the processor."""
        return {
            "seconds": round(time.monotonic() - self.began, 1),
            "cpu_seconds": round(time.process_time() - self.worked, 1),
        }


def line_of(
    model: nn.Module, args: Namespace, data: Pictures, key: Line, times: dict[str, float]
) -> Line:
    """Measure a trained network, and return the line of its run."""
    normalize = normalization(args.model)
    val = measure(model, *still_once(data, "val", args.img_size, normalize))
    test = measure(model, *still_once(data, "test", args.img_size, normalize))
    return {
        **key,
        "val": round(val["top1"], 2),
        "test": round(test["top1"], 2),
        "val_loss": round(val["loss"], 4),
        "test_loss": round(test["loss"], 4),
        "ece": round(test["ece"], 2),
        "test_images": len(data.test),
        **times,
        "machine": machine(),
        "correct": test["correct"],
    }


def train(
    model: nn.Module, epochs: Epochs, args: Namespace, key: Line, ramp: float = 0.5
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
    step = 0
    total = 0.0
    for epoch in range(args.epochs):
        training_mode(model, arm, epoch / args.epochs)
        total = 0.0
        for images, labels in epochs.batches(epoch, key["batch"]):
            loss = descend(model, optimizer, images, labels, args.clip_grad)
            if not math.isfinite(loss):
                return None
            step += 1
            total += loss * len(labels)
            scheduler.step_update(step)
            if strength is None:
                continue
            strength.step()
            if strength.turning:
                every, _ = still(epochs.pictures, args.img_size, epochs.normalize)
                retrofit.recentre(every.split(50), model)
    return round(total / key["images"], 4)


def descend(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    clip_grad: float,
) -> float:
    """Take a step of the training, unless the loss is not finite, and return the loss."""
    loss = cross_entropy(model(images), labels)
    value = loss.item()
    if math.isfinite(value):
        loss.backward()
        if clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
        optimizer.step()
        optimizer.zero_grad()
    return value


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
    bits = "".join("01"[bool(hit)] for hit in right)
    return {
        "top1": 100 * right.float().mean().item(),
        "loss": cross_entropy(logits, labels).item(),
        "ece": 100 * float(sum(gaps)) / len(labels),
        "correct": f"{int(bits, 2):0{-(-len(bits) // 4)}x}",
    }


def file_name(key: Line) -> str:
    """Return a file name for a run."""
    return "_".join(f"{name}={value}" for name, value in key.items() if name != "model")
