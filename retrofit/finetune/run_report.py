"""What a run tells: those who watch it, how it goes and how it ended; and in its folder, the figures of each epoch."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrofit.utils.files import atomic_write
from retrofit.utils.text import one_line

_PANELS = (
    {"train_loss": "training loss", "val_loss": "validation loss"},
    {"val_top1": "top-1 %", "val_top5": "top-5 %"},
    {"strength": "strength", "noise": "noise"},
    {"lr": "learning rate"},
)


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


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write metrics.jsonl and metrics.csv, one line an epoch."""
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[-1]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in (("metrics.jsonl", lines), ("metrics.csv", table.getvalue())):
        with atomic_write(folder / name, force=True) as temporary:
            temporary.write_text(text)


def draw(folder: Path, rows: list[dict[str, Any]]) -> str | None:
    """Draw curves.png: loss, accuracy, strength, noise and learning rate over the epochs.

    Return why that failed, which is not worth the run.
    """
    try:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 9), layout="constrained")
        panels = figure.subplots(len(_PANELS), 1, sharex=True)
        for axes, curves in zip(panels, _PANELS, strict=True):
            for key, label in curves.items():
                if rows[-1][key] is not None:
                    axes.plot([row["epoch"] for row in rows], [row[key] for row in rows], ".-", label=label)
            if axes.lines:
                axes.legend(frameon=False)
        panels[-1].set_xlabel("epoch")
        with atomic_write(folder / "curves.png", force=True) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
    except Exception as error:  # of matplotlib or the disk
        return one_line(error)
    return None
