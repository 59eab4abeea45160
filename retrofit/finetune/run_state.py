"""A run on the disk: its folder, which one process owns, and the state in it, on which the next
step depends.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from retrofit.errors import RetrofitError
from retrofit.utils.files import (
    acquire,
    atomic_write,
    release,
    sweep,
    termination_unwinds,
)
from retrofit.utils.text import one_line

# It goes up when a state's content changes, also by a new setting of recipes: `Run.restore` looks
# up each setting.
SCHEMA = 4
RECIPE = "recipe.yaml"
STATE = "state"
# The artifact that a run began with.
START = f"{STATE}/start.safetensors"
_LAST = f"{STATE}/last.pt"
_LOCK = ".lock"


@contextmanager
def owned(folder: Path, resume: bool) -> Iterator[None]:
    """Own a run's folder while the body runs.

    A new run takes a folder that is empty or absent. If the body fails before a state was saved,
    what it made is removed; a saved state is never removed.

    Args:
        folder: The run's folder.
        resume: Whether the run goes on from the state in the folder.

    Raises:
        RetrofitError: If another process owns the folder, it cannot be made, or a new run finds
            files of others in it.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    _lock(folder)
    try:
        sweep(folder)
        sweep(folder / STATE)
        with termination_unwinds():
            if resume:
                yield
            else:
                with _new_run(folder):
                    yield
    finally:
        release(folder / _LOCK)
        # A folder that holds a run stays.
        with suppress(OSError):
            for path in new_folders:
                path.rmdir()


def _lock(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = acquire(folder / _LOCK)
    except OSError as error:
        raise RetrofitError(
            f"cannot make the folder {folder} ({error.strerror}); give another `folder`"
        ) from error
    if not free:
        raise RetrofitError(
            f"another process trains in {folder}; give another `folder`, or resume once it has "
            f"ended"
        )


@contextmanager
def _new_run(folder: Path) -> Iterator[None]:
    """Refuse a folder that holds anything, and clear it if the body saves no state."""
    if any(path.name != _LOCK for path in folder.iterdir()):
        raise RetrofitError(
            f"{folder} exists; give another `folder`, or go on with the run in it by `resume`"
        )
    try:
        yield
    finally:
        if not (folder / _LAST).exists():
            (folder / RECIPE).unlink(missing_ok=True)
            shutil.rmtree(folder / STATE, ignore_errors=True)


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a run's state in place of the one before it; the file is always whole.

    Raises:
        RetrofitError: If the disk is full.
    """
    last = folder / _LAST
    with atomic_write(last, force=True) as temporary:
        try:
            torch.save({"schema": SCHEMA, **state}, temporary)
        # torch's writer reports a full disk as a RuntimeError.
        except RuntimeError as error:
            problem = f"cannot write the state {last} ({one_line(error)})"
            raise RetrofitError(f"{problem}; free space, then go on with `resume`") from error


def load_state(folder: Path) -> dict[str, Any]:
    """Read a run's state; a RetrofitError if there is none, or it is of another version."""
    last = folder / _LAST
    try:
        state: dict[str, Any] = torch.load(last, map_location="cpu", weights_only=True)
    # torch.load raises anything on a damaged file.
    except Exception as error:
        raise RetrofitError(
            f"no state to resume in {folder} ({one_line(error)}); "
            f"start anew in another folder with its {RECIPE}"
        ) from error
    if state["schema"] != SCHEMA:
        raise RetrofitError(
            f"{last} was written by another version of retrofit; resume it with that"
        )
    return state
