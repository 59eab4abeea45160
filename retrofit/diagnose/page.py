"""One HTML page that opens from disk: figures, a table, and what to read from them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from retrofit.diagnose.diagnosis import Diagnosis, Layer
from retrofit.diagnose.plots import Plot
from retrofit.utils.html_page import as_html, html_page, html_table

_COLUMNS = ("#", "layer", "class", "R²", "R² before", "P1", "P2", "P3", "P4", "balance", "linearity", "HZ", "AMI")


def page(
    networks: Mapping[str, Diagnosis],
    pictures: Mapping[Plot, bytes],
    sentences: Sequence[str],
    title: str,
    about: Sequence[str],
) -> str:
    """Return the page.

    Args:
        networks: One or two diagnoses by the name to show.
        pictures: The figures, as PNG.
        sentences: What the figures say in words.
        title: Heading.
        about: Which networks these are, a line each.
    """
    parts = [
        *(f'<p class="soft">{as_html(line)}</p>' for line in about),
        "<ul>",
        *(f"<li>{as_html(sentence)}</li>" for sentence in sentences),
        '</ul><div class="figures">',
        *(_figure(plot, png) for plot, png in pictures.items()),
        "</div>",
        *(_table(name, diagnosis) for name, diagnosis in networks.items()),
    ]
    return html_page(title, parts)


def _figure(plot: Plot, png: bytes) -> str:
    title, text, data = as_html(plot.title), as_html(plot.text), base64.b64encode(png).decode()
    return (
        f'<figure><h2>{title}</h2><img src="data:image/png;base64,{data}" alt="{title}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _table(name: str, diagnosis: Diagnosis) -> str:
    rows = [[str(number), *_row(layer)] for number, layer in enumerate(diagnosis.layers)]
    return f"<h2>{as_html(name)}</h2>{html_table(_COLUMNS, rows)}"


def _row(layer: Layer) -> list[str]:
    power = layer.power
    figures: list[Any] = [layer.r2, layer.r2_before, power.p1, power.p2, power.p3, power.p4, power.balance]
    figures += [layer.linearity, layer.henze_zirkler, layer.dependence]
    return [layer.name or "(root)", layer.kind, *("" if v is None else f"{v:z.3f}" for v in figures)]
