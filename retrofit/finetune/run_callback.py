"""What a run tells those who watch it, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """Where a run is."""

    epoch: int  # from 1
    epochs: int
    step: int  # optimizer steps done
    steps: int
    loss: float  # mean of the epoch so far
    lr: float
    strength: float | None  # None without converted layers
    images_per_second: float  # all processes together


class RunCallback:
    """Called with a run's progress, in the main process only; each method may be overridden."""

    def note(self, text: str) -> None:
        """Called with a sentence for the user."""

    def started(self, folder: Path) -> None:
        """Called when a new run has its folder."""

    def step(self, step: Step) -> None:
        """Called after each step."""

    def epoch(self, row: dict[str, Any]) -> None:
        """Called with an epoch's line of metrics."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    step: int  # optimizer steps done
    steps: int  # of the whole run
    rows: list[dict[str, Any]]  # metrics of each whole epoch
    best: float | None  # validation accuracy in percent; None without validation
    unreadable: list[str]  # images, by name

    @property
    def finished(self) -> bool:
        """Whether the run was not asked to stop before its end."""
        return self.step == self.steps

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        ends = {"finished": self.finished, "step": self.step, "steps": self.steps, "best_top1": self.best}
        return {**ends, "last": self.rows[-1] if self.rows else None, "unreadable": self.unreadable}
