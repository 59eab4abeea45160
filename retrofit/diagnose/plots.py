"""Figures of a diagnosis of one network, or of two beside each other."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrofit.diagnose.diagnosis import FEWEST, Diagnosis, Layer
from retrofit.diagnose.perturbations import INJECTED
from retrofit.utils.text import printable

# One or two, by the name to show.
Networks = Mapping[str, Diagnosis]

# Inches, as wide as a telephone shows at a readable size
_WIDTH = 4.4
_LAYER = "layer (number in the table)"
_GREY = "#d8dee4"
_LINE = "#8b949e"
_INK = "#1f2328"
_RC: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "savefig.dpi": 220,
    "font.size": 8,
    "text.color": _INK,
    "axes.axisbelow": True,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.labelsize": 10,
    "axes.titlesize": 9,
    "grid.color": _GREY,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_DOTS: dict[str, Any] = {"marker": "o", "markersize": 3}
_COLOURS = ("#2f81f7", "#e2701a")
_SHARES = ("#0969da", "#54aeff", "#d1570a", "#fb8f44")
_SHARE_NAMES = (
    "P1 data set",
    "P2 between images, mean",
    "P3 within images",
    "P4 between images, spread",
)


class Plot(NamedTuple):
    """A figure of a report."""

    # Of the file, without ending.
    name: str
    title: str
    # What it shows, and how to read it.
    text: str
    draw: Callable[[Figure, Networks], None]
    # Inches, and how many more for each network.
    height: float
    height_each: float = 0.0

    def png(self, networks: Networks) -> bytes:
        """Return the figure as PNG."""
        stream = io.BytesIO()
        with rc_context(_RC):
            height = self.height + self.height_each * len(networks)
            figure = Figure(figsize=(_WIDTH, height))
            self.draw(figure, networks)
            handles, labels = figure.axes[0].get_legend_handles_labels()
            # Below the figure, off the data.
            if labels:
                figure.legend(handles, labels, loc="outside lower center", fontsize=8)
            figure.savefig(stream, format="png", metadata={"Software": None})
        return stream.getvalue()


def plots(networks: Networks) -> list[Plot]:
    """Return the figures in which these networks, one or two diagnoses by the name to show, have
    something to show.
    """
    layers = [layer for diagnosis in networks.values() for layer in diagnosis.layers]
    filled = {
        "independence": any(layer.henze_zirkler is not None for layer in layers),
        "lambda": any(layer.lmbda for layer in layers),
        "input-noise": any(diagnosis.input_noise for diagnosis in networks.values()),
    }
    return [plot for plot in PLOTS if filled.get(plot.name, True)]


def _coloured(networks: Networks) -> Iterator[tuple[str, Diagnosis, str]]:
    for (name, diagnosis), colour in zip(networks.items(), _COLOURS, strict=False):
        yield name, diagnosis, colour


def _lines(axes: Axes, networks: Networks, attribute: str, suffix: str = "", **style: Any) -> None:
    """Draw an attribute of the layers over their numbers, a line for each network."""
    for name, diagnosis, colour in _coloured(networks):
        points = _points(diagnosis.layers, attribute)
        if points:
            numbers, values = zip(*points, strict=True)
            axes.plot(
                numbers,
                values,
                color=colour,
                label=name + suffix,
                **style,
            )
    most_layers = max(len(diagnosis.layers) for diagnosis in networks.values())
    axes.set_xlim(-0.5, most_layers - 0.5)
    _by_layer(axes)


def _points(layers: Iterable[Layer], attribute: str) -> list[tuple[int, Any]]:
    """Return (number, value) of the layers that have a value."""
    values = map(attrgetter(attribute), layers)
    return [(number, value) for number, value in enumerate(values) if value is not None]


def _gaussianity(figure: Figure, networks: Networks) -> None:
    axes = figure.subplots()
    _lines(axes, networks, "r2", **_DOTS)
    _lines(axes, networks, "r2_before", ", before the transform", linestyle=":")
    axes.set(ylabel="mean R² of the Q-Q plots", ylim=(None, 1))


def _qq(figure: Figure, networks: Networks) -> None:
    count = len(networks)
    grid = figure.subplots(
        2 * count,
        2,
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    panels = grid.reshape(count, 4)
    for row, (name, diagnosis, colour) in zip(panels, _coloured(networks), strict=True):
        row[0].set_ylabel(name, fontsize=8)
        for axes, (number, layer) in zip(row, _four_depths(diagnosis.layers), strict=False):
            _qq_panel(axes, number, layer, colour)
    figure.supxlabel("normal quantiles")


def _four_depths(layers: Sequence[Layer]) -> list[tuple[int, Layer]]:
    """Return four layers that have a Q-Q plot, evenly spread, with their numbers."""
    plotted = [(number, layer) for number, layer in enumerate(layers) if layer.plot is not None]
    if not plotted:
        return []
    ranks = np.linspace(0, len(plotted) - 1, 4).round().astype(int)
    return [plotted[rank] for rank in ranks]


def _qq_panel(axes: Axes, number: int, layer: Layer, colour: str) -> None:
    plot = layer.plot
    assert plot is not None
    axes.axline((0, 0), slope=1, linewidth=1, color=_LINE)
    axes.plot(
        plot.theoretical,
        plot.ordered,
        ".",
        markersize=3,
        color=colour,
    )
    title = f"{number}: {printable(layer.name, 20)}\nR² {plot.r2:.3f}"
    axes.set_title(title, fontsize=8)
    axes.set(xlim=(-3.5, 3.5), ylim=(-5, 5))


def _power(figure: Figure, networks: Networks) -> None:
    grid = figure.subplots(len(networks), 1, squeeze=False)
    column = grid[:, 0]
    for axes, (name, diagnosis) in zip(column, networks.items(), strict=True):
        layers = diagnosis.layers
        numbers = range(len(layers))
        # P1 to P4, without the balance
        powers = [astuple(layer.power)[:4] for layer in layers]
        shares = np.transpose(powers)
        axes.stackplot(
            numbers,
            shares,
            colors=_SHARES,
            labels=_SHARE_NAMES,
        )
        axes.margins(x=0)
        axes.set(title=name, ylim=(0, 1), ylabel="share of power")
        _by_layer(axes)


def _panels(figure: Figure, networks: Networks, titles: Mapping[str, str], **settings: Any) -> None:
    """Draw figures of the layers, by attribute and title, one below the other."""
    column = figure.subplots(len(titles), 1)
    for axes, (attribute, title) in zip(column, titles.items(), strict=True):
        _lines(axes, networks, attribute, **_DOTS)
        axes.set(title=title, **settings)


_channels = partial(
    _panels,
    titles={"power.balance": "channel balance", "linearity": "linearity of the activation"},
    ylim=(0, 1.02),
)
_independence = partial(
    _panels,
    titles={
        "henze_zirkler": "Henze-Zirkler statistic",
        "dependence": "adjusted mutual information",
    },
)


def _noise(figure: Figure, networks: Networks) -> None:
    axes = figure.subplots()
    for name, diagnosis, colour in _coloured(networks):
        numbers = {layer.name: number for number, layer in enumerate(diagnosis.layers)}
        # The legend lists each network once.
        label: str | None = name
        for rank, noise in enumerate(diagnosis.noise):
            reached = [numbers[layer] for layer in noise.layers]
            alpha = 1 - 0.18 * rank
            axes.plot(
                reached,
                noise.errors,
                ".-",
                color=colour,
                alpha=alpha,
                label=label,
            )
            label = None
    _by_layer(axes)
    axes.set_ylabel("relative error")
    # There is no logarithm of 0.
    axes.set_yscale("log", nonpositive="mask")


def _lambda(figure: Figure, networks: Networks) -> None:
    axes = figure.subplots()
    for name, diagnosis, colour in _coloured(networks):
        points = _points(diagnosis.layers, "lmbda")
        if points:
            numbers, quantiles = zip(*points, strict=True)
            _, low, first, middle, third, high, _ = zip(*quantiles, strict=True)
            axes.fill_between(numbers, low, high, color=colour, alpha=0.2)
            axes.fill_between(numbers, first, third, color=colour, alpha=0.35)
            axes.plot(numbers, middle, color=colour, label=name)
    axes.axhline(1, linewidth=1, color=_LINE)
    _by_layer(axes)
    axes.set_ylabel("lambda")


def _input_noise(figure: Figure, networks: Networks) -> None:
    axes = figure.subplots()
    attribute = "top1"
    ylabel = "top-1, %"
    every = [entry for diagnosis in networks.values() for entry in diagnosis.input_noise]
    if any(entry.top1 is None for entry in every):
        attribute = "agreement"
        ylabel = "same answer, %"
    for name, diagnosis, colour in _coloured(networks):
        levels = [entry.level for entry in diagnosis.input_noise]
        shares = [getattr(entry, attribute) for entry in diagnosis.input_noise]
        axes.plot(levels, shares, "o-", color=colour, label=name)
    axes.set(xlabel="standard deviation of the noise", ylabel=ylabel, ylim=(0, 102))


def _by_layer(axes: Axes) -> None:
    axes.set_xlabel(_LAYER)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


PLOTS = (
    Plot(
        "gaussianity",
        "Gaussianity by layer",
        "Mean R² of the line of best fit of the Q-Q plots of each layer's normalized "
        "features: 1 is normal. Dotted: the same layers before their power transform "
        "(Eftekhari & Papyan 2025, figure 6).",
        _gaussianity,
        3.0,
    ),
    Plot(
        "qq",
        "Q-Q plots",
        "The channel with the median R² at four depths. Points on the line are normal; "
        "bends at the ends are tails heavier or lighter than normal ones (figure 5).",
        _qq,
        0.0,
        4.2,
    ),
    Plot(
        "power",
        "Where the power lies",
        "Shares of each layer's power. P1 growing with depth is collapse: channels that"
        " are nearly constant over the data set, on which the activation acts almost "
        "linearly (Labatie et al. 2021, figure 2).",
        _power,
        0.8,
        2.4,
    ),
    Plot(
        "channels",
        "Channel balance, and linearity of the activation",
        "Above: 1 where all channels have equal power, near 0 where a few have all of "
        "it. Below: the share of the variance of the activation's output that a "
        "straight line explains; near 1 the nonlinearity is not used.",
        _channels,
        5.0,
    ),
    Plot(
        "noise",
        "Noise through the layers",
        f"Gaussian noise of {INJECTED:g} of a channel's spread is added at one layer, "
        "where a curve starts. The curve is the relative error that is left at that "
        "layer and those called after it. Falling curves: the network attenuates noise "
        "(appendix A.1 follows its mean square). A layer has no mark if the noise does "
        "not reach it, or if its output does not vary.",
        _noise,
        3.6,
    ),
    Plot(
        "independence",
        "Joint normality and dependence of channel pairs",
        "Above: mean Henze-Zirkler statistic, smaller is closer to jointly normal. "
        "Below: mean adjusted mutual information, 0 is independent (appendix A.4). "
        f"Layers with fewer than {FEWEST} values of a channel in a batch are left out: "
        "their figures would be chance.",
        _independence,
        5.0,
    ),
    Plot(
        "lambda",
        "The transform's parameter",
        "Lambda over each layer's channels as used in evaluation: median, 25 to 75% "
        "(dark), 5 to 95% (light). At 1 the transform is the identity; below 1 it pulls"
        " in a right tail, above 1 a left one.",
        _lambda,
        3.0,
    ),
    Plot(
        "input-noise",
        "Noise on the images",
        "Top-1 accuracy (agreement with the clean answer, where there are no labels) "
        "under Gaussian noise on the normalized image (table 4).",
        _input_noise,
        3.0,
    ),
)
"""Every figure of a report."""
