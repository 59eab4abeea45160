"""The networks that `evidence.py --keep DIR` left: opened one after the other, to measure something
else on them.

The lines of what was measured go to a file; networks whose line is there are not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from evidence import KEY
from evidence_arms import ARMS, convert, trained_network
from evidence_data import cifar, draw, still
from evidence_table import SETUP, Setup
from evidence_train import file_name
from harness import RESULTS, Line, Recorded, command_line, matches, publish
from torch import Tensor, nn

NAMES = (*SETUP, "arm", "batch", "lr", "seed")
Measure = Callable[[nn.Module, Line], Line]


def parser(description: str | None, arms: Sequence[str], out: str) -> argparse.ArgumentParser:
    """Return the options that all such scripts have."""
    options = command_line(description, "--model", "--checkpoint", "--train", "--test", out=out)
    options.add_argument(
        "--keep", type=Path, help="folder of trained weights; none: only the table"
    )
    options.add_argument("--arms", nargs="+", default=list(arms), choices=list(ARMS))
    options.add_argument("--batch-sizes", nargs="+", type=int, default=[8])
    options.add_argument("--runs", type=Path, default=RESULTS / "evidence.jsonl")
    return options


def recorded_setup(runs: Path, model: str) -> Setup:
    """Return the evidence's runs on 500 pictures of CIFAR-10."""
    return Setup(Recorded(runs).lines(data="cifar10", images=500, model=model))


def measured(args: argparse.Namespace, measure: Measure) -> list[Line]:
    """Measure each arm's network of each seed, at the arm's learning rate; return all lines of the
    file.
    """
    torch.set_num_threads(1)
    recorded = Recorded(args.out)
    setup = recorded_setup(args.runs, args.model)
    runs = [run for batch in args.batch_sizes for arm in args.arms for run in setup.of(arm, batch)]
    for run in runs if args.keep else []:
        key = {name: run[name] for name in NAMES}
        weights = args.keep / f"{file_name({name: run[name] for name in KEY})}.pth"
        if recorded.find(key) is not None:
            continue
        if not weights.exists():
            print(f"missing: {weights}", flush=True)
            continue
        source = trained_network(run["model"], args.checkpoint, 10, run["seed"])
        model = convert(source, ARMS[run["arm"]])
        model.load_state_dict(torch.load(weights, weights_only=True))
        recorded.add({**key, **measure(model.eval(), run)})
    return recorded.lines()


def unseen(args: argparse.Namespace, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures that no network trained on, the test pictures and their labels."""
    pictures = cifar(args.train, args.test, 100)
    images, _ = still(draw(pictures.val, args.images, seed=0), size)
    return images, *still(pictures.test, size)


def of_arms(lines: Iterable[Line], arms: Sequence[str], batch: int) -> dict[str, list[Line]]:
    """Return the lines of each arm that has any at a batch size."""
    every = list(lines)
    groups = {
        arm: [line for line in every if matches(line, {"arm": arm, "batch": batch})] for arm in arms
    }
    return {arm: runs for arm, runs in groups.items() if runs}


def publish_tables(
    args: argparse.Namespace,
    head: str,
    lines: list[Line],
    table: Callable[[dict[str, list[Line]]], list[str]],
) -> None:
    """Write a table for each batch size."""
    text = [head, ""]
    for batch in args.batch_sizes:
        rows = table(of_arms(lines, args.arms, batch))
        text += [f"Trained with batches of {batch}:", "", *rows, ""]
    publish(args.out, [*text, *sorted({line["machine"] for line in lines})])


def percent(values: Tensor) -> float:
    """Return the share of what is true, in percent."""
    return round(100 * float(values.float().mean()), 2)


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return a network's outputs, (N, classes)."""
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in images.split(100)])
