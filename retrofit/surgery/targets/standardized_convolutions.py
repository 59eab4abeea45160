"""Weight standardization of the convolutions around batch-independent layers (`ws`)."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from torch import fx, nn

from retrofit.graph.dataflow import Flow, Flows, reached
from retrofit.layers import weight_standardization
from retrofit.surgery.converter import adopt
from retrofit.surgery.norm_layers import classify, find_norms
from retrofit.surgery.plan_and_report import EditRow

_STANDARDIZED: dict[type, Any] = {
    getattr(nn, name): getattr(weight_standardization, f"WeightStandardized{name}")
    for name in ("Conv1d", "Conv2d", "Conv3d")
}


def plan_convolutions(
    model: nn.Module, converted: AbstractSet[str], restore: bool
) -> list[EditRow]:
    """Decide every convolution of a network: left if none of the norms of its block is `converted`.

    All but those that work on pooled values, in squeeze-excites and classifiers, are standardized
    (Labatie et al. 2021, appendix A.1). The last of a residual branch that goes into the sum
    without a norm, as in ResNets v2, gets a scale; the reason of a converted one says why that is
    unknown. With `restore` the weights keep their mean and scale.
    """
    layers = {norm.module for norm in find_norms(model)}
    norms = [name for name, module in model.named_modules() if module in layers]
    traced = Flows(model, lambda module: classify("", module) is not None)
    rows = []
    # How many of the norms come before the module at hand.
    passed = 0
    for name, module in model.named_modules():
        passed += name in norms
        if not isinstance(module, nn.modules.conv._ConvNd):
            continue
        calls = traced.calls[module]
        reason = _hindrance(module, calls, module in traced.read)
        # Where only the whole network holds any norm, the next one stands for the block's.
        around = _norms_around(name, norms) or norms[passed : passed + 1] or norms[-1:]
        if converted.isdisjoint(around):
            reason = "the norms of its block are not converted"
        row = EditRow(name, type(module).__name__, "", "left", reason, kind="convolution")
        if not reason:
            row = _standardized_row(row, calls, restore)
        rows.append(row)
    return rows


def _standardized_row(row: EditRow, calls: list[tuple[Flow, fx.Node]], restore: bool) -> EditRow:
    ends = {_ends_block(flow, node) for flow, node in calls}
    reason = ""
    if None in ends or len(ends) > 1:
        reason = "no scale behind it: unknown whether it ends a block"
    options = {"restore": restore, "scale": ends == {True}}
    return replace(row, status="converted", reason=reason, options=options)


def _norms_around(name: str, norms: Sequence[str]) -> Sequence[str]:
    """Return the norms of the smallest block that holds a layer and any norm; none if that is the
    whole network.
    """
    while name := name.rpartition(".")[0]:
        if inside := [norm for norm in norms if norm.startswith(f"{name}.")]:
            return inside
    return []


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


def _ends_block(flow: Flow, conv: fx.Node) -> bool | None:
    """Whether a convolution is the last of a residual branch and no norm follows it; None if that
    is unknown.
    """
    users = flow.after(conv)
    steps = {flow.steps[user] for user in users}
    if len(users) == 1 and steps <= {"output", "call", "module"}:
        return None
    if len(users) != 1 or steps != {"addition"}:
        return False
    branches = [
        reached(operand, lambda node: node.all_input_nodes) for operand in users[0].all_input_nodes
    ]
    # The branch that the convolution is on comes first.
    branch, *others = sorted(branches, key=lambda nodes: conv not in nodes)
    length = _convolutions(flow, branch.difference(*others))
    lengths = [_convolutions(flow, other - branch) for other in others]
    longest = max(lengths, default=0)
    if length == longest:
        return None
    return length > longest


def _convolutions(flow: Flow, nodes: Iterable[fx.Node]) -> int:
    return sum(flow.steps[node] == "convolution" for node in nodes)


def standardized(conv: Any, restore: bool, scale: bool) -> nn.Module:
    """Return the weight-standardized twin of a convolution, around its tensors.

    Without `restore`, a learned scale starts where the block keeps the size that the initialization
    gave it.
    """
    sizes = conv.in_channels, conv.out_channels, conv.kernel_size
    placed = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    new = adopt(
        _STANDARDIZED[type(conv)](*sizes, groups=conv.groups, scale=scale, strength=0.0, **placed),
        conv,
    )
    if restore:
        new.seed_restore()
    else:
        new.seed_scale()
    return new


def note_on_convolutions(rows: Sequence[EditRow]) -> str:
    """Say how many convolutions are standardized and have a scale."""
    converted = [row for row in rows if row.status == "converted"]
    scaled = sum(row.options["scale"] for row in converted)
    return (
        f"{len(converted)} of {len(rows)} convolutions are standardized, {scaled} of them with a "
        "scale that is learned"
    )
