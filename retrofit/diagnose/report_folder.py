"""Write a diagnosis of one network, or two beside each other: PNG figures, results.json and a page
that opens from disk, in one folder, whole or not at all.
"""

import base64
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrofit.diagnose.diagnosis import FEWEST, Diagnosis, Layer
from retrofit.diagnose.findings import sentences
from retrofit.diagnose.perturbations import INJECTED
from retrofit.errors import RetrofitError
from retrofit.utils.files import atomic_folder, ensure_writable
from retrofit.utils.text import printable, shortlist

# One or two, by the name to show.
Networks = Mapping[str, Diagnosis]

# Marks a folder as a report, which may be replaced.
_RESULTS = "results.json"
_PAGE = "index.html"
_STYLE = Path(__file__).with_name("report.css")
_FIGURES = {
    "R²": "r2", "R² before": "r2_before",
    "P1": "power.p1", "P2": "power.p2", "P3": "power.p3", "P4": "power.p4",
    "balance": "power.balance",
    "linearity": "linearity", "HZ": "henze_zirkler", "AMI": "dependence",
}  # fmt: skip
"""The columns of numbers: a title, and the attribute of a layer."""
# Inches, as wide as a telephone shows at a readable size
_WIDTH = 4.4
_LAYER = "layer (number in the table)"
_RC: dict[str, Any] = {
    **{
        "figure.constrained_layout.use": True,
        "savefig.dpi": 220,
        "axes.grid": True,
        "axes.axisbelow": True,
    },
    **{"font.size": 8, "axes.labelsize": 10, "axes.titlesize": 9, "grid.linewidth": 0.6},
    **dict.fromkeys(("axes.edgecolor", "grid.color"), "#d8dee4"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#1f2328"),
}
_COLOURS = ("#2f81f7", "#e2701a")
_SHARES = ("#0969da", "#54aeff", "#d1570a", "#fb8f44")
_SHARE_NAMES = (
    "P1 data set",
    "P2 between images, mean",
    "P3 within images",
    "P4 between images, spread",
)

TEXTS = {
    "gaussianity": "Mean R² of the line of best fit of the Q-Q plots of each layer's normalized "
    "features: 1 is "
    "normal. Dotted: the same layers before their power transform (Eftekhari & Papyan 2025, "
    "figure 6).",
    "qq": "The channel with the median R² at four depths. Points on the line are normal; bends "
    "at the ends are tails "
    "heavier or lighter than normal ones (figure 5).",
    "power": "Shares of each layer's power. P1 growing with depth is collapse: channels that are "
    "nearly constant "
    "over the data set, on which the activation acts almost linearly (Labatie et al. 2021, "
    "figure 2).",
    "channels": "Above: 1 where all channels have equal power, near 0 where a few have all of "
    "it. Below: the share "
    "of the variance of the activation's output that a straight line explains; near 1 the "
    "nonlinearity is not used.",
    "noise": f"Gaussian noise of {INJECTED:g} of a channel's spread is added at one layer, where "
    f"a curve starts. The "
    "curve is the relative error that is left at that layer and those called after it. Falling "
    "curves: the network "
    "attenuates noise (appendix A.1 follows its mean square). A layer has no mark if the noise "
    "does not reach it, or "
    "if its output does not vary.",
    "independence": "Above: mean Henze-Zirkler statistic, smaller is closer to jointly normal. "
    "Below: mean adjusted "
    f"mutual information, 0 is independent (appendix A.4). Layers with fewer than {FEWEST} "
    f"values of a channel in a "
    "batch are left out: their figures would be chance.",
    "lambda": "Lambda over each layer's channels as used in evaluation: median, 25 to 75% "
    "(dark), 5 to 95% (light). "
    "At 1 the transform is the identity; below 1 it pulls in a right tail, above 1 a left one.",
    "input-noise": "Top-1 accuracy (agreement with the clean answer, where there are no labels) "
    "under Gaussian noise "
    "on the normalized image (table 4).",
}
"""What each figure shows, and how to read it."""


class Plot(NamedTuple):
    """A figure of a report."""

    # Of the file, without ending.
    name: str
    title: str
    draw: Callable[[Figure, Networks], None]
    # Inches.
    height: float

    def png(self, networks: Networks) -> bytes:
        """Return the figure as PNG."""
        stream = io.BytesIO()
        with rc_context(_RC):
            figure = Figure(figsize=(_WIDTH, self.height))
            self.draw(figure, networks)
            handles, labels = figure.axes[0].get_legend_handles_labels()
            # Below the figure, off the data.
            if labels:
                columns = 1
                if max(map(len, labels)) < 28:
                    columns = 2
                figure.legend(
                    handles, labels, loc="outside lower center", ncols=columns, fontsize=8
                )
            figure.savefig(stream, format="png", metadata={"Software": None})
        return stream.getvalue()


def plots(networks: Networks) -> list[Plot]:
    """Return the figures in which these networks, one or two diagnoses by the name to show, have
    something to show.
    """
    count = len(networks)
    layers = [layer for diagnosis in networks.values() for layer in diagnosis.layers]
    filled = {
        "independence": any(layer.henze_zirkler is not None for layer in layers),
        "lambda": any(layer.lmbda for layer in layers),
        "input-noise": any(diagnosis.input_noise for diagnosis in networks.values()),
    }
    every = [
        Plot("gaussianity", "Gaussianity by layer", _gaussianity, 3.0),
        Plot("qq", "Q-Q plots", _qq, 4.2 * count),
        Plot("power", "Where the power lies", _power, 0.8 + 2.4 * count),
        Plot("channels", "Channel balance, and linearity of the activation", _channels, 5.0),
        Plot("noise", "Noise through the layers", _noise, 3.6),
        Plot("independence", "Joint normality and dependence of channel pairs", _independence, 5.0),
        Plot("lambda", "The transform's parameter", _lambda, 3.0),
        Plot("input-noise", "Noise on the images", _input_noise, 3.0),
    ]
    return [plot for plot in every if filled.get(plot.name, True)]


def _coloured(networks: Networks) -> Iterator[tuple[str, Diagnosis, str]]:
    for (name, diagnosis), colour in zip(networks.items(), _COLOURS, strict=False):
        yield name, diagnosis, colour


def _lines(axes: Axes, networks: Networks, attribute: str, suffix: str = "", **style: Any) -> None:
    drawn = style or {"marker": "o", "markersize": 3}
    for name, diagnosis, colour in _coloured(networks):
        values = map(attrgetter(attribute), diagnosis.layers)
        points = {number: value for number, value in enumerate(values) if value is not None}
        if points:
            label = name + suffix
            axes.plot(list(points), list(points.values()), color=colour, label=label, **drawn)
    _by_layer(axes)
    most_layers = max(len(diagnosis.layers) for diagnosis in networks.values())
    axes.set_xlim(-0.5, most_layers - 0.5)


def _gaussianity(figure: Figure, networks: Networks) -> None:
    axes = figure.subplots()
    _lines(axes, networks, "r2")
    _lines(axes, networks, "r2_before", ", before the transform", linestyle=":")
    axes.set(ylabel="mean R² of the Q-Q plots", ylim=(None, 1))


def _qq(figure: Figure, networks: Networks) -> None:
    grid = figure.subplots(2 * len(networks), 2, squeeze=False, sharex=True, sharey=True)
    panels = grid.reshape(len(networks), 4)
    for row, (name, diagnosis, colour) in zip(panels, _coloured(networks), strict=True):
        layers = enumerate(diagnosis.layers)
        drawn = [(number, layer) for number, layer in layers if layer.plot is not None]
        for column, axes in enumerate(row if drawn else ()):
            number, layer = drawn[round(column * (len(drawn) - 1) / 3)]
            _qq_panel(axes, number, layer, colour)
        row[0].set_ylabel(name, fontsize=8)
    figure.supxlabel("normal quantiles")


def _qq_panel(axes: Axes, number: int, layer: Layer, colour: str) -> None:
    plot = layer.plot
    assert plot is not None
    axes.plot([-3.5, 3.5], [-3.5, 3.5], linewidth=1, color="#8b949e")
    axes.plot(plot.theoretical, plot.ordered, ".", markersize=3, color=colour)
    title = f"{number}: {printable(layer.name, 20)}\nR² {plot.r2:.3f}"
    axes.set_title(title, fontsize=8)
    axes.set(xlim=(-3.5, 3.5), ylim=(-5, 5))


def _power(figure: Figure, networks: Networks) -> None:
    column = figure.subplots(len(networks), 1, squeeze=False)[:, 0]
    for axes, (name, diagnosis) in zip(column, networks.items(), strict=True):
        shares = [
            [getattr(layer.power, key) for layer in diagnosis.layers]
            for key in ("p1", "p2", "p3", "p4")
        ]
        axes.stackplot(range(len(diagnosis.layers)), shares, colors=_SHARES, labels=_SHARE_NAMES)
        _by_layer(axes)
        axes.margins(x=0)
        axes.set(title=name, ylim=(0, 1), ylabel="share of power")


def _panels(figure: Figure, networks: Networks, titles: Mapping[str, str], **settings: Any) -> None:
    """Draw figures of the layers, by attribute and title, one below the other."""
    column = figure.subplots(len(titles), 1)
    for axes, (attribute, title) in zip(column, titles.items(), strict=True):
        _lines(axes, networks, attribute)
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
        places = {layer.name: number for number, layer in enumerate(diagnosis.layers)}
        for number, followed in enumerate(diagnosis.noise):
            points = [
                (places[layer], error)
                for layer, error in zip(followed.layers, followed.errors, strict=True)
                if error > 0
            ]
            (line,) = axes.plot(
                *zip(*points, strict=True), ".-", color=colour, alpha=1 - 0.18 * number
            )
            # The legend lists each network once.
            if number == 0:
                line.set_label(name)
    _by_layer(axes)
    axes.set(ylabel="relative error", yscale="log")


def _lambda(figure: Figure, networks: Networks) -> None:
    axes = figure.subplots()
    for name, diagnosis, colour in _coloured(networks):
        points = {i: layer.lmbda for i, layer in enumerate(diagnosis.layers) if layer.lmbda}
        if points:
            x = list(points)
            _, low, first, middle, third, high, _ = zip(*points.values(), strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.fill_between(x, first, third, color=colour, alpha=0.35, linewidth=0)
            axes.plot(x, middle, color=colour, label=name)
    axes.axhline(1, linewidth=1, color="#8b949e")
    _by_layer(axes)
    axes.set_ylabel("lambda")


def _input_noise(figure: Figure, networks: Networks) -> None:
    axes = figure.subplots()
    labelled = all(d.input_noise and d.input_noise[0].top1 is not None for d in networks.values())
    for name, diagnosis, colour in _coloured(networks):
        levels = [entry.level for entry in diagnosis.input_noise]
        shares: list[Any] = [
            entry.top1 if labelled else entry.agreement for entry in diagnosis.input_noise
        ]
        axes.plot(levels, shares, "o-", color=colour, label=name)
    ylabel = "same answer, %"
    if labelled:
        ylabel = "top-1, %"
    axes.set(xlabel="standard deviation of the noise", ylabel=ylabel, ylim=(0, 102))


def _by_layer(axes: Axes) -> None:
    axes.set_xlabel(_LAYER)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def check_folder(folder: Path, force: bool) -> None:
    """Make sure that a report may be written to `folder`; a RetrofitError says why not."""
    # Where it will be written: a ~ that the shell left is a name
    place = folder.absolute()
    if folder.is_symlink() or folder.exists():
        if not force:
            raise RetrofitError(
                f"{folder} exists; choose another `folder`, or pass `force=True` to replace it"
            )
        _refuse_what_others_wrote(folder)
        # The new one is made beside it.
        place = place.with_name(f".{place.name}.tmp")
    ensure_writable(place)


def _refuse_what_others_wrote(folder: Path) -> None:
    """Refuse a folder that is no report, or holds more than one: all that is in it is replaced."""
    if not folder.is_dir() or (any(folder.iterdir()) and not _is_report(folder)):
        raise RetrofitError(
            f"{folder} is not a report that diagnose wrote and is kept; choose another `folder`"
        )
    written = {_RESULTS, _PAGE, *(f"{name}.png" for name in TEXTS)}
    others = sorted(path.name for path in folder.iterdir() if path.name not in written)
    if others:
        raise RetrofitError(
            f"{folder} holds what diagnose did not write ({shortlist(others)}) and is kept; "
            "move that elsewhere, or choose another `folder`"
        )


def _is_report(folder: Path) -> bool:
    try:
        results = json.loads((folder / _RESULTS).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(results, dict) and isinstance(results.get("networks"), dict)


def write_report(networks: Networks, facts: Mapping[str, Any], folder: Path) -> None:
    """Write the report of one or two diagnoses by the name to show; `facts` is what else
    results.json shall hold.

    A folder that is there is replaced once the new one is whole.
    """
    models = facts.get("models", {})
    titles = [_titled(name, models.get(name, {})) for name in networks]
    title = _as_html("Diagnosis of " + " and ".join(titles))
    abouts = [_about(name, networks[name], models.get(name, {})) for name in networks]
    with atomic_folder(folder) as staged:
        figures = []
        for plot in plots(networks):
            png = plot.png(networks)
            (staged / f"{plot.name}.png").write_bytes(png)
            figures.append(_as_figure(plot, png))
        page = [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE.read_text()}</style></head><body>",
            f"<h1>{title}</h1>",
            *(f'<p class="soft">{_as_html(about)}</p>' for about in abouts),
            "<ul>",
            *(f"<li>{_as_html(sentence)}</li>" for sentence in sentences(networks)),
            "</ul>",
            '<div class="figures">',
            *figures,
            "</div>",
        ]
        for name, diagnosis in networks.items():
            page.append(f"<h2>{_as_html(name)}</h2>{_table(diagnosis.layers)}")
        page.append("</body></html>")
        (staged / _PAGE).write_text("\n".join(page) + "\n", encoding="utf-8")
        results = {name: diagnosis.to_dict() for name, diagnosis in networks.items()}
        text = json.dumps({**facts, "networks": results}, indent=1)
        (staged / _RESULTS).write_text(text + "\n")
        # Measuring takes long, and something may have come into the folder meanwhile.
        if folder.exists():
            _refuse_what_others_wrote(folder)


def _as_figure(plot: Plot, png: bytes) -> str:
    """Return a figure, its heading and its caption as HTML that holds the picture itself."""
    heading = _as_html(plot.title)
    data = base64.b64encode(png).decode()
    picture = f'<img src="data:image/png;base64,{data}" alt="{heading}">'
    caption = f"<figcaption>{_as_html(TEXTS[plot.name])}</figcaption>"
    return f"<figure><h2>{heading}</h2>{picture}{caption}</figure>"


def _as_html(text: object) -> str:
    """Return a text on one line, as HTML that shows it and does nothing else."""
    return escape(printable(text))


def _table(layers: Sequence[Layer]) -> str:
    """Return the figures of the layers as an HTML table; a column without entries is left out."""
    columns = {
        "#": [str(number) for number in range(len(layers))],
        "layer": [layer.name or "(root)" for layer in layers],
        "class": [layer.kind for layer in layers],
    }
    for title, attribute in _FIGURES.items():
        values = map(attrgetter(attribute), layers)
        columns[title] = [_figure(value) for value in values]
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    head = _row("th", filled)
    body = "".join(_row("td", cells) for cells in zip(*filled.values(), strict=True))
    table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:z.3f}"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_as_html(cell)}</{tag}>" for cell in cells) + "</tr>"


def _titled(name: str, model: Mapping[str, Any]) -> str:
    """Name a network with its architecture and how far it is converted; its own name says which run
    it is from.
    """
    title = str(model.get("model", name))
    if model.get("target"):
        title += f" to {model['target']}"
    if model.get("strength") is not None:
        title += f", t = {model['strength']:.3g}"
    if title == name:
        return name
    return f"{name} ({title})"


def _about(name: str, diagnosis: Diagnosis, model: Mapping[str, Any]) -> str:
    text = _titled(name, model)
    weights = model.get("weights")
    if weights:
        text += f", weights: {weights['kind']}"
        if weights.get("from"):
            text += f" ({weights['from']})"
    return f"{text}, {diagnosis.images} images"
