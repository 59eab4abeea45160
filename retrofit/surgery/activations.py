"""The activations behind converted layers: where they are, what becomes of each, and why others stay."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import nn

from retrofit.graph.rewrite import rewrite_problem
from retrofit.graph.sites import Site, Sites, find_sites
from retrofit.surgery.families import classify
from retrofit.surgery.plan_and_report import EditRow


def sites_of(model: nn.Module, families: frozenset[str]) -> Sites:
    """Find the places that call the normalization layers of some families, and the activations behind them."""
    return find_sites(model, lambda module: getattr(classify("", module), "family", None) in families)


def activation_problem(model: nn.Module, site: Site) -> str:
    """Why the activation of a site stays as it is; empty if it can be replaced."""
    if site.in_squeeze_excite:
        return "inside a squeeze-excite"
    return "" if site.activation is None else rewrite_problem(model, site.activation)


def plan_activations(
    model: nn.Module,
    sites: Sites,
    converted: Collection[str],
    target: str = "",
    settle: Callable[[Site], dict[str, Any]] = lambda _: {},
) -> list[EditRow]:
    """Decide every activation: those behind `converted` layers become part of `target`, with options of `settle`."""
    rows = []
    for site in sites.sites:
        if (act := site.activation) is None:
            continue
        reason = activation_problem(model, site) if site.norm in converted else "its norm is not converted"
        row = EditRow(act.name, act.type, "", "left", reason, norm=site.norm, place=site.place)
        rows.append(row if reason else replace(row, status="converted", options=settle(site), target=target))
    rows += [EditRow(act.name, act.type, "", "left", act.reason) for act in sites.unmatched]
    counted = {act.reason for act in sites.unmatched}  # where a part cannot be traced: the activations that it holds
    rows += [
        EditRow(f"after {name}", "unknown", "", "left", f"what follows its norm is unknown: {why}", norm=name)
        for name, why in sites.uncovered.items()
        if name in converted and why not in counted
    ]
    return rows
