"""Write a diagnosis: PNG figures, results.json and a page that opens from disk, in one folder, whole or not at all."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

from retrofit.diagnose.diagnosis import FEWEST, Diagnosis, Layer, mean_of
from retrofit.diagnose.plots import TEXTS, plots
from retrofit.errors import RetrofitError
from retrofit.utils.files import atomic_folder, ensure_writable
from retrofit.utils.text import printable, shortlist

_RESULTS = "results.json"  # marks a folder as a report of ours, which may be replaced
_STYLE = Path(__file__).with_name("report.css")
_FIGURES = {
    "R²": "r2", "R² before": "r2_before",
    "P1": "power.p1", "P2": "power.p2", "P3": "power.p3", "P4": "power.p4", "balance": "power.balance",
    "linearity": "linearity", "HZ": "henze_zirkler", "AMI": "dependence",
}  # fmt: skip
"""The columns of numbers: a title, and the attribute of a layer."""
_COLLAPSED = 0.5
_LINEAR = 0.95


def check_folder(folder: Path, force: bool) -> None:
    """Make sure that a report may be written to `folder`; a RetrofitError says why not."""
    place = folder.absolute()  # where it will be written: a ~ that the shell left is a name
    if folder.is_symlink() or folder.exists():
        if not force:
            raise RetrofitError(f"{folder} exists; choose another `folder`, or pass `force=True` to replace it")
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / _RESULTS).is_file()):
            raise RetrofitError(f"{folder} is not a report that diagnose wrote and is kept; choose another `folder`")
        place = place.with_name(f".{place.name}.tmp")  # the new one is made beside it
    ensure_writable(place)


def write_report(networks: Mapping[str, Diagnosis], facts: Mapping[str, Any], folder: Path) -> None:
    """Write the report of one or two diagnoses by the name to show; `facts` is what else results.json shall hold.

    A folder that is there is replaced once the new one is whole.
    """
    models = facts.get("models", {})
    title = _as_html("Diagnosis of " + " and ".join(_titled(name, models.get(name, {})) for name in networks))
    page = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE.read_text()}</style></head><body>",
        f"<h1>{title}</h1>",
    ]
    for name, diagnosis in networks.items():
        page.append(f'<p class="soft">{_as_html(_about(name, diagnosis, models.get(name, {})))}</p>')
    page += ["<ul>", *(f"<li>{_as_html(sentence)}</li>" for sentence in sentences(networks)), "</ul>"]
    page.append('<div class="figures">')
    with atomic_folder(folder) as staged:
        for plot in plots(networks):
            png = plot.png(networks)
            (staged / f"{plot.name}.png").write_bytes(png)
            heading, data = _as_html(plot.title), base64.b64encode(png).decode()
            picture = f'<img src="data:image/png;base64,{data}" alt="{heading}">'
            caption = f"<figcaption>{_as_html(TEXTS[plot.name])}</figcaption>"
            page.append(f"<figure><h2>{heading}</h2>{picture}{caption}</figure>")
        page.append("</div>")
        for name, diagnosis in networks.items():
            page.append(f"<h2>{_as_html(name)}</h2>{_table(diagnosis.layers)}")
        results = {**facts, "networks": {name: diagnosis.to_dict() for name, diagnosis in networks.items()}}
        (staged / _RESULTS).write_text(json.dumps(results, indent=1) + "\n")
        (staged / "index.html").write_text("\n".join([*page, "</body></html>"]) + "\n", encoding="utf-8")


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
        columns[title] = ["" if value is None else f"{value:z.3f}" for value in values]
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    head = "".join(f"<th>{_as_html(title)}</th>" for title in filled)
    rows = ("".join(f"<td>{_as_html(cell)}</td>" for cell in row) for row in zip(*filled.values(), strict=True))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _titled(name: str, model: Mapping[str, Any]) -> str:
    """Name a network with its architecture and how far it is converted; its own name says which run it is from."""
    target = f" to {model['target']}" if model.get("target") else ""
    strength = "" if model.get("strength") is None else f", t = {model['strength']:.3g}"
    what = f"{model.get('model', name)}{target}{strength}"
    return name if what == name else f"{name} ({what})"


def _about(name: str, diagnosis: Diagnosis, model: Mapping[str, Any]) -> str:
    weights = model.get("weights") or {}
    whose = f", weights: {weights['kind']}" if weights else ""
    origin = f" ({weights['from']})" if weights.get("from") else ""
    return f"{_titled(name, model)}{whose}{origin}, {diagnosis.images} images"


def sentences(networks: Mapping[str, Diagnosis]) -> list[str]:
    """Put the main figures of one or two diagnoses, by the name to show, into words."""
    return [f"{name}: {text}" for name, diagnosis in networks.items() for text in _findings(diagnosis)]


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    layers = diagnosis.layers
    if (r2 := mean_of(layer.r2 for layer in layers)) is not None:
        worst, furthest = min((layer.r2, layer.name) for layer in layers if layer.r2 is not None)
        before = mean_of(layer.r2_before for layer in layers)
        gained = "" if before is None else f" ({before:.3f} before the transform)"
        yield f"mean R² to normal {r2:.3f}{gained}; furthest from normal: {furthest} ({worst:.3f})"
    collapsed = [layer.name for layer in layers if layer.power.p1 > _COLLAPSED]
    yield (
        f"{len(collapsed)} of {len(layers)} layers have most of their power in a constant (P1 above {_COLLAPSED:g})"
        f"{': ' + collapsed[0] + ' is the first' if collapsed else ''}; P1 of the last layer {layers[-1].power.p1:.2f}"
    )
    if linear := [layer.linearity for layer in layers if layer.linearity is not None]:
        count = sum(linearity > _LINEAR for linearity in linear)
        yield f"{count} of {len(linear)} activations act almost linearly (above {_LINEAR:g})"
    if few := sum(1 for layer in layers if layer.henze_zirkler is None):
        yield (
            f"joint normality and dependence are left out for {few} of {len(layers)} layers: a batch has fewer than "
            f"{FEWEST} values of a channel there, or its channels do not vary"
        )
    if left := diagnosis.unmeasured:
        yield (
            f"{len(left)} normalization layers subtract no mean, are one with their activation or do not hold the "
            f"images in their first dimension, and are not measured ({shortlist(left)})"
        )
    if diagnosis.noise:
        first = diagnosis.noise[0]
        ratio = first.errors[-1] / max(first.errors[0], 1e-30)
        yield (
            f"noise added at {first.source} {'grows' if ratio > 1 else 'shrinks'} on its way: "
            f"relative to the signal it is {ratio:.2f} times as large at {first.layers[-1]}"
        )
    if diagnosis.input_noise:
        clean, noisy = diagnosis.input_noise[0], diagnosis.input_noise[-2]
        if clean.top1 is not None and noisy.top1 is not None:
            yield f"top-1 {clean.top1:.1f}%; {noisy.top1:.1f}% with noise of {noisy.level:g} on the images"
        else:
            yield f"{noisy.agreement:.1f}% of the answers are the same with noise of {noisy.level:g} on the images"
    if (attacked := diagnosis.attack) is not None:
        yield f"top-1 {attacked.top1:.1f}% under {attacked.attack}"
