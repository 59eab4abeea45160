"""One HTML page that opens from disk: figures, a table, and what to read from them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from retrofit.diagnose.diagnosis import Diagnosis, Layer
from retrofit.diagnose.plots import Plot

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --soft: #59636e; --line: #d8dee4; --panel: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1; --line: #30363d; --panel: #151b23 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .5rem 0 0 } h2 { font-size: 1.1rem; margin: 0 0 .25rem }
p { margin: .25rem 0 .75rem } .soft { color: var(--soft) }
.figures { columns: 2 480px; column-gap: 1.5rem }
figure { margin: 0 0 1.5rem; break-inside: avoid } figure img { width: 100%; height: auto; display: block }
figcaption { color: var(--soft); font-size: .875rem; margin-top: .25rem }
ul { padding-left: 1.2rem } .wide { overflow-x: auto; margin: .5rem 0 1rem } .figures ~ h2 { margin-top: 1.5rem }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th:nth-child(2), td:nth-child(2), th:nth-child(3), td:nth-child(3) { text-align: left }
.hint { display: none } @media (max-width: 700px) { .hint { display: block } }
thead th { background: var(--panel); vertical-align: bottom }
"""

_COLUMNS = ("#", "layer", "class", "R²", "R² before", "P1", "P2", "P3", "P4", "balance", "linearity", "HZ", "AMI")


def page(
    networks: Mapping[str, Diagnosis], plots: Sequence[Plot], sentences: Sequence[str], title: str, about: Sequence[str]
) -> str:
    """Return the page.

    Args:
        networks: One or two diagnoses by the name to show.
        plots: Figures.
        sentences: What the figures say in words.
        title: Heading.
        about: Which networks these are, a line each.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in about),
        "<ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in sentences),
        '</ul><div class="figures">',
        *map(_figure, plots),
        "</div>",
        *(_table(name, diagnosis) for name, diagnosis in networks.items()),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _figure(plot: Plot) -> str:
    light, dark = _uri(plot.pictures["light"]), _uri(plot.pictures["dark"])
    return (
        f"<figure><h2>{escape(plot.title)}</h2><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(plot.title)}"></picture><figcaption>{escape(plot.text)}</figcaption></figure>'
    )


def _uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _table(name: str, diagnosis: Diagnosis) -> str:
    rows = [[str(number), *_row(layer)] for number, layer in enumerate(diagnosis.layers)]
    filled = [place for place in range(len(_COLUMNS)) if any(row[place] for row in rows)]
    head = "".join(f"<th>{escape(_COLUMNS[place])}</th>" for place in filled)
    body = "".join("<tr>" + "".join(f"<td>{escape(row[place])}</td>" for place in filled) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    hint = '<p class="soft hint">The table is wider than the page: scroll it sideways.</p>'
    return f'<h2>{escape(name)}</h2>{hint}<div class="wide">{table}</div>'


def _row(layer: Layer) -> list[str]:
    power = layer.power
    figures: list[Any] = [layer.r2, layer.r2_before, power.p1, power.p2, power.p3, power.p4, power.balance]
    figures += [layer.linearity, layer.henze_zirkler, layer.dependence]
    return [layer.name or "(root)", layer.kind, *("" if v is None else f"{v:z.3f}" for v in figures)]
