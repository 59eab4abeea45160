"""Tables of layers: alike ones together, so that a table is as long for 12 layers as for 1,200."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.cli.console import names, show_lines, show_table
from retrofit.utils.text import ROOT

if TYPE_CHECKING:
    from retrofit.surgery import Plan


def show_plan(plan: Plan) -> None:
    """Write what becomes of the layers, and of what lies around them: one line for each kind, fate and reason."""
    from retrofit.surgery.report_table import plan_rows

    lines = [(str(len(row.names)), row.found, row.becomes, names(row.names), row.why) for row in plan_rows(plan)]
    show_table(("count", "found", "becomes", "names", "why"), lines)


def list_plan(plan: Plan) -> None:
    """Write what becomes of every layer, and of what lies around it, on a line each."""
    from retrofit.surgery.report_table import edit_fate, layer_fate

    rows = [(row.name or ROOT, row.source, layer_fate(row.status, row.target), row.reason) for row in plan.layers]
    rows += [(row.name, row.source, edit_fate(row), row.reason) for row in plan.edits]
    show_lines(rows)
