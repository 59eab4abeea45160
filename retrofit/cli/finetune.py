"""`retrofit finetune`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args, get_origin

import click

from retrofit.cli import completion
from retrofit.cli.console import emit, names, say
from retrofit.cli.options import json_option, network_option
from retrofit.errors import UsageError
from retrofit.finetune.recipe import FREE, Recipe, load_recipe
from retrofit.utils.text import printable

if TYPE_CHECKING:
    from retrofit.finetune.run_callback import Result
    from retrofit.networks.models import Network

HELP = """Train MODEL, a converted network, while its strength goes from 0, the source, to 1, the target.

A network that is not converted is trained as it is: the control run. Unless told otherwise the learning rate warms up
over a tenth of the epochs, at least one, and the gradient is clipped to norm 1.

Every setting below may also stand in a recipe: a YAML file, or one of those that `retrofit recipes` lists; flags win.
The run's folder gets the resolved recipe, metrics, plots, last.safetensors, best.safetensors and the state that
--resume continues, exactly. Ctrl-C and SIGTERM save before they end the run.

\b
$ retrofit convert resnet18 --to bnn --img-size 32 -o resnet18-bnn.safetensors
$ retrofit finetune resnet18-bnn.safetensors --recipe digits -o runs/digits
$ retrofit evaluate runs/digits/best.safetensors --dataset digits
$ retrofit finetune --resume runs/digits
$ retrofit finetune resnet18 --checkpoint resnet18.pth --data-dir DIR
$ torchrun --nproc-per-node 4 -m retrofit finetune resnet50-bnn.safetensors \\
    --recipe imagenet-bnn-resnet50 --data-dir imagenet --sync-norm
"""
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
_METAVARS: dict[Any, str] = {float: "F", int: "N", str: "NAME", tuple: "F,F", list: "A,B,..."}


class _Grouped(click.Command):
    """A command whose help shows its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order of the options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        title = ""
        for option in self.get_params(ctx):
            if isinstance(option, click.Argument):  # of which some versions of click have a record too
                continue
            title = _GROUPS.get(option.name or "", title)
            if (record := option.get_help_record(ctx)) is not None:
                groups.setdefault(title, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def _option(name: str) -> Callable[[Any], Any]:
    """Make the flag of a recipe's setting; its value is checked with the rest of the recipe."""
    field = Recipe.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    default = "" if field.default in (None, "", []) else f" [{_shown(field.default)}]"
    text = f"{field.description}{default}"
    if field.annotation is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    metavar = next((_METAVARS[kind] for kind in _kinds(field.annotation) if kind in _METAVARS), "VALUE")
    flags = [_SHORT[name], flag] if name in _SHORT else [flag]
    return click.option(*flags, name, metavar=metavar, help=text)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Give what a type is made of, from the outside in: `tuple[float, float] | None` is first a tuple."""
    yield get_origin(annotation) or annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _settings(function: Any) -> Any:
    for name in reversed([name for name in Recipe.model_fields if name != "model"]):
        function = _option(name)(function)
    return function


@click.command("finetune", cls=_Grouped, help=HELP)
@click.argument("model", metavar="MODEL", required=False, shell_complete=completion.model)
@click.option("--recipe", metavar="NAME|FILE", shell_complete=completion.recipe, help="Settings to start from.")
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path), metavar="DIR", help="runs/MODEL-RECIPE if left out."
)
@click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Go on with the run in this folder.")
@network_option
@_settings
@json_option
def command(
    model: str | None,
    recipe: str | None,
    folder: Path | None,
    resume: Path | None,
    network: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Run `retrofit finetune`."""
    given = {name: value for name, value in settings.items() if value is not None}
    if resume is not None:
        if fixed := [name for name in given if name not in FREE]:
            flag = fixed[0].replace("_", "-")
            raise UsageError(
                f"--{flag} would change the run that --resume continues; drop it, or start a new run with "
                f"--recipe {resume / 'recipe.yaml'}"
            )
        if model is not None or recipe is not None or folder is not None:
            raise UsageError("--resume takes MODEL, --recipe and -o from the run's folder; drop them")
    with _asked_to_stop() as stop:
        from retrofit.cli.progress import run_callback
        from retrofit.finetune.loop import finetune, resume_network

        if resume is not None:
            folder, opened = resume, resume_network(resume, network)
            settled = load_recipe(resume / "recipe.yaml", given)
        else:
            folder, opened, settled = _prepared(model, network, recipe, folder, given)
            network = model if model is not None and model.startswith("py:") else network
        going_on, stopped = resume is not None, lambda: stop() is not None
        with run_callback() as callback:
            result = finetune(opened, settled, folder, resume=going_on, callback=callback, stop=stopped)
    if _first_process():
        _conclude(folder, result, network, as_json)
    if not result.finished:
        sys.exit(128 + (stop() or signal.SIGTERM))


def _prepared(
    model: str | None, network_name: str | None, name: str | None, folder: Path | None, given: dict[str, Any]
) -> tuple[Path, Network, Recipe]:
    """Return the folder of a new run, the network that it begins with, and its settings."""
    from retrofit.finetune.run_state import seed_everything
    from retrofit.networks.models import is_artifact, open_model

    recipe = load_recipe(name, {**given, **({} if model is None else {"model": model})})
    if recipe.model is None:
        raise UsageError("there is no network to train; give MODEL, an artifact or a network's name")
    if recipe.model.startswith("py:") and recipe.model != model:
        raise UsageError(f"no recipe may have {printable(recipe.model, 100)} imported; give it as MODEL yourself")
    folder = folder or _fresh_folder(recipe.model, name)
    seed_everything(recipe.seed)
    network = open_model(
        recipe.model,
        pretrained=recipe.pretrained,
        checkpoint=recipe.checkpoint,
        match=recipe.match or "name",
        num_classes=recipe.num_classes if recipe.checkpoint else None,  # else the run replaces the classifier
        img_size=None if is_artifact(recipe.model) else recipe.img_size,
        network=network_name,
    )
    _introduce(network)
    return folder, network, recipe


def _first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _introduce(network: Network) -> None:
    from retrofit.networks.models import weights_sentence

    if _first_process():
        random = network.weights["kind"] == "random"
        say(weights_sentence(network.weights), style="bold yellow" if random else "bold")
        for warning in network.warnings:
            say(f"warning: {warning}", style="yellow")


def _fresh_folder(model: str, recipe: str | None) -> Path:
    """Return runs/MODEL-RECIPE, with a number behind it if it is taken."""
    stem = Path(model).name.removesuffix(".safetensors").replace(":", "-")
    base = Path("runs") / (stem if recipe is None else f"{stem}-{Path(recipe).stem}")
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], int | None]]:
    """Give a question whose answer is the signal that asked the run to stop; a second one ends it on the spot."""
    received: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(folder: Path, result: Result, network: str | None, as_json: bool) -> None:
    if result.unreadable:
        count = len(result.unreadable)
        say(f"warning: {count} images cannot be read: {names(result.unreadable)}", style="yellow")
    artifact = folder / ("best.safetensors" if result.finished else "last.safetensors")
    if result.finished:
        best = "" if result.best is None else f", best top-1 {result.best:.2f}%"
        say(f"done: {result.step} steps{best}", style="bold")
        say(f"wrote {artifact}", style="bold")
    else:
        say(f"stopped and saved at step {result.step} of {result.steps}", style="bold")
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        start = "retrofit" if processes == "1" else f"torchrun --nproc-per-node {processes} -m retrofit"
        say(f"next: {start} finetune --resume {folder}" + (f" --network {network}" if network else ""))
    if as_json:
        last = result.rows[-1] if result.rows else None
        emit(
            {
                "schema": 1,
                "folder": str(folder),
                "finished": result.finished,
                "step": result.step,
                "steps": result.steps,
                "best_top1": result.best,
                "last": last,
                "unreadable": result.unreadable,
                "output": str(artifact),
            }
        )
