"""An export's report as one HTML page: the file, its check, what layers became, and how to run it on a picture."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from retrofit.export.export_report import ExportReport
from retrofit.export.onnx.model import INPUT
from retrofit.utils.html_page import as_html, html_page, html_table
from retrofit.utils.text import ROOT, plural

_LAYERS = ("#", "layer", "became", "degree or lines", "largest error", "rms error")
_ERRORS = "Errors are of the approximation, as a share of the standard deviation of the layer's output."
_UNSURE = "Judged on {}, which are unlike pictures: export again, with pictures to calibrate on."
_MODES = {1: "L", 3: "RGB"}


def report_page(report: ExportReport) -> str:
    """Return the page."""
    title = report.model or report.output
    if report.target is not None:
        title += f" to {report.target}"
    return html_page(
        f"Export of {title}" + ("" if report.strength is None else f", t = {report.strength:.3g}"),
        [
            *_section("File", _facts(_file(report))),
            *_section("Check: passed", _facts(_check(report))),
            *([f"<p>{as_html(_UNSURE.format(report.judged))}</p>"] if report.guessed else []),
            *_section("Normalization layers", *_layers(report)),
            *_section("Nodes", _nodes(report)),
            *_section("A picture as its input", *_preprocess(report)),
            *_section("Accuracy and latency", *_measure(report)),
        ],
    )


def _section(title: str, *parts: str) -> list[str]:
    return [f"<h2>{title}</h2>", *parts]


def _facts(facts: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{as_html(value)}</dd>" for name, value in facts.items()) + "</dl>"


def _file(report: ExportReport) -> dict[str, str]:
    facts = {"name": report.output, "size": f"{report.bytes / 1e6:.1f} MB ({report.bytes:,} bytes)"}
    if report.model is not None:
        facts["network"] = report.model + ("" if report.target is None else f", converted to {report.target}")
    if report.strength is not None:
        facts["strength"] = f"{report.strength:.3g} (0 is the source, 1 the target)"
    if report.weights is not None:
        kind, origin = report.weights["kind"], report.weights.get("from")
        facts["weights"] = f"{kind} ({origin})" if origin else str(kind)
    facts |= {"fold": report.fold, "precision": report.precision, "opset": str(report.opset)}
    if report.labels is not None:
        facts["labels"] = f"{report.labels:,}, in the file's metadata"
    return facts


def _check(report: ExportReport) -> dict[str, str]:
    parity = report.parity
    facts = {
        "compared on": f"{report.judged}, in batches of {', '.join(map(str, parity.batches))}",
        "largest difference": f"{parity.max_abs_diff:.3g}",
        "scale": f"{parity.scale:.3g} (the largest output)",
        "tolerance": f"{parity.tolerance * parity.scale:.3g} ({parity.tolerance:g} of the scale)",
    }
    if parity.top1_agreement is not None:
        facts["same top-1"] = f"{parity.top1_agreement:.1%} of {report.judged}"
    return facts


def _layers(report: ExportReport) -> list[str]:
    if not report.layers:
        return ["<p>There are none.</p>"]
    kinds = Counter(layer.kind for layer in report.layers)
    rows = [
        (
            str(number),
            layer.name or ROOT,
            layer.form,
            "" if layer.degree is None else str(layer.degree),
            "" if layer.max_error is None else f"{layer.max_error:.2g}",
            "" if layer.rms_error is None else f"{layer.rms_error:.2g}",
        )
        for number, layer in enumerate(report.layers)
    ]
    summary = f"{plural(len(rows), 'layer')}: {', '.join(f'{kind} ({count})' for kind, count in kinds.items())}."
    approximate = any(layer.max_error is not None for layer in report.layers)
    return [f"<p>{as_html(f'{summary} {_ERRORS}' if approximate else summary)}</p>", html_table(_LAYERS, rows)]


def _nodes(report: ExportReport) -> str:
    ordered = sorted(report.nodes.items(), key=lambda item: (-item[1], item[0]))
    return html_table(("count", "operator"), [(f"{count:,}", operator) for operator, count in ordered])


def _preprocess(report: ExportReport) -> list[str]:
    known = report.preprocess
    if known is None:
        return ["<p>It is not known how the network's images are prepared.</p>"]
    facts = {
        "size": " x ".join(map(str, known["input_size"])),
        "mean": _listed(known["mean"]),
        "std": _listed(known["std"]),
        "interpolation": known["interpolation"],
        "crop_pct": f"{known['crop_pct']:.4g}",
        "crop_mode": known["crop_mode"],
    }
    mode = _MODES.get(known["input_size"][0])
    return [_facts(facts), *([] if mode is None else [f"<pre>{escape(_snippet(report, known, mode))}</pre>"])]


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _snippet(report: ExportReport, known: Mapping[str, Any], mode: str) -> str:
    """Return Python that runs the file on a picture."""
    arguments = "".join(
        f"    {name}={tuple(value) if isinstance(value, list) else value!r},\n" for name, value in known.items()
    )
    run = f"session.run(None, {{{INPUT!r}: images.numpy()}})"
    if report.parity.top1_agreement is None:
        last = [f"outputs = {run}", "print([output.shape for output in outputs])"]
    elif report.labels is None:
        last = [f"scores = {run}[0]", "print(scores[0].argmax())"]
    else:
        last = [
            f"scores = {run}[0]",
            "labels = json.loads(session.get_modelmeta().custom_metadata_map['labels'])",
            "print(labels[scores[0].argmax()])",
        ]
    lines = [
        *([] if report.labels is None else ["import json", ""]),
        "import onnxruntime",
        "from PIL import Image",
        "from timm.data import create_transform",
        "",
        f"transform = create_transform(\n{arguments})",
        f"images = transform(Image.open('photo.jpg').convert({mode!r}))[None]",
        f"session = onnxruntime.InferenceSession({report.output!r})",
        *last,
    ]
    return "\n".join(lines)


def _measure(report: ExportReport) -> list[str]:
    file = shlex.quote(report.output)
    commands = [
        f"`retrofit evaluate {file} --data-dir DIR`",
        f"`retrofit bench {file} --against OTHER.onnx --runtime onnxruntime`",
    ]
    shown = "<br>".join(as_html("$ " + command.strip("`")) for command in commands)
    return [
        "<p>Not measured here; these do, on a folder of labelled pictures and beside another exported file:</p>",
        f"<pre>{shown}</pre>",
    ]
