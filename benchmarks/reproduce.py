r"""Tables 1 and 2 and figures 2 to 4 of Eftekhari & Papyan: small on two cores, or whole on a GPU.

The miniature takes hours of a core:

    python benchmarks/reproduce.py --train train.tar --test test.tar
    python benchmarks/reproduce.py --train train.tar --test test.tar \
        --parts figure-4 figure-2 figure-3
    python benchmarks/reproduce.py --train train.tar --test test.tar \
        --parts until-it-fits-resnet until-it-fits-vit --seeds 0 1 2 3
    python benchmarks/reproduce.py --train train.tar --test test.tar --full --device cuda
    python benchmarks/reproduce.py --table

train and test are tars with one folder a class, CIFAR-10 of 32 px. The settings are those of the
authors' code (github.com/DanielEftekhari/normality-normalization): He's first weights, SGD with
0.1, divided by 10 after 60, 120 and 180 of 200 epochs, momentum 0.9, weight decay 5e-4 on all
parameters, batches of 128, no augmentation; for the ViT patch 4, AdamW with 1e-3, weight decay 0.05
on all parameters, batches of 32. --full has their length and networks: ResNet-18 with a 3x3 stem
and no pooling; a ViT of 8 layers, 768/2304, with their augmentation, MixUp and warm restarts.

The miniature has ResNet-20 (16 to 64 channels) and a ViT of 4 layers of 128/384, for 10 epochs,
with the steps after 3, 6 and 9, and one cosine for the ViT. Every arm is trained as the authors do,
and with RandomCrop (padding 4) and mirroring. The figures vary the batch size, the width and the
depth of a ResNet-8 that is trained for 5 epochs on 5,000 pictures. Other batch sizes have their
learning rate in proportion, of which the paper says nothing.

The parts "until it fits" ask whether the power transform helps where the paper measures it: after
training to a loss near zero. A ResNet-20 (8 to 32 channels) and the ViT are trained on 5,000
pictures, without augmentation, for as many epochs as the plain network needs to get 99.5 % of its
training pictures right with a loss below 0.02 (both in evaluation mode, after the last epoch; seed
0 tries the lengths, the shortest first). All arms then have that length. Written before the first
of these runs:

- A gain of the transform is: bnn with noise 0.4 (lnn with noise 1) is above BatchNorm (LayerNorm)
  with the same noise, in the test top-1 of the last epoch, by more than two standard errors of the
  paired difference over seeds, and by more than two over test pictures, with at least four seeds.
- Nothing else counts as one: no other epoch, arm or measure. No run is stopped early or left out,
  and the number of seeds does not depend on what comes out.
- Dropout stands at the rate whose validation top-1 is best with seed 0. The validation pictures are
  those of the training tar that no training picture of the run is.

A seed decides the first weights, which pictures the figures take, their order, their augmentation
and the noise; all arms share them. Each finished run is a line of reproduce.jsonl, and a run that
was stopped goes on from its last epoch (--state).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from evidence_data import draw, read_tar
from harness import (
    RESULTS,
    Line,
    Recorded,
    command_line,
    grouped,
    machines,
    markdown,
    mean,
    paired,
    publish,
    spread,
)
from reproduce_train import ARMS, DROPOUT, FULL_EPOCHS, Data, run, state_file

BATCH = ("bn", "bn-noise", "bnn-quiet", "bnn")
LAYER = ("ln", "ln-noise", "lnn")
PAIR = ("bn-noise", "bnn")
PLAIN = ("bn", "bn-noise", "ln", "ln-noise")
"""What the table compares with."""

RESNET = {"network": "resnet", "width": 16, "depth": 20, "batch": 128, "lr": 0.1, "epochs": 10}
SMALL = {**RESNET, "depth": 8, "epochs": 5, "augment": False, "images": 5000}
VIT = {"network": "vit", "width": 128, "depth": 4, "batch": 32, "lr": 1e-3, "epochs": 10}
FULL_RESNET = {**RESNET, "network": "resnet18", "width": 64, "depth": 18, "epochs": FULL_EPOCHS}
FULL_VIT = {**VIT, "width": 768, "depth": 8, "epochs": FULL_EPOCHS}
FIT_RESNET = {**RESNET, "width": 8, "augment": False, "images": 5000}
FIT_VIT = {**VIT, "augment": False, "images": 5000}
FIT_LENGTHS = (40, 60, 90, 120, 180)
FIT_ARMS = {
    "resnet": ("bn", "bn-noise", "bnn", "bnn-quiet"),
    "vit": ("ln", "ln-noise", "lnn", "lnn-quiet"),
}

PARTS: dict[str, list[tuple[Line, Sequence[str]]]] = {
    "tables": [
        ({**base, "augment": augment}, arms)
        for augment in (False, True)
        for base, arms in ((RESNET, BATCH), (VIT, LAYER))
    ],
    "figure-4": [
        ({**SMALL, "batch": batch, "lr": 0.1 * batch / 128}, PAIR) for batch in (128, 32, 8, 2)
    ],
    "figure-2": [({**SMALL, "width": width}, PAIR) for width in (4, 8, 16, 32)],
    "figure-3": [({**SMALL, "depth": depth}, PAIR) for depth in (8, 14, 20)],
    "full": [
        ({**FULL_RESNET, "augment": False}, BATCH),
        ({**FULL_VIT, "augment": True}, LAYER),
    ],
}
"""The settings and the arms of each part."""

FIT_PARTS = {"until-it-fits-resnet": FIT_RESNET, "until-it-fits-vit": FIT_VIT}
SETUP = ("network", "width", "depth", "batch", "lr", "epochs", "augment", "images")


class Runs:
    """The runs that are done, and those still to do.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.recorded = Recorded(args.out)
        self.pool = read_tar(args.train)
        self.test = read_tar(args.test)
        args.state.mkdir(parents=True, exist_ok=True)

    def done(self, key: Line) -> Line:
        """Return the line of a run, which is made if there is none yet."""
        line = self.recorded.done({"images": len(self.pool), **key}, lambda: [self.make(key)])
        state_file(self.args.state, key).unlink(missing_ok=True)
        return line

    def make(self, key: Line) -> Line:
        """Train a run to its end."""
        print(key, flush=True)
        train = draw(self.pool, key["images"], key["seed"]) if "images" in key else self.pool
        drawn = {id(picture) for picture, _ in train}
        val = [labelled for labelled in self.pool if id(labelled[0]) not in drawn]
        data = Data(train, self.test, self.args.device, val)
        return run(key, data, self.args.state, self.args.until)

    def part(self, name: str) -> None:
        """Make the runs of a part that are missing."""
        keys = self.until_it_fits(FIT_PARTS[name]) if name in FIT_PARTS else self.keys(PARTS[name])
        for key in keys:
            self.done(key)

    def keys(self, settings: list[tuple[Line, Sequence[str]]]) -> Iterator[Line]:
        """Give what tells each run from the others, in the order of running: a seed of every arm,
        then the next seed.
        """
        for seed in self.args.seeds:
            for changes, arms in settings:
                yield from ({**changes, "arm": arm, "seed": seed} for arm in arms)

    def until_it_fits(self, base: Line) -> Iterator[Line]:
        """Give the runs of a part "until it fits" likewise."""
        arms = FIT_ARMS[base["network"]]
        setting = {**base, "epochs": self.length(base, arms[0])}
        for seed in self.args.seeds:
            yield from ({**setting, "arm": arm, "seed": seed} for arm in arms)
            if base["network"] == "resnet":
                first = [self.done({**setting, "arm": arm, "seed": 0}) for arm in DROPOUT]
                best = max(first, key=lambda line: line["val"])
                yield {**setting, "arm": best["arm"], "seed": seed}

    def length(self, base: Line, arm: str) -> int:
        """Return how many epochs a network needs to fit its training pictures.

        Raises:
            SystemExit: None of the lengths is enough.
        """
        for epochs in FIT_LENGTHS:
            line = self.done({**base, "epochs": epochs, "arm": arm, "seed": 0})
            if line["fit"] >= 99.5 and line["fit_loss"] < 0.02:
                return epochs
        raise SystemExit(f"{arm} does not fit its pictures in {FIT_LENGTHS[-1]} epochs")


def tables(lines: Sequence[Line]) -> list[str]:
    """Return a table for each setting: the mean of each arm, and its paired differences."""
    text = [
        "Top-1 in percent after the last epoch, mean ± standard error over seeds (n of them). Differences are paired,",
        "seed by seed: their first error is that over seeds (? with one seed), their second that over test pictures.",
        "",
        *machines(lines),
    ]
    for values, runs in grouped(lines, SETUP).items():
        setup = dict(zip(SETUP, values, strict=True))
        augmented = "RandomCrop and mirroring" if setup["augment"] else "no augmentation"
        text += [
            "",
            f"## {setup['network']}, width {setup['width']}, depth {setup['depth']}, "
            f"batches of {setup['batch']}, {augmented}",
            "",
            f"{setup['images']:,} pictures, {setup['epochs']} epochs, learning rate {setup['lr']:g}.",
            "",
            *table(runs),
        ]
    return text


def table(lines: Sequence[Line]) -> list[str]:
    """Return the table of a setting."""
    by_arm = grouped(sorted(lines, key=lambda line: line["seed"]), ["arm"])
    runs = {arm: by_arm[arm,] for arm in ARMS if (arm,) in by_arm}
    others = [arm for arm in runs if arm in PLAIN]
    fitted = all("fit" in line for line in lines)
    rows = []
    for arm, own in runs.items():
        row = [ARMS[arm].label, ", ".join(f"{line['test']:.1f}" for line in own), spread(own)]
        row += ["" if arm == other else paired(own, runs[other]) for other in others]
        if fitted:
            row += fit(own)
        best = statistics.fmean(max(line["curve"]) for line in own)
        rows.append([*row, f"{best:.1f}", f"{mean(own, 'cpu_seconds'):.0f}"])
    head = ["network", "top-1 of each seed", "mean"]
    head += [f"minus {ARMS[arm].label}" for arm in others]
    if fitted:
        head += ["training loss, last epoch", "on training pictures", "val"]
    return markdown([*head, "best epoch", "CPU s"], rows)


def fit(runs: Sequence[Line]) -> list[str]:
    """Return how well an arm fits its training pictures: the loss of the last epoch, in training;
    top-1 and loss in evaluation mode; and top-1 on the validation pictures.
    """
    last = statistics.fmean(line["train_curve"][-1] for line in runs)
    return [
        f"{last:.4f}",
        f"{mean(runs, 'fit'):.1f}, loss {mean(runs, 'fit_loss'):.4f}",
        f"{mean(runs, 'val'):.1f}",
    ]


def full(train: str, test: str, minutes: float, device: str = "cuda") -> None:
    """Make, or go on with, the runs of tables 1 and 2 at the authors' size, for some minutes."""
    args = argparse.Namespace(
        train=train,
        test=test,
        device=device,
        seeds=list(range(6)),  # as many as the paper's
        state=Path("reproduce-state"),
        until=time.time() + 60 * minutes,
        out=RESULTS / "reproduce.jsonl",
    )
    Runs(args).part("full")


def main() -> None:
    parser = command_line(
        __doc__,
        *("--table", "--train", "--test", "--seeds", "--until", "--threads"),
        out="reproduce.jsonl",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["tables"],
        choices=[*(name for name in PARTS if name != "full"), *FIT_PARTS],
    )
    parser.add_argument(
        "--full", action="store_true", help="the authors' networks and 200 epochs, for a GPU"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--state", type=Path, default=Path("reproduce-state"), help="folder for unfinished runs"
    )
    args = parser.parse_args()
    if args.table:
        publish(args.out, tables(Recorded(args.out).lines()))
        return
    if args.train is None or args.test is None:
        parser.error("--train and --test are needed")
    torch.set_num_threads(args.threads)
    print(f"process {os.getpid()}", flush=True)
    runs = Runs(args)
    for part in ["full"] if args.full else args.parts:
        runs.part(part)


if __name__ == "__main__":
    main()
