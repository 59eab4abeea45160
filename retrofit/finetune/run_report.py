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


def write_metrics(folder: Path, rows: list[Row]) -> None:
    """Write metrics.jsonl and metrics.csv, one line an epoch."""
    _write(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[-1]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write(folder / "metrics.csv", table.getvalue())


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
    figure, axes = _figure(3, height=7)
    epochs = [row["epoch"] for row in rows]
    for key, label in (("train_loss", "training loss"), ("val_loss", "validation loss")):
        if rows[-1].get(key) is not None:
            axes[0].plot(epochs, [row.get(key) for row in rows], ".-", label=label)
    for key, label in (("val_top1", "top-1 %"), ("val_top5", "top-5 %")):
        if rows[0].get(key) is not None:
            axes[1].plot(epochs, [row[key] for row in rows], ".-", label=label)
    for key in ("strength", "noise"):
        if rows[0].get(key) is not None:
            axes[2].plot(epochs, [row[key] for row in rows], ".-", label=key)
    rate = axes[2].twinx()
    rate.plot(epochs, [row["lr"] for row in rows], ".:", color="grey", label="learning rate (right)")
    rate.set_ylim(bottom=0)
    axes[2].set_xlabel("epoch")
    lines = [*axes[2].get_lines(), *rate.get_lines()]
    axes[2].legend(lines, [line.get_label() for line in lines], frameon=False)
    for axis in axes[:2]:
        if axis.get_lines():
            axis.legend(frameon=False)
    _save(figure, path)


def plot_lambdas(path: Path, values: dict[str, Tensor]) -> None:
    """Draw the distribution of lambda in each layer: median, quartiles, and the 5% and 95% quantiles as whiskers."""
    figure, (axis,) = _figure(1, width=max(7.0, 0.16 * len(values) + 2), height=5)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.boxplot([found.numpy() for found in values.values()], whis=(5, 95), showfliers=False, widths=0.6)
    axis.set_xticks(range(1, len(values) + 1), list(values), rotation=90, fontsize=6)
    axis.set_ylabel("lambda (1: no transform)")
    _save(figure, path)


def _figure(rows: int, width: float = 7.0, height: float = 5.0) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    with atomic_write(path, force=True) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _write(path: Path, text: str) -> None:
    with atomic_write(path, force=True) as temporary:
        temporary.write_text(text)
