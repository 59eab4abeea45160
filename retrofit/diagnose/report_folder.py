"""Write a diagnosis: PNG figures, results.json and a page that opens from disk, in one folder, whole or not at all."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrofit.diagnose.diagnosis import FEWEST, Diagnosis, Layer, mean_of
from retrofit.diagnose.plots import plots
from retrofit.errors import RetrofitError
from retrofit.utils.files import atomic_folder, ensure_writable
from retrofit.utils.html_page import as_html, html_page, html_table
from retrofit.utils.text import shortlist

_RESULTS = "results.json"  # marks a folder as a report of ours, which may be replaced
_COLUMNS = ("#", "layer", "class", "R²", "R² before", "P1", "P2", "P3", "P4", "balance", "linearity", "HZ", "AMI")
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
    title = "Diagnosis of " + " and ".join(_titled(name, models.get(name, {})) for name in networks)
    about = (_about(name, diagnosis, models.get(name, {})) for name, diagnosis in networks.items())
    parts = [f'<p class="soft">{as_html(line)}</p>' for line in about]
    parts += ["<ul>", *(f"<li>{as_html(sentence)}</li>" for sentence in sentences(networks)), "</ul>"]
    parts += ['<div class="figures">']
    with atomic_folder(folder) as staged:
        for plot in plots(networks):
            png = plot.png(networks)
            (staged / f"{plot.name}.png").write_bytes(png)
            heading, data = as_html(plot.title), base64.b64encode(png).decode()
            picture = f'<img src="data:image/png;base64,{data}" alt="{heading}">'
            caption = f"<figcaption>{as_html(plot.text)}</figcaption>"
            parts.append(f"<figure><h2>{heading}</h2>{picture}{caption}</figure>")
        parts.append("</div>")
        for name, diagnosis in networks.items():
            rows = [[str(number), *_row(layer)] for number, layer in enumerate(diagnosis.layers)]
            parts.append(f"<h2>{as_html(name)}</h2>{html_table(_COLUMNS, rows)}")
        results = {**facts, "networks": {name: diagnosis.to_dict() for name, diagnosis in networks.items()}}
        (staged / _RESULTS).write_text(json.dumps(results, indent=1) + "\n")
        (staged / "index.html").write_text(html_page(title, parts), encoding="utf-8")


def _row(layer: Layer) -> list[str]:
    power = layer.power
    figures: list[Any] = [layer.r2, layer.r2_before, power.p1, power.p2, power.p3, power.p4, power.balance]
    figures += [layer.linearity, layer.henze_zirkler, layer.dependence]
    return [layer.name or "(root)", layer.kind, *("" if v is None else f"{v:z.3f}" for v in figures)]


def _titled(name: str, model: Mapping[str, Any]) -> str:
    """Name a network with its architecture and how far it is converted; its own name says which run it is from."""
    target = f" to {model['target']}" if model.get("target") else ""
    strength = "" if model.get("strength") is None else f", t = {model['strength']:.3g}"
    what = f"{model.get('model', name)}{target}{strength}"
    return name if what == name else f"{name} ({what})"


def _about(name: str, diagnosis: Diagnosis, model: Mapping[str, Any]) -> str:
    """Say which network this is: how far it is converted, whose weights it has, on how many images it was measured."""
    weights = model.get("weights") or {}
    whose = f", weights: {weights['kind']}" if weights else ""
    origin = f" ({weights['from']})" if weights.get("from") else ""
    return f"{_titled(name, model)}{whose}{origin}, {diagnosis.images} images"


def sentences(networks: Mapping[str, Diagnosis]) -> list[str]:
    """Put the main figures of one or two diagnoses, by the name to show, into words."""
    return [f"{name}: {text}" for name, diagnosis in networks.items() for text in _findings(diagnosis)]


def _findings(diagnosis: Diagnosis) -> list[str]:
    layers = diagnosis.layers
    texts = []
    if (r2 := mean_of(layer.r2 for layer in layers)) is not None:
        worst = min((layer for layer in layers if layer.r2 is not None), key=lambda layer: layer.r2 or 0.0)
        before = mean_of(layer.r2_before for layer in layers)
        gained = "" if before is None else f" ({before:.3f} before the transform)"
        texts.append(f"mean R² to normal {r2:.3f}{gained}; furthest from normal: {worst.name} ({worst.r2:.3f})")
    collapsed = [layer.name for layer in layers if layer.power.p1 > _COLLAPSED]
    deepest = layers[-1]
    texts.append(
        f"{len(collapsed)} of {len(layers)} layers have most of their power in a constant (P1 above {_COLLAPSED:g})"
        f"{': ' + collapsed[0] + ' is the first' if collapsed else ''}; P1 of the last layer {deepest.power.p1:.2f}"
    )
    linear = [layer for layer in layers if layer.linearity is not None]
    if linear:
        count = sum(1 for layer in linear if (layer.linearity or 0.0) > _LINEAR)
        texts.append(f"{count} of {len(linear)} activations act almost linearly (above {_LINEAR:g})")
    if few := sum(1 for layer in layers if layer.henze_zirkler is None):
        texts.append(
            f"joint normality and dependence are left out for {few} of {len(layers)} layers: a batch has fewer than "
            f"{FEWEST} values of a channel there, or its channels do not vary"
        )
    if left := diagnosis.unmeasured:
        texts.append(
            f"{len(left)} normalization layers subtract no mean, are one with their activation or do not hold the "
            f"images in their first dimension, and are not measured ({shortlist(left)})"
        )
    if diagnosis.noise:
        first = diagnosis.noise[0]
        ratio = first.errors[-1] / max(first.errors[0], 1e-30)
        texts.append(
            f"noise added at {first.source} {'grows' if ratio > 1 else 'shrinks'} on its way: "
            f"relative to the signal it is {ratio:.2f} times as large at {first.layers[-1]}"
        )
    if diagnosis.input_noise:
        clean, noisy = diagnosis.input_noise[0], diagnosis.input_noise[-2]
        if clean.top1 is not None and noisy.top1 is not None:
            texts.append(f"top-1 {clean.top1:.1f}%; {noisy.top1:.1f}% with noise of {noisy.level:g} on the images")
        else:
            texts.append(
                f"{noisy.agreement:.1f}% of the answers stay the same with noise of {noisy.level:g} on the images"
            )
    if (attacked := diagnosis.under_attack) is not None:
        texts.append(f"top-1 {attacked.top1:.1f}% under {attacked.attack}")
    return texts
