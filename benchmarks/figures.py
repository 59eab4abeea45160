r"""The pictures of README and docs, drawn from the recorded results: SVG, for light and dark pages.

    python benchmarks/figures.py
    python benchmarks/figures.py --terminal --checkpoint efficientnet-lite0.pth \
        --data-dir photos.tar --class-map classes.txt

`--terminal` runs inspect, convert and evaluate instead, and records what they print.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from diagrams import BASELINE, OURS, TODAY, conversion, course, legend, noise, path, proxy
from harness import RESULTS
from matplotlib.figure import Figure
from terminal import record_terminal

IMAGES = Path(__file__).parents[1] / "docs" / "images"
THEMES = {"light": ("#1f2328", "#ffffff", "#d8dee4"), "dark": ("#e6edf3", "#0d1117", "#30363d")}
STYLES = {"ln": ("o-", OURS), "gn-pn": ("s-", "#2da44e"), "bnn": ("^-", "#8957e5")}


LITE = "tf_efficientnet_lite0"
MOBILE = "mobilenetv2_100"
NETWORKS = {LITE: "EfficientNet-Lite0", MOBILE: "MobileNetV2"}
BATCHNORM = "BatchNorm, batch statistics"
FROZEN = "BatchNorm, frozen statistics, affine trained"
HEAD = "frozen statistics, last layer alone"


def number(text: str) -> float:
    """Return the first number of a cell of a table.

    Raises:
        ValueError: There is none.
    """
    match = re.search(r"-?\d+(\.\d+)?", text)
    if match is None:
        raise ValueError(f"no number in {text!r}")
    return float(match[0])


def table(file: str, heading: str, section: str = "") -> dict[str, list[str]]:
    """Return the rows of a results table by their first cell, of the first table with such a
    heading in a section.
    """
    text = (RESULTS / file).read_text()
    lines = text[text.index(section) :].splitlines()
    start = next(
        place for place, line in enumerate(lines) if line.startswith("|") and heading in line
    )
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return {name: cells for name, *cells in map(cells_of, rows)}


def cells_of(row: str) -> list[str]:
    """Return the cells of a table's row, without what makes them bold."""
    return [cell.strip().strip("*`") for cell in row.strip("|").split("|")]


def private(file: str, network: str) -> dict[tuple[str, str], float]:
    """Return top-1 by row and epsilon, of a network's setup with the most pictures of dp.md."""
    sections = (RESULTS / file).read_text().split("\n## ")
    of_network = [text for text in sections if text.startswith(network)]
    if not of_network:
        return {}
    rows = [cells_of(line) for line in of_network[-1].splitlines() if line.startswith("| ")]
    return {(row[0].replace("`", ""), row[1]): number(row[5]) for row in rows[1:]}


def networks(*results: tuple[str, str]) -> list[str]:
    """Return the networks for which every file has a section that starts so."""
    texts = [((RESULTS / file).read_text(), title) for file, title in results]
    return [name for name in NETWORKS if all(title.format(name) in text for text, title in texts)]


def source_top1() -> float:
    """Return top-1 of the network that was converted, before any conversion."""
    return number(re.search(r"scores (\S+)%", (RESULTS / "retention.md").read_text())[1])  # type: ignore[index]


def before_training(figure: Figure) -> None:
    """Top-1 of a trained network before any training: the source, migrated, plainly swapped."""
    migrated, swapped = map(number, table("retention.md", "migrated")["ln"])
    bars = [
        ("source", source_top1(), BASELINE),
        ("LayerNorm by retrofit, t = 1", migrated, OURS),
        ("LayerNorm, plain swap", swapped, TODAY),
    ]
    horizontal(figure, bars, "top-1 before any training, %")


def features(figure: Figure) -> None:
    """How much of the features is left before any training, in each network."""
    measures = ("cosine similarity", "the same, centered", "same nearest neighbor")
    names = networks(("features.md", "## {}"))
    every = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    for axes, name in zip(every, names, strict=True):
        rows = table("features.md", "cosine", f"## {name}")
        # The two similarities are shares of 1, agreement is in percent.
        scales = (100, 100, 1) * 2
        values = [scale * number(cell) for scale, cell in zip(scales, rows["ln"], strict=True)]
        # A plain swap's similarity is 0 but for its rounding.
        shares = [max(0.0, value) for value in values]
        for offset, part, colour, label in (
            (0.0, shares[:3], OURS, "LayerNorm by retrofit, t = 1"),
            (0.4, shares[3:], TODAY, "LayerNorm, plain swap"),
        ):
            places = [place + offset for place in range(len(measures))]
            bars = axes.barh(places, part, 0.36, color=colour, label=label)
            axes.bar_label(bars, fmt="%.0f", padding=2)
        axes.set_yticks([place + 0.2 for place in range(len(measures))], measures)
        axes.set_xlim(0, 112)
        axes.set_xlabel("%")
        axes.set_title(NETWORKS[name])
        axes.grid(visible=False)
    every[0].invert_yaxis()
    legend(figure)


PRIVATE = {
    "Opacus's GroupNorm, norms and last layer": ("Opacus's GroupNorm, 4 epochs", TODAY),
    HEAD: ("last layer alone, 4 epochs", BASELINE),
    "longer": ("last layer alone, 10 epochs", "#c9d1d9"),
    "ln, norms and last layer": ("retrofit ln, 4 epochs", "#79b8ff"),
    "frozen, norms and last layer": ("retrofit frozen, 4 epochs", OURS),
}


def privacy(figure: Figure) -> None:
    """Top-1 after training with differential privacy, by network and epsilon."""
    groups = [(LITE, "8"), (LITE, "3"), (MOBILE, "8")]
    top1 = {name: private("dp.md", name) for name in NETWORKS}
    for name in NETWORKS:
        longer = private("dp_longer.md", name)
        top1[name].update({("longer", eps): longer[row, eps] for row, eps in longer if row == HEAD})
    axes = figure.subplots()
    for place, (row, (label, colour)) in enumerate(PRIVATE.items()):
        values = [top1[name].get((row, eps)) for name, eps in groups]
        beside(axes, place, values, label, colour)
    names = [f"{NETWORKS[name]}\nepsilon {eps}" for name, eps in groups]
    axes.set_xticks([group + 0.34 for group in range(len(groups))], names)
    axes.set_ylabel("test top-1 with DP-SGD, %")
    above_chance(axes)
    legend(figure)


AVERAGED = {
    BATCHNORM: ("BatchNorm, all layers", TODAY),
    f"{BATCHNORM}, norms and last layer trained": (
        "BatchNorm, norms and last layer",
        "#f0b27a",
    ),
    "linear probe": ("last layer alone", BASELINE),
    "frozen": ("frozen, all layers", "#79b8ff"),
    "frozen, norms and last layer trained": ("frozen, norms and last layer", OURS),
}


def federated(figure: Figure) -> None:
    """Top-1 of the averaged network, by network and by what the clients train."""
    axes = figure.subplots()
    sections = [f"## cifar10, 300 training pictures, {name}" for name in NETWORKS]
    top1 = [table("federated.md", "batch 8", section) for section in sections]
    for place, (row, (label, colour)) in enumerate(AVERAGED.items()):
        beside(axes, place, [number(rows[row][0]) for rows in top1], label, colour)
    axes.set_xticks([group + 0.34 for group in range(len(top1))], NETWORKS.values())
    axes.set_ylabel("test top-1 after 20 rounds, %")
    above_chance(axes)
    legend(figure)


def beside(axes: Any, place: int, values: Sequence[float | None], label: str, colour: str) -> None:
    """Draw a row's bar at its place in each group; None is a group without it."""
    measured = {group: value for group, value in enumerate(values) if value is not None}
    places = [group + 0.17 * place for group in measured]
    bars = axes.bar(places, list(measured.values()), 0.155, color=colour, label=label)
    axes.bar_label(bars, fmt="%.1f", fontsize=7)


def above_chance(axes: Any) -> None:
    """Mark what guessing one of ten classes reaches."""
    axes.axhline(10, color=BASELINE, linewidth=1, linestyle=":", label="chance")
    axes.grid(visible=False, axis="x")


CURVES = {
    BATCHNORM: ("BatchNorm", {"color": TODAY, "marker": "o"}),
    "BatchNorm, then PreciseBN": (
        "BatchNorm, then PreciseBN",
        {"color": TODAY, "marker": "s", "linestyle": "--"},
    ),
    FROZEN: ("retrofit frozen", {"color": OURS, "marker": "o"}),
    "ln, t to 1": ("retrofit ln", {"color": OURS, "marker": "^", "linestyle": "--"}),
}


def batch_size(figure: Figure) -> None:
    """Top-1 against batch size, fine-tuned on 500 pictures, in each network."""
    sizes = {LITE: (1, 2, 8, 32), MOBILE: (2, 8)}
    every = figure.subplots(1, len(sizes), sharey=True, width_ratios=[4, 2])
    for axes, (name, measured) in zip(every, sizes.items(), strict=True):
        section = f"## cifar10, 500 training pictures, {name}"
        rows = table("evidence.md", f"batch {measured[0]} ", section)
        for row, (label, style) in CURVES.items():
            top1 = [number(cell) for cell in rows[row][::2]]
            axes.plot(range(len(measured)), top1, label=label, **style)
        axes.set_xticks(range(len(measured)), [str(size) for size in measured])
        axes.set_xlim(-0.3, len(measured) - 0.7)
        axes.set_xlabel("images in a batch")
        axes.set_title(NETWORKS[name])
        axes.set_ylim(0, 75)
    every[0].set_ylabel("test top-1, %")
    legend(figure)


def strengths(figure: Figure) -> None:
    """Top-1 against strength, before any training, and the plain swap as a flat line."""
    with (RESULTS / "strengths.csv").open() as file:
        rows = list(csv.DictReader(file))
    complete = {row["model"] for row in rows if (row["target"], row["strength"]) == ("bnn", "1")}
    figure.set_figheight(0.8 + 2.4 * len(complete))
    axes: Any = None
    every = np.atleast_1d(figure.subplots(len(complete), 1, sharex=True))
    for axes, model in zip(every, sorted(complete), strict=True):
        curves: dict[str, list[tuple[str, str]]] = {}
        for row in rows:
            if row["model"] == model:
                curves.setdefault(row["target"], []).append((row["strength"], row["top1"]))
        for target, (style, colour) in STYLES.items():
            points = np.array(curves[target], dtype=float)
            axes.plot(points[:, 0], points[:, 1], style, color=colour, label=target)
        swap = float(curves["ln, plain swap"][0][1])
        axes.axhline(swap, color=TODAY, label="gamma and beta copied into ln")
        axes.set_title(model)
        axes.set_ylim(-3, 100)
        axes.set_ylabel("top-1, %")
    axes.set_xlabel("strength t")
    legend(figure, axes)


def horizontal(figure: Figure, bars: Sequence[tuple[str, float, str]], label: str) -> None:
    """Draw labelled bars with their values."""
    axes = figure.subplots()
    names, values, colours = zip(*reversed(bars), strict=True)
    drawn = axes.barh(range(len(bars)), values, color=colours)
    axes.bar_label(drawn, fmt="%.1f", padding=4, fontsize=10)
    axes.set_yticks(range(len(bars)), names)
    axes.set_xlabel(label)
    axes.set_xlim(0, 108)
    axes.grid(visible=False)


FIGURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "before-training": (before_training, (5.6, 1.8)),
    "features": (features, (7.2, 2.2)),
    "strengths": (strengths, (5.2, 5.6)),
    "batch-size": (batch_size, (6.4, 3.6)),
    "privacy": (privacy, (6.4, 3.8)),
    "federated": (federated, (6.4, 3.4)),
    "conversion": (conversion, (8.0, 2.4)),
    "course": (course, (4.4, 2.6)),
    "proxy": (proxy, (4.4, 3.0)),
    "path": (path, (4.4, 3.0)),
    "noise": (noise, (4.4, 3.0)),
}


def draw(name: str) -> None:
    """Write a figure for light and for dark pages."""
    function, size = FIGURES[name]
    for theme, (ink, paper, grid) in THEMES.items():
        style = {
            "figure.constrained_layout.use": True, "font.size": 10, "axes.titlesize": 10, "svg.hashsalt": name,
            "svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial"],
            "axes.grid": True, "axes.axisbelow": True, "grid.color": grid, "axes.edgecolor": grid,
            "axes.spines.top": False, "axes.spines.right": False, "text.color": ink, "axes.labelcolor": ink,
            "xtick.color": ink, "ytick.color": ink, "axes.facecolor": paper, "figure.facecolor": paper,
        }  # fmt: skip
        with mpl.rc_context(style):
            figure = Figure(figsize=size)
            function(figure)
            figure.savefig(IMAGES / f"{name}-{theme}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--checkpoint")
    parser.add_argument("--data-dir")
    parser.add_argument("--class-map")
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    if args.terminal:
        record_terminal(args, IMAGES)
        return
    for name in args.only:
        draw(name)


if __name__ == "__main__":
    main()
