"""Train MODEL, a converted network, while its strength (if any) rises to 1 from the file's value (0
after convert).

A network that has not been converted is trained as it is, as a control run. By default, the
learning rate warms up over a tenth of the epochs (at least one), and the gradient is clipped to
norm 1.

Every setting below can also go in a recipe: a YAML file, or one listed by `retrofit recipes`; flags
take precedence. The run folder holds the resolved recipe, metrics, plots, last.safetensors,
best.safetensors (the highest top-1 of the epochs whose strength is closest to its final value) and
the state from which --resume continues exactly. Ctrl-C and SIGTERM save before ending the run.

\b
    $ retrofit convert resnet18 --to ln --img-size 32
    $ retrofit finetune resnet18-ln.safetensors --recipe digits -o runs/digits
    $ retrofit evaluate runs/digits/best.safetensors --dataset digits
    $ retrofit finetune --resume runs/digits
    $ retrofit finetune resnet50-frozen.safetensors --data-dir DIR -b 2 --lr 1e-4 -o runs/mine
    $ retrofit finetune resnet18 --checkpoint resnet18.pth --data-dir DIR
    $ torchrun --nproc-per-node 4 -m retrofit finetune resnet50-bnn.safetensors \\
        --recipe imagenet-bnn-resnet50 --data-dir imagenet --sync-norm
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli import options
from retrofit.cli.console import emit, progress_bar, say, warn_of_unreadable
from retrofit.errors import UsageError
from retrofit.finetune.recipe import FREE, Recipe
from retrofit.finetune.recipe_files import load_recipe, recipe_summaries
from retrofit.finetune.run_position import Position
from retrofit.finetune.run_report import RunCallback, Step
from retrofit.utils.text import printable

if TYPE_CHECKING:
    from retrofit.networks.open_model import Network

# Seconds within which signals are one request: `timeout` sends its signal to the process and to its
# group.
_ONE_REQUEST = 1.0
_SHORT = {"batch_size": "-b", "workers": "-j"}
_GROUPS = {
    "recipe": "The run",
    "pretrained": "Weights",
    "data_dir": "Images",
    "batch_size": "Length",
    "opt": "Optimizer and learning rate",
    "strength_sched": "Strength, noise and statistics",
    "teacher": "Distillation",
    "no_aug": "Augmentation and labels",
    "model_ema": "Average of the weights",
    "workers": "Machine and output",
}
"""The first option of each group of the help."""
_METAVARS = {"number": "F", "integer": "N", "string": "NAME", "array": "A,B,..."}
_NAMED = {
    "data_dir": "DIR",
    "checkpoint": "FILE",
    "class_map": "FILE",
    "scale": "F,F",
    "ratio": "F,F",
}


def _settings(function: Any) -> Any:
    """Make a flag for each recipe setting; the values are checked with the rest of the recipe."""
    for name, field in reversed(Recipe.model_json_schema()["properties"].items()):
        if name != "model":
            function = _setting(name, field)(function)
    return function


def _setting(name: str, field: dict[str, Any]) -> options.Decorator:
    """Make the flag of a setting from its field in the recipe's JSON schema."""
    flag = options.flag_of(name)
    text = field["description"]
    if field["default"] not in (None, "", []):
        text = f"{text.rstrip('.')} (default: {_shown(field['default'])})."
    kind = field.get("anyOf", [field])[0]
    if kind["type"] == "boolean":
        off = options.flag_of(f"no_{name}")
        if name.startswith("no_"):
            off = options.flag_of(name.removeprefix("no_"))
        return options.option(f"{flag}/{off}", text, bool, default=None)
    metavar = _NAMED.get(name) or "|".join(kind.get("enum", ())) or _METAVARS[kind["type"]]
    return options.option(f"{_SHORT.get(name, '')} {flag}", text, metavar=metavar)


def _shown(value: Any) -> str:
    if value is False:
        return "no"
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    if isinstance(value, str):
        return value
    return f"{value:g}"


@click.command("finetune", cls=options.Grouped, groups=_GROUPS, help=__doc__)
@click.argument("MODEL", required=False, shell_complete=options.complete_model)
@options.option(
    "--recipe",
    "Settings to start from.",
    metavar="NAME|FILE",
    shell_complete=lambda _context, _param, typed: options.completed(recipe_summaries(), typed),
)
@options.option(
    "-o --output folder", "Folder to write (default: runs/MODEL-RECIPE).", Path, metavar="DIR"
)
@options.option("--resume", "Resume the run in this folder.", Path, metavar="DIR")
@options.network
@_settings
@options.json
def command(
    recipe: str | None,
    folder: Path | None,
    resume: Path | None,
    network: str | None,
    **settings: Any,
) -> None:
    values = {name: value for name, value in settings.items() if value is not None}
    with _signals() as received:
        from retrofit.cli.network import introduce
        from retrofit.finetune.run import finetune

        if resume is not None:
            opened, run, folder = _resumed(resume, network, values)
        else:
            opened, run, network = _new(recipe, network, values)
            folder = folder or _free_folder(str(run.model), recipe)
            if _speaks():
                introduce(opened)
        with progress_bar("training") as move:
            result = finetune(
                opened,
                run,
                folder,
                resume=resume is not None,
                callback=_Progress(move),
                stop=lambda: bool(received),
            )
    if _speaks():
        _conclude(folder, result, network)
    if not result.finished:
        sys.exit(128 + (received[0] if received else signal.SIGTERM))


def _resumed(
    folder: Path, network: str | None, values: dict[str, Any]
) -> tuple[Network, Recipe, Path]:
    """Return the network and the settings of the run in a folder."""
    from retrofit.finetune.run_network import resume_network
    from retrofit.finetune.run_state import recipe_file

    recipe = recipe_file(folder)
    reason = f"a run that goes on keeps its settings (to start another: --recipe {recipe})"
    options.refuse_flags(reason, but=(*FREE, "resume", "network", "json"))
    return resume_network(folder, network), load_recipe(recipe, values), folder


def _new(
    recipe: str | None, network: str | None, values: dict[str, Any]
) -> tuple[Network, Recipe, str | None]:
    """Return the network of a new run, its settings, and what builds a network of one's own."""
    from retrofit.finetune.run_network import recipe_network

    run = load_recipe(recipe, values)
    model = run.model
    if model is None or not model.startswith("py:"):
        return recipe_network(run, network), run, network
    if "model" not in values:
        raise UsageError(
            f"no recipe may have {printable(model, 100)} imported; give it as MODEL yourself"
        )
    return recipe_network(run, network), run, model


def _free_folder(model: str, recipe: str | None) -> Path:
    """Return the first folder runs/MODEL-RECIPE, -2, -3, ... that does not exist."""
    from retrofit.cli.network import file_stem

    name = file_stem(model)
    if recipe is not None:
        name += f"-{Path(recipe).stem}"
    folder = Path("runs", name)
    number = 2
    while folder.exists():
        folder = Path("runs", f"{name}-{number}")
        number += 1
    return folder


def _speaks() -> bool:
    """Tell whether this is the first of torchrun's processes, which speaks for all."""
    return os.environ.get("RANK", "0") == "0"


class _Progress(RunCallback):
    """Moves a bar with every step, and writes a line for each epoch."""

    def __init__(self, move: Callable[..., None]) -> None:
        self._move = move

    def note(self, text: str) -> None:
        if text.startswith("warning"):
            say(text, "yellow")
        else:
            say(f"note: {text}")

    def started(self, folder: Path) -> None:
        say(f"run: {folder}")

    def step(self, step: Step) -> None:
        figures = f"loss {step.loss:.4f}, {_course(step.lr, step.strength, step.images_per_second)}"
        self._move(step.step, step.steps, f"epoch {step.epoch} of {step.epochs}, {figures}")

    def epoch(self, row: dict[str, Any]) -> None:
        top1 = ""
        if row["val_top1"] is not None:
            top1 = f", top-1 {row['val_top1']:.2f}%"
        course = _course(row["lr"], row["strength"], row["images_per_second"])
        say(f"epoch {row['epoch']}: loss {row['train_loss']:.4f}{top1}, {course}")


def _course(lr: float, strength: float | None, images_per_second: float) -> str:
    t = ""
    if strength is not None:
        t = f", strength {strength:.2f}"
    return f"lr {lr:.2e}{t}, {images_per_second:.0f} images/s"


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list that receives the signal asking the run to stop; a second request ends the run
    at once.
    """
    received: list[int] = []
    first = 0.0

    def handle(number: int, _frame: Any) -> None:
        """Note the first request.

        Raises:
            KeyboardInterrupt: At the second.
        """
        nonlocal first
        if not received:
            received.append(number)
            first = time.monotonic()
        elif time.monotonic() > first + _ONE_REQUEST:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(folder: Path, result: Position, network: str | None) -> None:
    warn_of_unreadable(result.unreadable)
    step = result.step
    if result.finished:
        artifact = folder / "best.safetensors"
        best = ""
        top1 = result.best
        if top1 is not None:
            best = f", best top-1 {top1:.2f}%"
        say(f"done: {step} steps{best}", "bold")
        say(f"wrote {artifact}", "bold")
    else:
        artifact = folder / "last.safetensors"
        say(f"stopped and saved at step {step} of {result.steps}", "bold")
        command = _resuming_command(folder, network)
        say(f"next: {command}")
    answer = {"folder": str(folder), **result.to_dict(), "output": str(artifact)}
    emit(answer)


def _resuming_command(folder: Path, network: str | None) -> str:
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    start = "retrofit"
    if processes != "1":
        start = f"torchrun --nproc-per-node {processes} -m retrofit"
    command = f"{start} finetune --resume {folder}"
    if network:
        return f"{command} --network {network}"
    return command
