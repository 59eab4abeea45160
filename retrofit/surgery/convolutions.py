"""Which convolutions get standardised weights, and which of them a scale: as Labatie et al. do (2021, appendix A.1).

All convolutions do, but for those that work on pooled values: in squeeze-excites, and classifiers. The last of each
residual branch that goes into the sum without a norm, as in ResNets v2, gets a scale of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from torch import fx, nn

from retrofit.graph.flow import Flow, Flows, reached
from retrofit.layers import WeightStandardizedConv1d, WeightStandardizedConv2d, WeightStandardizedConv3d
from retrofit.surgery.converter import adopt
from retrofit.surgery.families import classify
from retrofit.surgery.plan_and_report import EditRow
from retrofit.utils.text import plural, shortlist

_STANDARDIZED: dict[type, Any] = {
    nn.Conv1d: WeightStandardizedConv1d,
    nn.Conv2d: WeightStandardizedConv2d,
    nn.Conv3d: WeightStandardizedConv3d,
}


def plan_convolutions(model: nn.Module, converted: AbstractSet[str], restore: bool) -> list[EditRow]:
    """Decide every convolution of a network: left if none of the norms of its block is `converted`.

    The reason of a converted one says why it is unknown whether a scale belongs behind it. With `restore` the
    standardised weights keep the mean and scale that the weights have.
    """
    norms = [name for name, module in model.named_modules() if classify(name, module) is not None]
    traced = Flows(model, lambda module: classify("", module) is not None)
    calls: dict[nn.Module, list[tuple[Flow, fx.Node]]] = defaultdict(list)
    for flow in traced.flows:
        for node, module in flow.modules.items():
            calls[module].append((flow, node))
    rows = []
    passed = 0
    for name, module in model.named_modules():
        passed += name in norms
        if not isinstance(module, nn.modules.conv._ConvNd):
            continue
        own = calls.get(module, [])
        reason = _hindrance(module, own, module in traced.read)
        if converted.isdisjoint(_norms_around(name, passed, norms)):
            reason = "the norms of its block are not converted"
        row = EditRow(name, type(module).__name__, "", "left", reason, kind="convolution")
        if not reason:
            ends = {_ends_block(flow, node) for flow, node in own}
            unknown = None in ends or len(ends) > 1
            reason = "no scale behind it: unknown whether it ends a block" if unknown else ""
            row = replace(row, status="converted", reason=reason, options={"restore": restore, "scale": ends == {True}})
        rows.append(row)
    return rows


def describe(edits: Collection[EditRow]) -> list[str]:
    """Say how many convolutions are standardised and have a scale, which are left and why, and what is unknown."""
    rows = [row for row in edits if row.kind == "convolution"]
    if not rows:
        return []
    done = [row for row in rows if row.status == "converted"]
    scaled = sum(row.options["scale"] for row in done)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.reason:
            by_reason[row.reason].append(row.name)
    return [
        f"{len(done)} of {len(rows)} convolutions are standardised, {scaled} of them with a scale that is learned",
        *(f"{plural(len(names), 'convolution')}: {why} ({shortlist(names)})" for why, names in by_reason.items()),
    ]


def standardized(conv: Any, restore: bool, scale: bool) -> Any:
    """Return the weight-standardised twin of a convolution, around its tensors.

    Without `restore`, a learned scale starts where the block keeps the size that the initialization gave it.
    """
    sizes = conv.in_channels, conv.out_channels, conv.kernel_size
    placed = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    new = adopt(_STANDARDIZED[type(conv)](*sizes, groups=conv.groups, scale=scale, strength=0.0, **placed), conv)
    if restore:
        new.seed_restore()
    else:
        new.seed_scale()
    return new


def _hindrance(conv: Any, calls: list[tuple[Flow, fx.Node]], is_read: bool) -> str:
    """Why a convolution is left as it is; empty if it is not."""
    if type(conv) not in _STANDARDIZED:
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


def _norms_around(name: str, passed: int, norms: Sequence[str]) -> Sequence[str]:
    """Return the norms of the block that holds a layer; where only the whole network holds any, the next one.

    `passed` is how many of the norms come before the layer in the network's order.
    """
    while name := name.rpartition(".")[0]:
        if inside := [norm for norm in norms if norm.startswith(f"{name}.")]:
            return inside
    return norms[passed : passed + 1] or norms[-1:]


def _ends_block(flow: Flow, conv: fx.Node) -> bool | None:
    """Whether a convolution is the last of a residual branch and no norm follows it; None if that is unknown."""
    users = flow.after(conv)
    steps = {flow.steps[user] for user in users}
    if len(users) == 1 and steps <= {"output", "call", "module"}:
        return None
    if len(users) != 1 or steps != {"addition"}:
        return False
    branches = [reached(operand, lambda node: node.all_input_nodes) for operand in users[0].all_input_nodes]
    own, *others = sorted(branches, key=lambda branch: conv not in branch)
    longest = max((_convolutions(flow, other - own) for other in others), default=0)
    length = _convolutions(flow, own.difference(*others))
    return None if length == longest else length > longest


def _convolutions(flow: Flow, nodes: Collection[fx.Node]) -> int:
    return sum(flow.steps[node] == "convolution" for node in nodes)
