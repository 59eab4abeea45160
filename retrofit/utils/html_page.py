"""One HTML page that opens from disk, and its tables; text from anywhere is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from retrofit.utils.text import printable

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --soft: #59636e; --line: #d8dee4; --panel: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1; --line: #30363d; --panel: #151b23 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .5rem 0 0; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 0 0 .25rem }
p { margin: .25rem 0 .75rem; overflow-wrap: anywhere } .soft { color: var(--soft) }
.figures { columns: 2 480px; column-gap: 1.5rem }
figure { margin: 0 0 1.5rem; break-inside: avoid } figure img { width: 100%; height: auto; display: block }
figcaption { color: var(--soft); font-size: .875rem; margin-top: .25rem }
ul { padding-left: 1.2rem } .wide { overflow-x: auto; margin: .5rem 0 1rem } body > h2 { margin-top: 1.5rem }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th:nth-child(2), td:nth-child(2), th:nth-child(3), td:nth-child(3) { text-align: left }
thead th { background: var(--panel); vertical-align: bottom }
"""


def as_html(text: object) -> str:
    """Return a text on one line, as HTML that shows it and does nothing else."""
    return escape(printable(text))


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return a page: a title and what follows it, as HTML."""
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{as_html(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{as_html(title)}</h1>",
    ]
    return "\n".join([*head, *parts, "</body></html>"]) + "\n"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without its empty columns; the second and the third are of words, the others of numbers."""
    filled = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    head = "".join(f"<th>{as_html(columns[place])}</th>" for place in filled)
    body = "".join("<tr>" + "".join(f"<td>{as_html(row[place])}</td>" for place in filled) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
