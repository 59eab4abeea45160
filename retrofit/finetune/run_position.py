"""Where a run stands: its steps, its figures, and the best epoch so far."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Position:
    """Where a run stands, beside its tensors, and in the end how it went."""

    # Optimizer steps of the whole run.
    steps: int
    # Optimizer steps done.
    step: int = 0
    # Sum of the losses of the epoch's images so far.
    loss_sum: float = 0.0
    # Images of the epoch so far.
    images: int = 0
    # Seconds that these took.
    seconds: float = 0.0
    # Best validation accuracy, in percent.
    best: float | None = None
    # How far the strength of the best was: 1 less what it still had to move. This is 1 at its end,
    # and as low as -1 on a way there and back.
    best_progress: float = 0.0
    # Metrics of each whole epoch.
    rows: list[dict[str, Any]] = field(default_factory=list)
    # Names of the images that could not be read.
    unreadable: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all steps are done; if not, the run was interrupted and can be resumed."""
        return self.step == self.steps

    def begin_epoch(self, row: dict[str, Any]) -> None:
        """Add the metrics of the epoch that is done, and begin the next."""
        self.rows.append(row)
        self.loss_sum = 0.0
        self.images = 0
        self.seconds = 0.0

    def note_if_best(self, top1: float | None, progress: float) -> bool:
        """Return whether an epoch is the best so far, and note it if so.

        The best is the furthest on the way to the target, since the way may cost accuracy, and of
        those the most accurate. An epoch that was not validated is not the best.
        """
        if top1 is None:
            return False
        if self.best is not None and (progress, top1) <= (self.best_progress, self.best):
            return False
        self.best = top1
        self.best_progress = progress
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "finished": self.finished,
            "step": self.step,
            "steps": self.steps,
            "best_top1": self.best,
            "last": self.rows[-1] if self.rows else None,
            "unreadable": self.unreadable,
        }
