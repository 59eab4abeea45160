"""What a run leaves behind for people: figures as lines, tables and pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

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


def draw(folder: Path, rows: list[Row], lambdas: Callable[[], dict[str, Tensor]]) -> str | None:
    """Draw the curves and the distribution of lambda; return why a picture failed, which is not worth the run."""
    try:
        plot_curves(folder / "curves.png", rows)
        if values := lambdas():
            plot_lambdas(folder / "lambda.png", values)
    except Exception as error:  # of matplotlib, the disk, an image, the network
        return one_line(error)
    return None


def plot_curves(path: Path, rows: list[Row]) -> None:
    """Draw loss, accuracy, strength, noise and learning rate over the epochs."""
    figure, axes = _figure(len(_PANELS), height=9)
    for axis, curves in zip(axes, _PANELS, strict=True):
        for key, label in curves.items():
            if rows[-1][key] is not None:
                axis.plot([row["epoch"] for row in rows], [row[key] for row in rows], ".-", label=label)
        if axis.lines:
            axis.legend(frameon=False)
    axes[-1].set_xlabel("epoch")
    _save(figure, path)


def plot_lambdas(path: Path, values: dict[str, Tensor]) -> None:
    """Draw the distribution of lambda in each layer: median, quartiles, and the 5% and 95% quantiles as whiskers."""
    figure, (axis,) = _figure(1, width=max(7.0, 0.16 * len(values) + 2), height=5)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.boxplot([lambdas.numpy() for lambdas in values.values()], whis=(5, 95), showfliers=False, widths=0.6)
    axis.set_xticks(range(1, len(values) + 1), list(values), rotation=90, fontsize=6)
    axis.set_ylabel("lambda (1: no transform)")
    _save(figure, path)


def _figure(rows: int, width: float = 7.0, height: float = 5.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]


def _save(figure: Any, path: Path) -> None:
    with atomic_write(path, force=True) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
