"""Tables of layers: alike ones together, so that a table is as long for 12 layers as for 1,200."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from retrofit.cli.console import names, show_table

if TYPE_CHECKING:
    from retrofit.surgery import Plan

_FATE = {"kept": "(kept)", "unsupported": "(not supported)", "left": "(left)"}
_EDITED = {"activation": "proxy-normalized", "convolution": "weight-standardized"}


def show_plan(plan: Plan) -> None:
    """Write what becomes of the layers, and of what lies around them: one line for each kind, fate and reason."""
    kinds: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in plan.layers:
        kinds[row.source, _FATE.get(row.status, row.target or ""), row.reason].append(row.name or "(the model itself)")
    for edit in plan.edits:
        edited = f"part of {edit.target}" if edit.target else _EDITED[edit.kind]
        kinds[edit.source, _FATE.get(edit.status, edited), edit.reason].append(edit.name)
    lines = [
        (str(len(found)), source, becomes, names(found), reason) for (source, becomes, reason), found in kinds.items()
    ]
    show_table(("count", "found", "becomes", "names", "why"), lines)
