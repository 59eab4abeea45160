"""What a run tells those who watch it, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """Where a run is.

    Attributes:
        epoch: From 1.
        epochs: Of the whole run.
        step: Optimizer steps done.
        steps: Of the whole run.
        loss: Mean loss of the epoch so far.
        lr: Learning rate.
        strength: The converted layers' t; None without any.
        images_per_second: Images trained on, all processes together.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    lr: float
    strength: float | None
    images_per_second: float


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
    """How a run ended.

    Attributes:
        step: Optimizer steps done.
        steps: Of the whole run.
        rows: A line of metrics for each whole epoch.
        best: The best validation accuracy in percent; None without validation.
        unreadable: Names of the images that could not be read.
    """

    step: int
    steps: int
    rows: list[dict[str, Any]]
    best: float | None
    unreadable: list[str]

    @property
    def finished(self) -> bool:
        """Whether the run was not asked to stop before its end."""
        return self.step == self.steps

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        ends = {"finished": self.finished, "step": self.step, "steps": self.steps, "best_top1": self.best}
        return {**ends, "last": self.rows[-1] if self.rows else None, "unreadable": self.unreadable}
