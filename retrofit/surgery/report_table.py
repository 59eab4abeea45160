"""A plan and a report in words: a few lines for people, whatever the number of layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from retrofit.utils.text import ROOT, printable

if TYPE_CHECKING:
    from retrofit.surgery.plan_and_report import EditRow, Plan, Report

_FATE = {"kept": "(kept)", "unsupported": "(not supported)", "left": "(left)"}
_EDITED = {"activation": "proxy-normalized", "convolution": "weight-standardized"}
_HEAD = ("count", "found", "becomes", "first", "why")


class PlanRow(NamedTuple):
    """What becomes of some layers, or of what lies around them: of one class, with one fate for one reason."""

    found: str
    becomes: str
    why: str
    names: list[str]


def plan_rows(plan: Plan) -> list[PlanRow]:
    """Return a row for each class, fate and reason, in the order of their first layers."""
    kinds: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in plan.layers:
        kinds[row.source, layer_fate(row.status, row.target), row.reason].append(row.name or ROOT)
    for edit in plan.edits:
        kinds[edit.source, edit_fate(edit), edit.reason].append(edit.name)
    return [PlanRow(*kind, names) for kind, names in kinds.items()]


def layer_fate(status: str, target: str | None) -> str:
    """Return what a layer becomes, in a word or two."""
    return _FATE.get(status, target or "")


def edit_fate(edit: EditRow) -> str:
    """Return what an activation or a convolution becomes, in a word or two."""
    return _FATE.get(edit.status) or (f"part of {edit.target}" if edit.target else _EDITED[edit.kind])


def plan_text(plan: Plan) -> str:
    """Return a plan as a title and a small table."""
    counts = ", ".join(f"{count} {status}" for status, count in plan.counts.items())
    cells = [_HEAD, *_cells(plan)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([f"to {plan.to}: {counts}", *lines])


def report_text(report: Report) -> str:
    """Return a report as its plan's table and what came of it."""
    return "\n".join([plan_text(report.plan), *_outcome(report)])


def plan_html(plan: Plan, outcome: Sequence[str] = ()) -> str:
    """Return a plan, and what came of it, for a notebook."""

    def row(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values) + "</tr>"

    title, *_ = plan_text(plan).splitlines()
    table = row("th", _HEAD) + "".join(row("td", values) for values in _cells(plan))
    lines = "".join(f"<div>{escape(line)}</div>" for line in outcome)
    return f"<div><b>{escape(title)}</b><table>{table}</table>{lines}</div>"


def report_html(report: Report) -> str:
    """Return a report for a notebook."""
    return plan_html(report.plan, _outcome(report))


def _cells(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (str(len(row.names)), row.found, row.becomes, printable(row.names[0], 40), printable(row.why, 80))
        for row in plan_rows(plan)
    ]


def _outcome(report: Report) -> list[str]:
    growth = report.params_after - report.params_before
    lines = [f"parameters: {report.params_before:,} before, {report.params_after:,} after ({growth:+,})"]
    if report.strength is not None:
        lines.append(f"strength: {report.strength:g}")
    if report.check is not None:
        lines.append(f"check: {report.check}")
    return [*lines, *(f"note: {printable(note)}" for note in report.notes)]
