"""A run on the disk: its folder, which one process owns, and the state in it, on which the next
step depends.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from retrofit.errors import RetrofitError
from retrofit.networks.checkpoint import check_zip
from retrofit.utils.files import (
    UnwritableError,
    acquire,
    atomic_write,
    final_name,
    flush,
    release,
    sweep,
    temporary_folder,
    termination_unwinds,
    writing,
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

    A new run takes a folder that is empty or absent, or that was left by a run that was killed
    before it began. A folder that is still empty at the end is removed.

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
        if not resume:
            _refuse_files(folder)
        with termination_unwinds():
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


def _refuse_files(folder: Path) -> None:
    """Refuse a folder that holds anything but what a killed process left."""
    others = [path for path in folder.iterdir() if path.name != _LOCK and final_name(path) is None]
    if others:
        raise RetrofitError(
            f"{folder} exists; give another `folder`, or go on with the run in it by `resume`"
        )


@contextmanager
def beginning(folder: Path) -> Iterator[Path]:
    """Yield a folder for the first files of a run: recipe, state and what stands beside it.

    They appear in the run's folder when the body ends, all of them. If it fails, or the process is
    killed, none does.

    Raises:
        RetrofitError: If the disk is full.
    """
    with writing(folder), temporary_folder(folder / STATE) as temporary:
        (temporary / STATE).mkdir()
        yield temporary
        # One renaming is all or nothing, two are not.
        (temporary / RECIPE).rename(temporary / STATE / RECIPE)
        (temporary / STATE).rename(folder / STATE)
        recipe_file(folder)
        flush(folder)


def recipe_file(folder: Path) -> Path:
    """Return the file of the recipe of the run in a folder, which users may edit."""
    file = folder / RECIPE
    if not file.exists():
        # The process that began the run was killed before it had put the recipe there.
        with suppress(FileNotFoundError):
            (folder / STATE / RECIPE).rename(file)
    return file


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
            raise UnwritableError(f"cannot write the state {last} ({one_line(error)})") from error


@contextmanager
def resumable() -> Iterator[None]:
    """Advise to resume the run once its files can be written.

    Raises:
        RetrofitError: If the disk is full.
    """
    try:
        yield
    except UnwritableError as error:
        raise RetrofitError(f"{error.problem}; free space, then go on with `resume`") from error


def load_state(folder: Path) -> dict[str, Any]:
    """Read a run's state; a RetrofitError if there is none, or it is of another version."""
    last = folder / _LAST
    try:
        check_zip(last)
        state: dict[str, Any] = torch.load(last, map_location="cpu", weights_only=True)
    # zipfile and torch.load raise anything on a damaged file.
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
