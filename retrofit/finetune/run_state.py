"""The state of a run on the disk: everything that the next step depends on."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrofit.errors import RetrofitError
from retrofit.utils.files import atomic_write
from retrofit.utils.text import one_line

SCHEMA = 2
LAST, PREVIOUS = "last.pt", "previous.pt"


@dataclass
class Position:
    """Where a run stands, beside its tensors.

    Attributes:
        step: Optimizer steps done.
        loss_sum: Sum of the losses of the epoch's images so far.
        images: How many these are.
        seconds: That they took.
        best: The best validation accuracy in percent, and the strength that it has.
        rows: A line of metrics for each whole epoch.
        unreadable: Names of the images that could not be read.
    """

    step: int = 0
    loss_sum: float = 0.0
    images: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_strength: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def is_best(self, top1: float | None, strength: float) -> bool:
        """Note whether an epoch is the best: the furthest on the way to the target, whatever the way costs."""
        if top1 is None or (self.best is not None and (strength, top1) <= (self.best_strength, self.best)):
            return False
        self.best, self.best_strength = top1, strength
        return True


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a state and keep the one before it; at every moment one of the two is whole.

    Raises:
        RetrofitError: If the disk is full or the folder cannot be written to; the state before stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / LAST
    with atomic_write(last, force=True) as temporary:
        try:
            torch.save({"schema": SCHEMA, **state}, temporary)
        except RuntimeError as error:  # torch's writer reports a full disk so
            raise RetrofitError(
                f"cannot write the state {last} ({one_line(error)}); free space, then go on with `resume`"
            ) from error
        if last.exists():
            os.replace(last, folder / PREVIOUS)


def load_state(folder: Path) -> dict[str, Any]:
    """Read the newest whole state.

    Raises:
        RetrofitError: If there is none, or it is of another version.
    """
    reason = "there is none"
    for path in _files(folder):
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises anything on a damaged file
            reason = f"{path.name}: {one_line(error)}"
            continue
        if state["schema"] != SCHEMA:
            raise RetrofitError(f"{path} was written by another version of retrofit; resume it with that")
        return state
    raise RetrofitError(f"no state to resume in {folder} ({reason}); start the run anew with its recipe.yaml")


def has_state(folder: Path) -> bool:
    """Whether there is a state that is not known to be damaged."""
    for path in _files(folder):
        try:
            torch.load(path, map_location="meta", weights_only=True)
        except (OSError, MemoryError):
            return True
        except Exception:  # as above
            continue
        return True
    return False


def _files(folder: Path) -> list[Path]:
    return [path for path in (folder / LAST, folder / PREVIOUS) if path.is_file()]


def random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators, as values that `torch.load` reads safely."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Let the generators go on from where `random_state` found them."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    with suppress(KeyError):
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
