"""Take normality normalization apart, as figures 7 to 9 and table 3 of Eftekhari & Papyan do, on a
small network.

    python benchmarks/ablations.py --jobs 2 --threads 1
    scikit-learn's digits python benchmarks/ablations.py --jobs 2 --threads 1 --train train.tar
    --test test.tar    pictures, e.g. CIFAR-10

Every network is trained from scratch, its converted layers at full strength from the first step,
without augmentation. A seed decides the first weights, the order of the images and the noise; all
networks start from it alike. Each finished run is a line of the JSONL file beside the table:
started again, the script goes on with what is missing.

train and test are tars with one folder a class; their pictures are averaged down to --side pixels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import torch
from finetune_cifar import spread
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.functional import to_tensor

import retrofit
from retrofit.images.dataset import open_images

RESULTS = Path(__file__).parent / "results"
NOISY, QUIET = {"noise": "paper"}, {"noise": 0.0}

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

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(made)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(made)
        self.past: nn.Module = nn.Identity()
        if stride > 1:
            self.past = nn.Sequential(
                nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.past(x))


def network(channels: int, width: int, blocks: int, classes: int) -> nn.Module:
    """Return a small ResNet of three stages."""
    stages: list[nn.Module] = []
    for stage in range(3):
        for block in range(blocks):
            first = block == 0 and stage > 0
            stages.append(Block(width << (stage - first), width << stage, 1 + first))
    stem = nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(
        *stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 4, classes)
    )


@cache
def data(
    train: str | None, test: str | None, each: int, side: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images, standardized by channel, and labels, to train on and to test on."""
    parts: list[Tensor] = []
    for archive, split in ((train, "train"), (test, "validation")):
        mode = {"channels": 3} if archive else {"channels": 1, "dataset": "digits"}
        images = open_images(archive, split=split, **mode).images
        images.transform = to_tensor
        taken: dict[int, list[Tensor]] = {}
        for number in range(len(images)):
            picture, label = images[number]
            of = taken.setdefault(label, [])
            if split != "train" or len(of) < each:
                of.append(functional.adaptive_avg_pool2d(picture, side))
        parts += [
            torch.stack([one for of in taken.values() for one in of]),
            torch.tensor([label for label, of in taken.items() for _ in of]),
        ]
    mean, std = parts[0].mean((0, 2, 3), keepdim=True), parts[0].std((0, 2, 3), keepdim=True)
    return (parts[0] - mean) / std, parts[1], (parts[2] - mean) / std, parts[3]


def run(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train once and return the run's line."""
    torch.set_num_threads(args.threads)
    device, began = torch.device(args.device), time.monotonic()
    images, labels, unseen, answers = (
        part.to(device) for part in data(args.train, args.test, args.each, args.side)
    )
    torch.manual_seed(seed)
    net = network(images.shape[1], args.width, args.blocks, int(labels.max()) + 1).to(device)
    to, options = RUNS[name]
    if to is not None:
        net, _ = retrofit.convert(net, to, **options)
        retrofit.set_strength(net, 1.0)
    torch.manual_seed(seed)
    steps = len(images) // args.batch_size
    optimizer = torch.optim.SGD(
        net.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=steps * args.epochs, pct_start=0.2
    )
    loss = torch.zeros(())
    for _ in range(args.epochs):
        net.train()
        for batch in (
            torch.randperm(len(images))[: steps * args.batch_size].view(steps, -1).to(device)
        ):
            loss = functional.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        right = sum(
            int((net(x).argmax(1) == y).sum())
            for x, y in zip(unseen.split(500), answers.split(500), strict=True)
        )
    line = {"run": name, "seed": seed, **conditions(args), "loss": round(loss.item(), 4)}
    return {
        **line,
        "top1": 100 * right / len(answers),
        "seconds": round(time.monotonic() - began, 1),
    }


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Return what must be alike for runs to be compared."""
    same = ("width", "blocks", "side", "each", "epochs", "batch_size", "lr")
    return {
        "data": Path(args.train).name if args.train else "digits",
        **{name: getattr(args, name) for name in same},
    }


def finished(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Read the runs of these conditions that are done."""
    path, wanted = args.out.with_suffix(".jsonl"), conditions(args).items()
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if all(row.get(key) == value for key, value in wanted)]


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table for each comparison, with the difference from its first row seed by seed."""
    found: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault(row["run"], {})[row["seed"]] = row["top1"]
    lines = []
    for title, (names, claim) in COMPARISONS.items():
        if sum(name in found for name in names) < 2:
            continue
        first = found.get(names[0], {})
        lines += ["", f"**{title}.** The paper {claim}.", ""]
        lines += [
            f"| network | top-1 of each seed | mean ± s.d. | against {names[0]}, seed by seed |",
            "|---|---|---|---|",
        ]
        for name in (name for name in names if name in found):
            each = ", ".join(f"{top1:.1f}" for top1 in found[name].values())
            gains = [top1 - first[seed] for seed, top1 in found[name].items() if seed in first]
            against = "" if name == names[0] else spread(gains, "+")
            lines.append(f"| {name} | {each} | {spread(list(found[name].values()))} | {against} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", metavar="TAR")
    parser.add_argument("--test", metavar="TAR")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS), metavar="RUN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
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
    parser.add_argument("--out", type=Path, default=RESULTS / "ablations.md")
    args = parser.parse_args()
    if (args.train is None) != (args.test is None):
        parser.error("--train and --test belong together")
    args.side = args.side or (12 if args.train else 8)
    done = {(row["run"], row["seed"]) for row in finished(args)}
    wanted = [(name, seed) for seed in args.seeds for name in args.runs if (name, seed) not in done]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, args, name, seed) for name, seed in wanted]):
            with args.out.with_suffix(".jsonl").open("a") as file:
                file.write(json.dumps(future.result()) + "\n")
            print(future.result(), flush=True)
    rows = finished(args)
    images, _, unseen, _ = data(args.train, args.test, args.each, args.side)
    head = (
        f"A ResNet of {3 * args.blocks} blocks, {args.width} to {4 * args.width} channels, trained from scratch on "
        f"{len(images):,} images of {conditions(args)['data']} at {args.side} px for {args.epochs} epochs, batches of "
        f"{args.batch_size}, SGD, one cycle up to {args.lr:g}, no augmentation; {len(unseen):,} test images; "
        f"{len({row['seed'] for row in rows})} seeds; {platform.machine()} {args.device}, torch {torch.__version__}"
    )
    text = "\n".join([head, *tables(rows)]) + "\n"
    args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
