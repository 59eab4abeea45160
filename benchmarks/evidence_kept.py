"""The networks that `evidence.py --keep DIR` left: opened one after the other, to measure something
else on them.

The lines of what was measured go to a file; networks whose line is there are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from evidence_arms import ARMS, convert, trained_network
from evidence_table import SETUP, Line, Setup
from evidence_train import file_name
from torch import nn

RESULTS = Path(__file__).parent / "results"


def parser(description: str | None, arms: Sequence[str], out: str) -> argparse.ArgumentParser:
    """Return the options that all such scripts have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--keep", type=Path, help="folder of trained weights; none: only the table")
    made.add_argument("--model", default="tf_efficientnet_lite0")
    made.add_argument("--checkpoint", help="of the source network")
    made.add_argument("--train", metavar="TAR")
    made.add_argument("--test", metavar="TAR")
    made.add_argument("--arms", nargs="+", default=list(arms), choices=list(ARMS))
    made.add_argument("--batch-sizes", nargs="+", type=int, default=[8])
    made.add_argument("--runs", type=Path, default=RESULTS / "evidence.jsonl")
    made.add_argument("--out", type=Path, default=RESULTS / out)
    return made


def measured(
    args: argparse.Namespace, measure: Callable[[nn.Module, Line], dict[str, Any]]
) -> list[Line]:
    """Measure each arm's network of each seed, at the arm's learning rate; return all lines of the
    file.
    """
    torch.set_num_threads(1)
    every = [json.loads(line) for line in args.runs.read_text().splitlines()]
    done: list[Line] = (
        [json.loads(line) for line in args.out.read_text().splitlines()]
        if args.out.exists()
        else []
    )
    wanted = {"data": "cifar10", "images": 500, "model": args.model}
    setup = Setup(
        [line for line in every if all(line[name] == value for name, value in wanted.items())]
    )
    runs = [
        line for batch in args.batch_sizes for name in args.arms for line in setup.of(name, batch)
    ]
    for run in runs if args.keep else []:
        key: dict[str, Any] = {one: run[one] for one in (*SETUP, "arm", "batch", "lr", "seed")}
        weights = args.keep / f"{file_name(_in_order(run))}.pth"
        if any(all(one[part] == value for part, value in key.items()) for one in done):
            continue
        if not weights.exists():
            print(f"missing: {weights}", flush=True)
            continue
        model = convert(
            trained_network(run["model"], args.checkpoint, 10, run["seed"]), ARMS[run["arm"]]
        )
        model.load_state_dict(torch.load(weights, weights_only=True))
        found = measure(model.eval(), run)
        done.append({**key, **found})
        with args.out.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(run["arm"], run["batch"], run["seed"], found, flush=True)
    return done


def _in_order(run: Line) -> dict[str, Any]:
    """Return the part of a line that names its run, in the order of its making."""
    names = list(run)
    return {name: run[name] for name in names[: names.index("seed") + 1]}
