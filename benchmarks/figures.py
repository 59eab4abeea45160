r"""The pictures of README and docs, drawn from the recorded results: SVG, one for light pages and
one for dark.

    python benchmarks/figures.py
    python benchmarks/figures.py --terminal --checkpoint efficientnet-lite0.pth \
        --data-dir photos.tar --class-map classes.txt

`--terminal` runs inspect, convert and evaluate instead, and records what they print.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import retrofit
from retrofit.finetune import StrengthSchedule
from retrofit.layers import yeo_johnson

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
THEMES = {"light": ("#1f2328", "#ffffff", "#d8dee4"), "dark": ("#e6edf3", "#0d1117", "#30363d")}
OURS, BASELINE, TODAY = "#2f81f7", "#8b949e", "#e2701a"
H = torch.linspace(-3, 3, 121)
STYLES = {"ln": "o-", "gn-pn": "s-", "bnn": "^-"}


def number(text: str) -> float:
    """Return the first number of a cell of a table."""
    found = re.search(r"-?\d+(\.\d+)?", text)
    if found is None:
        raise ValueError(f"no number in {text!r}")
    return float(found[0])


def table(file: str, heading: str, section: str = "") -> dict[str, list[str]]:
    """Return the rows of a results table by their first cell, of the first table with such a
    heading in a section.
    """
    text = (RESULTS / file).read_text()
    lines = text[text.index(section) :].splitlines()
    start = next(
        place for place, line in enumerate(lines) if line.startswith("|") and heading in line
    )
    rows: dict[str, list[str]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip().strip("*`") for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[1:]
    return rows


def source_top1() -> float:
    """Return top-1 of the network that was converted, before any conversion."""
    return number(re.search(r"scores (\S+)%", (RESULTS / "retention.md").read_text())[1])  # type: ignore[index]


def before_training(figure: Figure) -> None:
    """Top-1 of a trained network before any training: the source, migrated, plainly swapped."""
    rows = table("retention.md", "migrated")
    bars = [("source", source_top1(), BASELINE)]
    migrated, swapped = (number(cell) for cell in rows["ln"])
    bars += [
        ("LayerNorm by retrofit, t = 1", migrated, OURS),
        ("LayerNorm, plain swap", swapped, TODAY),
    ]
    horizontal(figure, bars, "top-1 before any training, %")


def usual_way(figure: Figure) -> None:
    """Top-1 by what most people do, by retrofit and by the best other way, in three situations."""
    private = {name: number(top1) for name, eps, top1 in csv_rows(RESULTS / "dp.md") if eps == "8"}
    longer = {name: number(top1) for name, _, top1 in csv_rows(RESULTS / "dp_longer.md")}
    clients, small = (
        table("federated.md", "batch 8"),
        table("evidence.md", "batch 1 ", "## cifar10, 500 training"),
    )
    batch, frozen = "BatchNorm, batch statistics", "BatchNorm, frozen statistics, affine trained"
    groups = {
        "private training,\nepsilon 8": (
            (
                "Opacus's fixer (norms, last layer)",
                private["Opacus's GroupNorm, norms and last layer"],
            ),
            ("last layer alone", longer["frozen statistics, last layer alone"]),
            ("frozen (norms, last layer)", private["frozen, norms and last layer"]),
        ),
        "federated averaging": (
            ("BatchNorm", number(clients[batch][0])),
            ("bn.eval()", number(clients[frozen][0])),
            ("frozen", number(clients["frozen"][0])),
        ),
        "fine-tuning,\nbatches of 8": (
            ("BatchNorm", number(small[batch][4])),
            ("bn.eval()", number(small[frozen][4])),
            ("frozen", number(small[frozen][4])),
        ),
    }
    axes = figure.subplots()
    place = 0.0
    ticks = []
    for bars in groups.values():
        ticks.append(place + 0.2 * (len(bars) - 1))
        for (name, value), colour in zip(bars, (TODAY, BASELINE, OURS), strict=True):
            bar = axes.barh(place, value, 0.36, color=colour)
            axes.bar_label(bar, [f"{value:.1f}  {name}"], padding=4, fontsize=9)
            place += 0.4
        place += 0.3
    axes.set_yticks(ticks, groups)
    axes.invert_yaxis()
    axes.set_xlim(0, 120)
    axes.set_xticks(range(0, 81, 20))
    axes.spines["bottom"].set_bounds(0, 80)
    axes.set_xlabel("top-1, %")
    axes.grid(visible=False)
    names = {"usual way": TODAY, "best alternative tried": BASELINE, "retrofit": OURS}
    handles = [mpl.patches.Patch(color=colour) for colour in names.values()]
    figure.legend(handles, list(names), loc="outside upper center", ncols=3, frameon=False)


def privacy(figure: Figure) -> None:
    """Top-1 after training with differential privacy, by epsilon."""
    rows = list(csv_rows(RESULTS / "dp.md"))
    names = {
        "Opacus's GroupNorm, norms and last layer": ("Opacus's own fixer", TODAY),
        "frozen statistics, last layer alone": ("last layer alone", BASELINE),
        "ln, norms and last layer": ("retrofit ln", "#79b8ff"),
        "frozen, norms and last layer": ("retrofit frozen", OURS),
    }
    axes = figure.subplots()
    for place, (row, (label, colour)) in enumerate(names.items()):
        cells = {eps: number(top1) for name, eps, top1 in rows if name == row}
        for group, eps in enumerate(("8", "3")):
            bar = axes.bar(
                group + 0.2 * place, cells[eps], 0.18, color=colour, label=None if group else label
            )
            axes.bar_label(bar, fmt="%.1f", fontsize=7)
    axes.set_xticks([0.3, 1.3], ["epsilon 8", "epsilon 3"])
    axes.set_ylabel("test top-1, %")
    axes.axhline(10, color=BASELINE, linewidth=1, linestyle=":")
    axes.grid(visible=False, axis="x")
    legend(figure)


def csv_rows(path: Path) -> list[tuple[str, str, str]]:
    """Return (network, epsilon, top-1) of the rows of the last table of dp.md, which has the most
    pictures.
    """
    lines = path.read_text().split("## ")[-1].splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    return [(row[0].replace("`", ""), row[1], row[5]) for row in cells[1:]]


def batch_size(figure: Figure) -> None:
    """Top-1 against batch size, fine-tuned on 500 pictures."""
    rows = table("evidence.md", "batch 1 ", "## cifar10, 500 training pictures")
    sizes = (1, 2, 8, 32)
    axes = figure.subplots()
    for row, label, style in (
        ("BatchNorm, batch statistics", "BatchNorm", dict(color=TODAY, marker="o")),
        (
            "BatchNorm, then PreciseBN",
            "BatchNorm, then PreciseBN",
            dict(color=TODAY, marker="s", linestyle="--"),
        ),
        (
            "BatchNorm, frozen statistics, affine trained",
            "retrofit frozen",
            dict(color=OURS, marker="o"),
        ),
        ("ln, t to 1", "retrofit ln", dict(color=OURS, marker="^", linestyle="--")),
    ):
        values = [number(rows[row][2 * place]) for place in range(len(sizes))]
        axes.plot(range(len(sizes)), values, label=label, **style)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("images in a batch")
    axes.set_ylabel("test top-1, %")
    axes.set_ylim(0, 75)
    legend(figure)


def strengths(figure: Figure) -> None:
    """Top-1 against strength, before any training, and the plain swap as a flat line."""
    with (RESULTS / "strengths.csv").open() as file:
        rows = list(csv.DictReader(file))
    points = {(row["model"], row["target"], row["strength"]) for row in rows}
    models = sorted(
        model for model, target, t in points if (target, t) == ("bnn", "1")
    )  # those that are complete
    figure.set_figheight(0.8 + 2.4 * len(models))
    for axes, model in zip(
        np.atleast_1d(figure.subplots(len(models), 1, sharex=True)), models, strict=True
    ):
        own = [row for row in rows if row["model"] == model]
        for target, style in STYLES.items():
            curve = [
                (float(row["strength"]), float(row["top1"]))
                for row in own
                if row["target"] == target
            ]
            axes.plot(
                *zip(*curve, strict=True),
                style,
                color=OURS if target != "bnn" else "#8957e5",
                label=target,
            )
        swap = next(float(row["top1"]) for row in own if row["target"] == "ln, plain swap")
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


def by_strength(figure: Figure, function: Callable[[float], Tensor], title: str, x: str) -> None:
    """Draw a function of h at five strengths."""
    axes = figure.subplots()
    ends = mpl.colors.to_rgb(BASELINE), mpl.colors.to_rgb(OURS)
    for t in (0.0, 0.25, 0.5, 0.75, 1.0):
        mix = tuple((1 - t) * a + t * b for a, b in zip(*ends, strict=True))
        axes.plot(H, function(t), color=mix, label=f"t = {t:g}")
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.legend(fontsize=9, frameon=False, handlelength=1)


def proxy(figure: Figure) -> None:
    """What becomes of an activation whose channel rarely passes zero, by its proxy."""
    gamma, beta = 0.5, 1.0
    quantiles = torch.erfinv(torch.linspace(-1, 1, 2003)[1:-1]) * 2**0.5
    of_proxy = torch.relu(gamma * quantiles + beta)
    phi = torch.relu(gamma * H + beta)
    normalized = (phi - of_proxy.mean()) / of_proxy.std()
    title = "φ(y) at t = 0, (φ(y) - E) / √Var at t = 1\nReLU, y = 0.5 n + 1"
    by_strength(figure, lambda t: (1 - t) * phi + t * normalized, title, "normalized value n")


def path(figure: Figure) -> None:
    """The power transform of a layer from t = 0 to 1."""
    title = "ψ(h; 1 + t (λ - 1)), λ = 0.3"
    by_strength(
        figure,
        lambda t: yeo_johnson(H, torch.tensor(1 + t * (0.3 - 1))),
        title,
        "normalized value h",
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
    "usual-way": (usual_way, (5.6, 3.5)),
    "before-training": (before_training, (5.6, 1.8)),
    "strengths": (strengths, (5.2, 5.6)),
    "batch-size": (batch_size, (5.2, 3.6)),
    "privacy": (privacy, (5.2, 3.6)),
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


def record_terminal(args: argparse.Namespace) -> None:
    """Run inspect, convert and evaluate, and write what they print as a picture of a terminal."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
    from rich.text import Text

    weights, photographs, names = (
        os.path.abspath(p) for p in (args.checkpoint, args.data_dir, args.class_map)
    )
    shown = {weights: "efficientnet-lite0.pth", photographs: "photos.tar", names: "classes.txt"}
    lines = (
        "inspect tf_efficientnet_lite0 --to ln",
        f"convert tf_efficientnet_lite0 --to ln --checkpoint {weights} --match order",
        f"evaluate tf_efficientnet_lite0-ln.safetensors --data-dir {photographs} --class-map {names}",
    )
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115  nothing is printed
    with tempfile.TemporaryDirectory() as folder:
        for line in lines:
            command = [sys.executable, "-m", "retrofit", *line.split()]
            environment = {
                **os.environ,
                "FORCE_COLOR": "1",
                "TTY_COMPATIBLE": "0",
                "COLUMNS": "100",
            }
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=True
            )
            text = f"$ retrofit {line}\n{done.stderr}"
            for path, name in shown.items():
                text = re.sub(rf"\S*(?<![\w.-]){re.escape(os.path.basename(path))}", name, text)
            console.print(Text.from_ansi(text))
    for theme, colours in (("light", DEFAULT_TERMINAL_THEME), ("dark", MONOKAI)):
        console.save_svg(
            str(IMAGES / f"terminal-{theme}.svg"), title="retrofit", theme=colours, clear=False
        )


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
        record_terminal(args)
        return
    for name in args.only:
        draw(name)


if __name__ == "__main__":
    main()
