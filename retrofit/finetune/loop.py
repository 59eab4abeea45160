"""The loop: one run from its recipe to its last step, in one process or many, interrupted or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from timm.utils import random_seed

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run import Run
from retrofit.finetune.run_report import Position, RunCallback
from retrofit.finetune.run_state import START, load_state, owned
from retrofit.networks.artifact import artifact_path
from retrofit.networks.models import Network, open_model


def finetune(
    network: Network,
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    callback: RunCallback | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Position:
    """Train a network as a recipe says; the run's folder is new, empty, or of a run killed before its first state.

    To `resume`, from the state in the folder, give the network that `resume_network` opens. `stop` is asked after each
    step; a true answer saves the state and ends the run. A UsageError says which setting does not fit the network or
    the data; a RetrofitError, that the folder is in use, the data or state cannot be read, the disk is full, or the
    loss is not finite. A run that has saved no state leaves nothing behind.
    """
    accelerator = make_accelerator(recipe, folder)
    main = accelerator.is_main_process
    with owned(folder, resume) if main else nullcontext():
        state = load_state(folder) if resume else None
        run = Run(network, recipe, folder, accelerator, callback if main and callback else RunCallback(), state)
        run.begin() if state is None else run.restore(state)
        stopped = False
        while not (run.position.finished or stopped):
            stopped = run.train_epoch(stop)
            if run.position.step % run.epoch_steps == 0:
                run.end_epoch()
            run.checkpoint()
        return run.end()


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Set up the run that `torchrun` or `accelerate launch` started; a UsageError names a missing device or tracker."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if recipe.device not in (None, "cpu") and (present is None or recipe.device != present.type):
        have = present.type if present else "no accelerator"
        raise UsageError(f"cannot use `device={recipe.device!r}`: there is {have}; leave it out or use cpu")
    cpu = recipe.device == "cpu" or present is None
    if cpu and recipe.amp_dtype == "float16":
        raise UsageError("mixed precision on a CPU is bfloat16's; drop `amp_dtype='float16'`")
    half = {"bfloat16": "bf16", "float16": "fp16", None: "bf16" if cpu else "fp16"}[recipe.amp_dtype]
    trackers = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    if missing := [name for name in recipe.log_with if name not in trackers]:
        have = f"installed here: {', '.join(trackers) or 'none'}"
        raise UsageError(f"`log_with={missing[:1]!r}` is no tracker of accelerate here ({have}); install it")
    return Accelerator(
        cpu=cpu,
        mixed_precision=half if recipe.amp else "no",
        gradient_accumulation_steps=recipe.grad_accum_steps,
        log_with=recipe.log_with or None,
        project_dir=str(folder),
    )


def recipe_network(recipe: Recipe, network: str | None = None) -> Network:
    """Open the network that a recipe names, or raise UsageError if it names none; random weights come from its seed.

    `network` is `open_model`'s: what builds it, if an artifact holds the user's own.
    """
    if recipe.model is None:
        raise UsageError("there is no network to train; give MODEL, an artifact or a network's name")
    random_seed(recipe.seed)
    return open_model(
        recipe.model,
        pretrained=recipe.pretrained,
        checkpoint=recipe.checkpoint,
        match=recipe.match,
        num_classes=recipe.num_classes if recipe.checkpoint else None,  # else the run replaces the classifier
        img_size=recipe.img_size if artifact_path(recipe.model) is None else None,
        network=network,
    )


def resume_network(folder: Path, network: str | None = None) -> Network:
    """Open the network that a run in `folder` began with; `network` as for `open_model`. RetrofitError if none did."""
    if not (folder / START).is_file():
        raise RetrofitError(f"no run to resume in {folder}; give the folder of one, or start one without `resume`")
    return open_model(str(folder / START), network=network)
