"""A run's folder: it has one owner, and is either unused or can be resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retrofit.errors import RetrofitError
from retrofit.finetune.run_state import LAST, PREVIOUS, has_state
from retrofit.utils.files import acquire, release, sweep, termination_unwinds

RECIPE, STATE = "recipe.yaml", "state"
START = f"{STATE}/start.safetensors"  # the artifact that a run began with
_LOCK = ".lock"


@contextmanager
def owned(folder: Path, resume: bool) -> Iterator[None]:
    """Own a run's folder while the body runs.

    A new run takes a folder that is empty or not there, or that holds a run which was killed before its first state.
    If the body fails before it has saved a state, what it made is removed.

    Args:
        folder: The run's.
        resume: Whether to go on with the run in it.

    Raises:
        RetrofitError: If another process owns it, or it cannot be made; for a new run, if something lies in it.
    """
    if folder.exists() and not folder.is_dir():
        raise _taken(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = acquire(folder / _LOCK)
    except OSError as error:
        raise RetrofitError(f"cannot make the folder {folder} ({error.strerror}); give another `folder`") from error
    if not free:
        raise RetrofitError(
            f"another process trains in {folder}; give another `folder`, or resume that run once the process has ended"
        )
    try:
        sweep(folder)
        sweep(folder / STATE)
        if not resume:
            _check_unused(folder)
            _clear(folder)
        with termination_unwinds():
            try:
                yield
            finally:
                if not resume and not (folder / STATE / LAST).exists():
                    _clear(folder)
    finally:
        release(folder / _LOCK)
        with suppress(OSError):  # it holds a run now
            for path in made:
                path.rmdir()


def _check_unused(folder: Path) -> None:
    """Refuse a folder that something lies in, but for a run without a whole state."""
    names = {path.name for path in folder.iterdir()} - {_LOCK}
    states = {path.name for path in (folder / STATE).iterdir()} if STATE in names else set()
    killed = STATE in names and names <= {RECIPE, STATE} and states <= {Path(START).name, LAST, PREVIOUS}
    if names and (not killed or has_state(folder / STATE)):
        raise _taken(folder)


def _clear(folder: Path) -> None:
    (folder / RECIPE).unlink(missing_ok=True)
    shutil.rmtree(folder / STATE, ignore_errors=True)


def _taken(folder: Path) -> RetrofitError:
    return RetrofitError(f"{folder} exists; give another `folder`, or go on with the run in it by `resume`")
