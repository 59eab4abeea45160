r"""Take normality normalization apart, as figures 7 to 9 and table 3 of Eftekhari & Papyan do, on a
small network.

On scikit-learn's digits, and on pictures, e.g. CIFAR-10:

    python benchmarks/ablations.py --jobs 2 --threads 1
    python benchmarks/ablations.py --jobs 2 --threads 1 --train train.tar --test test.tar

Every network is trained from scratch, its converted layers at full strength from the first step,
without augmentation. A seed decides the first weights, the order of the images and the noise; all
networks start from it alike. Each finished run is a line of the JSONL file beside the table:
started again, the script goes on with what is missing.

train and test are tars with one folder a class; their pictures are averaged down to --side pixels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import Line, Recorded, command_line, grouped, markdown, publish, with_deviation
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.functional import to_tensor

import retrofit
from retrofit.images.dataset import open_images

NOISY = {"noise": "paper"}
QUIET = {"noise": 0.0}

RUNS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "BN": (None, {}),
    "BNN": ("bnn", NOISY),
    "BNN, no noise": ("bnn", QUIET),
    "BNN, unscaled noise": ("bnn", {"noise_kind": "unscaled", **NOISY}),
    "BNN, Gaussian dropout": ("bnn", {"noise_kind": "gaussian-dropout", **NOISY}),
    "noise alone": ("bnn", {"alpha": 0.0, **NOISY}),
    **{
        f"alpha {alpha:g}, no noise": ("bnn", {"alpha": alpha, **QUIET})
        for alpha in (0.25, 0.5, 0.75)
    },
    **{f"noise {noise:g}": ("bnn", {"noise": noise}) for noise in (0.1, 0.2, 0.6, 0.8)},
    "DBN": ("dbn", {}),
    "DBN, noise alone": ("dbnn", {"alpha": 0.0, **NOISY}),
    "DBNN, no noise": ("dbnn", QUIET),
    "DBNN": ("dbnn", NOISY),
}
"""What is trained: the target (None: the network as it is) and the options of the conversion."""

COMPARISONS = {
    "NN figure 7, kinds of noise": (
        ["BNN", "BNN, unscaled noise", "BNN, Gaussian dropout"],
        "has scaled noise (BNN) above unscaled noise and above Gaussian dropout",
    ),
    "NN figure 8, degree of gaussianization": (
        [
            "BN",
            "alpha 0.25, no noise",
            "alpha 0.5, no noise",
            "alpha 0.75, no noise",
            "BNN, no noise",
        ],
        "finds accuracy rising with alpha; BN is alpha 0, BNN without noise alpha 1",
    ),
    "NN figure 9, transform and noise": (
        ["BN", "noise alone", "BNN, no noise", "BNN"],
        "has BN below BNN without noise below BNN; noise alone is not in the figure",
    ),
    "the noise factor": (
        ["BNN, no noise", "noise 0.1", "noise 0.2", "BNN", "noise 0.6", "noise 0.8"],
        "takes 0.4 (BNN) and shows no curve",
    ),
    "NN table 3, decorrelated normalization": (
        ["DBN", "DBN, noise alone", "DBNN, no noise", "DBNN"],
        "has DBNN above DBN (CIFAR-10, ResNet-18: 91.50 and 90.66); noise alone is not in the table",
    ),
    "whitening and transform, with the same noise": (
        ["noise alone", "BNN", "DBN, noise alone", "DBNN"],
        "does not compare these",
    ),
    "the transform behind whitening, with the same noise": (
        ["DBN, noise alone", "DBNN"],
        "does not compare these",
    ),
}


class Block(nn.Module):
    """Two convolutions, each with its norm, and the way past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.past: nn.Module = nn.Identity()
        if stride > 1:
            self.past = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.past(x))


def network(channels: int, width: int, blocks: int, classes: int) -> nn.Module:
    """Return a small ResNet of three stages."""
    # The stages are built before the stem: the recorded runs drew their first weights so.
    stages: list[nn.Module] = []
    for stage in range(3):
        for block in range(blocks):
            first = block == 0 and stage > 0
            stages.append(Block(width << (stage - first), width << stage, 1 + first))
    stem = nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 4, classes)
    return nn.Sequential(*stem, *stages, *head)


@cache
def data(
    train: str | None, test: str | None, each: int, side: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images, standardized by channel, and labels, to train on and to test on."""
    images, labels = read(train, "train", side)
    unseen, answers = read(test, "validation", side)
    # The first `each` of each class, one class after the other.
    chosen = torch.cat([(labels == label).nonzero()[:each, 0] for label in first_seen(labels)])
    order = torch.cat([(answers == label).nonzero()[:, 0] for label in first_seen(answers)])
    images = images[chosen]
    mean = images.mean((0, 2, 3), keepdim=True)
    std = images.std((0, 2, 3), keepdim=True)
    return (
        (images - mean) / std,
        labels[chosen],
        (unseen[order] - mean) / std,
        answers[order],
    )


def read(archive: str | None, split: str, side: int) -> tuple[Tensor, Tensor]:
    """Return the pictures of a tar, or of the digits, averaged down to a side, and their labels."""
    mode = {"channels": 3} if archive else {"channels": 1, "dataset": "digits"}
    images = open_images(archive, split=split, **mode).images
    images.transform = to_tensor
    pictures = [images[place] for place in range(len(images))]
    small = [functional.adaptive_avg_pool2d(picture, side) for picture, _ in pictures]
    return torch.stack(small), torch.tensor([label for _, label in pictures])


def first_seen(labels: Tensor) -> list[int]:
    """Return the classes in the order of their first pictures."""
    return list(dict.fromkeys(labels.tolist()))


def run(args: argparse.Namespace, name: str, seed: int) -> Line:
    """Train once and return the run's line."""
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    parts = data(args.train, args.test, args.each, args.side)
    images, labels, unseen, answers = (part.to(args.device) for part in parts)
    torch.manual_seed(seed)
    model = network(images.shape[1], args.width, args.blocks, int(labels.max()) + 1)
    model = model.to(args.device)
    to, options = RUNS[name]
    if to is not None:
        model, _ = retrofit.convert(model, to, **options)
        retrofit.set_strength(model, 1.0)
    torch.manual_seed(seed)
    loss = train(args, model, images, labels)
    model.eval()
    with torch.no_grad():
        chosen = torch.cat([model(batch).argmax(1) for batch in unseen.split(500)])
    return {
        "run": name,
        "seed": seed,
        **conditions(args),
        "loss": round(loss, 4),
        "top1": 100 * int((chosen == answers).sum()) / len(answers),
        "seconds": round(time.monotonic() - began, 1),
    }


def train(args: argparse.Namespace, model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Train a network in place and return the loss of the last batch."""
    steps = len(images) // args.batch_size
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=steps * args.epochs, pct_start=0.2
    )
    loss = torch.zeros(())
    for _ in range(args.epochs):
        model.train()
        order = torch.randperm(len(images))[: steps * args.batch_size]
        for batch in order.view(steps, -1).to(images.device):
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return loss.item()


def conditions(args: argparse.Namespace) -> Line:
    """Return what must be alike for runs to be compared."""
    same = ("width", "blocks", "side", "each", "epochs", "batch_size", "lr")
    data = Path(args.train).name if args.train else "digits"
    return {"data": data, **{name: getattr(args, name) for name in same}}


def tables(lines: list[Line]) -> list[str]:
    """Return a table for each comparison, with the difference from its first row seed by seed."""
    lines = sorted(lines, key=lambda line: line["seed"])
    runs = {
        name: {line["seed"]: line["top1"] for line in own}
        for (name,), own in grouped(lines, ["run"]).items()
    }
    text = []
    for title, (names, claim) in COMPARISONS.items():
        compared = [name for name in names if name in runs]
        if len(compared) < 2:
            continue
        first = runs.get(names[0], {})
        rows = []
        for name in compared:
            top1 = runs[name]
            gains = [value - first[seed] for seed, value in top1.items() if seed in first]
            each = ", ".join(f"{value:.1f}" for value in top1.values())
            against = "" if name == names[0] else with_deviation(gains, "+")
            rows.append([name, each, with_deviation(list(top1.values())), against])
        head = ["network", "top-1 of each seed", "mean ± s.d.", f"against {names[0]}, seed by seed"]
        text += ["", f"**{title}.** The paper {claim}.", "", *markdown(head, rows)]
    return text


def main() -> None:
    parser = command_line(__doc__, "--train", "--test", "--seeds", out="ablations.md")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS), metavar="RUN")
    parser.add_argument("--each", type=int, default=300, help="images of each class to train on")
    parser.add_argument(
        "--side", type=int, help="of the images in pixels (pictures: 12, digits: 8)"
    )
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1, help="of each stage")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of each job")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    if (args.train is None) != (args.test is None):
        parser.error("--train and --test belong together")
    args.side = args.side or (12 if args.train else 8)
    recorded = Recorded(args.out)
    done = {(line["run"], line["seed"]) for line in recorded.lines(**conditions(args))}
    missing = [(run, seed) for seed in args.seeds for run in args.runs if (run, seed) not in done]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, args, *each) for each in missing]):
            recorded.add(future.result())
    lines = recorded.lines(**conditions(args))
    images, _, unseen, _ = data(args.train, args.test, args.each, args.side)
    head = (
        f"A ResNet of {3 * args.blocks} blocks, {args.width} to {4 * args.width} channels, trained from scratch on "
        f"{len(images):,} images of {conditions(args)['data']} at {args.side} px for {args.epochs} epochs, batches of "
        f"{args.batch_size}, SGD, one cycle up to {args.lr:g}, no augmentation; {len(unseen):,} test images; "
        f"{len({line['seed'] for line in lines})} seeds; {platform.machine()} {args.device}, torch {torch.__version__}"
    )
    publish(args.out, [head, *tables(lines)])


if __name__ == "__main__":
    main()
