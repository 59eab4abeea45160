"""What a run leaves behind for people: figures as lines, a table and a picture."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from retrofit.utils.files import atomic_write
from retrofit.utils.text import one_line

Row = dict[str, Any]

_PANELS = (
    {"train_loss": "training loss", "val_loss": "validation loss"},
    {"val_top1": "top-1 %", "val_top5": "top-5 %"},
    {"strength": "strength", "noise": "noise"},
    {"lr": "learning rate"},
)


def write_metrics(folder: Path, rows: list[Row]) -> None:
    """Write metrics.jsonl and metrics.csv, one line an epoch."""
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[-1]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in (("metrics.jsonl", lines), ("metrics.csv", table.getvalue())):
        with atomic_write(folder / name, force=True) as temporary:
            temporary.write_text(text)


def draw(folder: Path, rows: list[Row]) -> str | None:
    """Draw curves.png; return why that failed, which is not worth the run."""
    try:
        figure = _curves(rows)
        with atomic_write(folder / "curves.png", force=True) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
    except Exception as error:  # of matplotlib or the disk
        return one_line(error)
    return None


def _curves(rows: list[Row]) -> Any:
    """Draw loss, accuracy, strength, noise and learning rate over the epochs."""
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
    return figure
