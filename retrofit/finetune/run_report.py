"""What a run reports: its progress, to callbacks, and in its folder the metrics of each epoch."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrofit.utils.files import atomic_write

_PANELS = (
    {"train_loss": "training loss", "val_loss": "validation loss"},
    {"val_top1": "top-1 %", "val_top5": "top-5 %"},
    {"strength": "strength", "noise": "noise"},
    {"lr": "learning rate"},
)


@dataclass(frozen=True)
class Step:
    """Where a run is."""

    # From 1.
    epoch: int
    epochs: int
    # Optimizer steps done.
    step: int
    steps: int
    # Mean of the epoch so far.
    loss: float
    lr: float
    # None without converted layers.
    strength: float | None
    # All processes together.
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


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write metrics.jsonl and metrics.csv, one line an epoch."""
    lines_file = folder / "metrics.jsonl"
    table_file = folder / "metrics.csv"
    with atomic_write(lines_file, force=True) as temporary:
        lines = [json.dumps(row) + "\n" for row in rows]
        text = "".join(lines)
        temporary.write_text(text)
    with (
        atomic_write(table_file, force=True) as temporary,
        temporary.open("w") as table,
    ):
        columns = list(rows[-1])
        writer = csv.DictWriter(table, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Draw curves.png: loss, accuracy, strength, noise and learning rate over the epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 9), layout="constrained")
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    epochs = [row["epoch"] for row in rows]
    for axes, curves in zip(panels, _PANELS, strict=True):
        for key, label in curves.items():
            if rows[-1][key] is not None:
                axes.plot(epochs, [row[key] for row in rows], ".-", label=label)
        if axes.lines:
            axes.legend(frameon=False)
    panels[-1].set_xlabel("epoch")
    with atomic_write(folder / "curves.png", force=True) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
