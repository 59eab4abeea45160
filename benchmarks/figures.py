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
import torch
from harness import RESULTS
from matplotlib.figure import Figure
from terminal import record_terminal
from torch import Tensor, nn

import retrofit
from retrofit.finetune import StrengthSchedule
from retrofit.layers import yeo_johnson

IMAGES = Path(__file__).parents[1] / "docs" / "images"
THEMES = {"light": ("#1f2328", "#ffffff", "#d8dee4"), "dark": ("#e6edf3", "#0d1117", "#30363d")}
OURS = "#2f81f7"
BASELINE = "#8b949e"
TODAY = "#e2701a"
H = torch.linspace(-3, 3, 121)
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
    axes = figure.subplots()
    top1 = {name: private("dp.md", name) for name in NETWORKS}
    for name in NETWORKS:
        longer = private("dp_longer.md", name)
        top1[name].update({("longer", eps): longer[row, eps] for row, eps in longer if row == HEAD})
    for place, (row, (label, colour)) in enumerate(PRIVATE.items()):
        measured = [
            (group, top1[name][row, eps])
            for group, (name, eps) in enumerate(groups)
            if (row, eps) in top1[name]
        ]
        places = [group + 0.17 * place for group, _ in measured]
        bars = axes.bar(places, [value for _, value in measured], 0.155, color=colour, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    names = [f"{NETWORKS[name]}\nepsilon {eps}" for name, eps in groups]
    axes.set_xticks([group + 0.34 for group in range(len(groups))], names)
    axes.set_ylabel("test top-1 with DP-SGD, %")
    axes.axhline(10, color=BASELINE, linewidth=1, linestyle=":", label="chance")
    axes.grid(visible=False, axis="x")
    legend(figure)


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


def course(figure: Figure) -> None:
    """The strength over a training: raised to 1, and there and back."""
    steps = 200
    axes = figure.subplots()
    for shape, end, colour, label in (
        ("linear", 1.0, OURS, "default"),
        ("there-and-back", 0.0, BASELINE, "there and back"),
    ):
        network, _ = retrofit.convert(
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), "ln", check=False
        )
        schedule = StrengthSchedule(network, steps, shape=shape, end=end)
        values = []
        for _ in range(steps):
            values.append(retrofit.strength_of(network))
            schedule.step()
        axes.plot(np.linspace(0, 1, steps), values, color=colour, label=label)
    axes.set_xlabel("part of the training that is done")
    axes.set_ylabel("strength t")
    legend(figure)


def by_strength(figure: Figure, function: Callable[[float], Tensor], title: str) -> None:
    """Draw a function of h at five strengths."""
    axes = figure.subplots()
    axes.set_ylabel("transformed value")
    ends = mpl.colors.to_rgb(BASELINE), mpl.colors.to_rgb(OURS)
    for t in (0.0, 0.25, 0.5, 0.75, 1.0):
        mix = tuple((1 - t) * a + t * b for a, b in zip(*ends, strict=True))
        axes.plot(H, function(t), color=mix, label=f"t = {t:g}")
    axes.set_title(title)
    axes.set_xlabel("normalized value h")
    axes.legend(fontsize=9, frameon=False, handlelength=1)


def proxy(figure: Figure) -> None:
    """What becomes of a ReLU whose beta moves in training: alone, and with its restored proxy."""
    gamma, trained, moved = 0.5, 1.0, 0.0
    quantiles = torch.erfinv(torch.linspace(-1, 1, 2003)[1:-1]) * 2**0.5

    def restored(beta: float) -> Tensor:
        at_conversion = torch.relu(gamma * quantiles + trained)
        today = torch.relu(gamma * quantiles + beta)
        normalized = (torch.relu(gamma * H + beta) - today.mean()) / today.std()
        return normalized * at_conversion.std() + at_conversion.mean()

    axes = figure.subplots()
    axes.plot(H, restored(trained), color=BASELINE, label="at conversion, β = 1: both")
    axes.plot(H, torch.relu(gamma * H + moved), color=TODAY, label="β moved to 0: ReLU alone")
    axes.plot(H, restored(moved), color=OURS, label="β moved to 0: with its proxy")
    axes.set_title("ReLU of y = 0.5 n + β, t = 1")
    axes.set_ylabel("output")
    axes.set_xlabel("normalized value n")
    axes.legend(fontsize=9, frameon=False, handlelength=1)


def path(figure: Figure) -> None:
    """The power transform of a layer from t = 0 to 1."""
    title = "ψ(h; 1 + t (λ - 1)), λ = 0.3"
    by_strength(
        figure,
        lambda t: yeo_johnson(H, torch.tensor(1 + t * (0.3 - 1))),
        title,
    )


def noise(figure: Figure) -> None:
    """What training adds to a transformed value: one draw, and the standard deviation of all."""
    axes = figure.subplots()
    generator = torch.Generator().manual_seed(0)
    spread = 0.4 * torch.randn(100_000, generator=generator).abs().mean()
    drawn = H + spread * torch.randn(len(H), generator=generator)
    axes.fill_between(H, H - spread, H + spread, color=OURS, alpha=0.25, linewidth=0, label="± ξ s")
    axes.plot(H, drawn, ".", color=OURS, label="with noise")
    axes.plot(H, H, color=BASELINE, label="without")
    axes.set_title("ξ = 0.4, values from a standard normal: s = 0.8")
    axes.set_xlabel("transformed value")
    axes.set_ylabel("value in training")
    axes.legend(fontsize=9, frameon=False, handlelength=1)


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


def legend(figure: Figure, axes: Any = None) -> None:
    """Explain the lines below the figure."""
    handles, labels = (axes or figure.axes[0]).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


FIGURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "before-training": (before_training, (5.6, 1.8)),
    "features": (features, (7.2, 2.2)),
    "strengths": (strengths, (5.2, 5.6)),
    "batch-size": (batch_size, (6.4, 3.6)),
    "privacy": (privacy, (6.4, 3.8)),
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
