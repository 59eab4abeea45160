"""Which convolutions get standardised weights, and which of them a scale: as Labatie et al. do (2021, appendix A.1).

All convolutions do, but for those that work on pooled values: in squeeze-excites, and classifiers. The last of each
residual branch that goes into the sum without a norm, as in ResNets v2, gets a scale of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import fx, nn

from retrofit.graph.flow import Flow, Flows
from retrofit.layers import weight_standardization
from retrofit.surgery.families import classify
from retrofit.surgery.plan_and_report import EditRow
from retrofit.utils.text import plural, shortlist

STANDARDIZED: dict[type[nn.Module], type[weight_standardization.WeightStandardization]] = {
    nn.Conv1d: weight_standardization.WeightStandardizedConv1d,
    nn.Conv2d: weight_standardization.WeightStandardizedConv2d,
    nn.Conv3d: weight_standardization.WeightStandardizedConv3d,
}


def plan_convolutions(model: nn.Module, converted: AbstractSet[str], restore: bool) -> list[EditRow]:
    """Decide every convolution of a network, in its order.

    Args:
        model: The network; it is traced.
        converted: Names of the norms that are converted: a convolution whose block has others alone is left.
        restore: Whether the standardised weights keep the mean and scale that the weights have.

    Returns:
        A row each. The reason of a converted one says why it is unknown whether a scale belongs behind it.
    """
    norms = [name for name, module in model.named_modules() if classify(name, module) is not None]
    found = Flows(model, lambda module: classify("", module) is not None)
    calls: dict[nn.Module, list[tuple[Flow, fx.Node]]] = defaultdict(list)
    for flow in found.flows:
        for node, module in flow.modules.items():
            calls[module].append((flow, node))
    rows = []
    place = 0
    for name, module in model.named_modules():
        place += name in norms
        if not isinstance(module, nn.modules.conv._ConvNd):
            continue
        own = calls.get(module, [])
        reason = _hindrance(module, own, module in found.read)
        if converted.isdisjoint(_around(name, place, norms)):
            reason = "the norms of its block are not converted"
        if reason:
            rows.append(EditRow(name, type(module).__name__, "convolution", "left", reason))
            continue
        ends = {_ends_block(flow, node) for flow, node in own}
        unknown = "" if ends <= {True} or ends <= {False} else "no scale behind it: unknown whether it ends a block"
        options = {"restore": restore, "scale": ends == {True}}
        rows.append(EditRow(name, type(module).__name__, "convolution", "converted", unknown, options=options))
    return rows


def describe(rows: Collection[EditRow]) -> tuple[str, ...]:
    """Say how many convolutions are standardised and have a scale, which are left and why, and what is unknown."""
    rows = [row for row in rows if row.kind == "convolution"]
    done = [row for row in rows if row.status == "converted"]
    if not rows:
        return ()
    scaled = sum(row.options.get("scale", False) for row in done)
    text = [f"{len(done)} of {len(rows)} convolutions are standardised, {scaled} of them with a scale that is learned"]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.reason:
            by_reason[row.reason].append(row.name)
    return (
        *text,
        *(f"{plural(len(names), 'convolution')}: {why} ({shortlist(names)})" for why, names in by_reason.items()),
    )


def _hindrance(conv: Any, calls: list[tuple[Flow, fx.Node]], is_read: bool) -> str:
    """Why a convolution is left as it is; empty if it is not."""
    if type(conv) not in STANDARDIZED:
        return "not one of torch's own convolutions"
    if conv.weight[0].numel() < 2:
        return "each output channel has a single weight"
    if not calls:
        return "no trace shows where it is called"
    if is_read:
        return "its parameters are read elsewhere too"
    if any(flow.in_squeeze_excite(node) for flow, node in calls):
        return "inside a squeeze-excite"
    if any(flow.is_pooled(node) for flow, node in calls):
        return "works on pooled values, as a linear layer does"
    return ""


def _around(name: str, place: int, norms: Sequence[str]) -> Collection[str]:
    """Return the norms of the block that holds a layer; where only the whole network holds any, the next one.

    Args:
        name: The layer's name.
        place: How many norms come before it.
        norms: All norms, in the network's order.
    """
    while name := name.rpartition(".")[0]:
        inside = [norm for norm in norms if norm.startswith(f"{name}.")]
        if inside:
            return inside
    return norms[place : place + 1] or norms[-1:]


def _ends_block(flow: Flow, conv: fx.Node) -> bool | None:
    """Whether a convolution is the last of a residual branch and no norm follows it; None if that is unknown."""
    users = flow.after(conv)
    steps = {flow.steps[user] for user in users}
    if len(users) == 1 and steps <= {"output", "call", "module"}:
        return None
    if len(users) != 1 or steps != {"addition"}:
        return False
    own, *others = sorted((_ahead(operand) for operand in users[0].all_input_nodes), key=lambda seen: conv not in seen)
    longest = max((_convolutions(flow, other - own) for other in others), default=0)
    length = _convolutions(flow, own.difference(*others))
    return None if length == longest else length > longest


def _ahead(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is computed from."""
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        if (one := left.pop()) not in seen:
            seen.add(one)
            left += one.all_input_nodes
    return seen


def _convolutions(flow: Flow, nodes: Collection[fx.Node]) -> int:
    return sum(flow.steps[node] == "convolution" for node in nodes)
