"""`retrofit.plan`: what a conversion would do to every normalization layer of a network."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions, takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.graph.norm_sites import Sites
from retrofit.registry import TARGETS, Target, target_named
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.norm_layers import NormLayer, Source, source_of
from retrofit.surgery.plan_and_report import LayerRow, Plan
from retrofit.utils.text import one_line, plural, shortlist

Patterns = str | Iterable[str] | None
Shapes = Mapping[str, Sequence[torch.Size]]


@takes_options
def plan(
    model: nn.Module,
    to: str,
    *,
    only: Patterns = None,
    skip: Patterns = None,
    source: Patterns = None,
    **options: Any,
) -> Plan:
    """Decide what a conversion would do to every normalization layer of `model`; change nothing.

    Args:
        model: Any network.
        to: The name of a target.
        only: One or more regular expressions; convert only layers whose name matches one
            (`re.search`).
        skip: One or more regular expressions; keep layers whose name matches one.
        source: Those of the target's families to convert ("bn", "ln", "gn", "in", "frozen-bn"); by
            default, all.
        **options: Options of the target, such as `groups`, `noise` or `calibrate`.

    Returns:
        The plan, which `apply` executes.

    Raises:
        UsageError: If `model` is not a network, the target is unknown, a family is not one of the
            target's, an option is out of range, or a pattern does not compile.
        RetrofitError: If a pattern matches no layer, or nothing would be converted.
    """
    request = PlanRequest(to, only, skip, source, options)
    planned, _ = plan_and_sites(source_of(model), request)
    return planned


@dataclass(frozen=True)
class PlanRequest:
    """What the caller of `plan` or `convert` asks for; see `plan`."""

    to: str
    only: Patterns = None
    skip: Patterns = None
    source: Patterns = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """List what may be read once only: a conversion plans twice."""
        for name in ("only", "skip", "source"):
            object.__setattr__(self, name, _listed(getattr(self, name)))


def plan_and_sites(source: Source, request: PlanRequest) -> tuple[Plan, Sites | None]:
    """Plan for the layers that were found in a network.

    Args:
        source: The network.
        request: What the caller asks for.

    Returns:
        The plan, and the sites of its activations; None if it is about none.

    Raises:
        TypeError: If an option is unknown.
        UsageError: As for `plan`.
        RetrofitError: As for `plan`.
    """
    norms = source.norms
    converter = converter_for(request.to)
    target = target_named(request.to)
    options = ConversionOptions(**request.options)
    options.check(target)
    families = _families(request, target)
    only = _patterns("only", request.only, norms)
    skip = _patterns("skip", request.skip, norms)

    if not norms:
        raise RetrofitError(_no_norms(request.to, source.functions))
    rows: dict[str, LayerRow] = {}
    undecided = []
    for norm in norms:
        reason = _foreign_family(norm, target, families) or _left_out(norm, only, skip)
        if reason:
            rows[norm.name] = norm.row("kept", reason)
        elif norm.status != "known":
            rows[norm.name] = norm.row(norm.status, norm.reason)
        else:
            undecided.append(norm)
    decisions, edits, sites = converter.plan(source.network, undecided, options)
    rows.update({row.name: row for row in decisions})

    layers = tuple(rows[norm.name] for norm in norms)
    record = {
        "only": [pattern.pattern for pattern in only],
        "skip": [pattern.pattern for pattern in skip],
        "source": sorted(families),
        **options.record(),
    }
    plan = Plan(request.to, layers, record, tuple(edits))
    if not plan.converted:
        raise RetrofitError(_nothing_to_convert(plan, norms, target))
    _refuse_without_activations(plan, converter, sites)
    return plan, sites


def _families(request: PlanRequest, target: Target) -> Sequence[str]:
    """Return the families that are to be converted."""
    families = _listed(request.source) or target.families
    for family in families:
        if family not in target.families:
            raise UsageError(
                f"`source={family!r}` is no family that {target.name} converts; choose from "
                f"{', '.join(target.families)}"
            )
    return families


def _foreign_family(norm: NormLayer, target: Target, families: Sequence[str]) -> str:
    """Why the family of a layer leaves it as it is; empty if it is converted, or unknown."""
    family = norm.family
    if family is None or family in families:
        return ""
    if family in target.families:
        return f"{family!r} is not named in `source`"
    reason = f"{norm.family_name} is not a source of {target.name}"
    # What the same converter makes of this family.
    others = [
        other.name
        for other in TARGETS.values()
        if other.converter == target.converter and family in other.families
    ]
    if others:
        reason += f"; try `to={others[0]!r}`"
    return reason


def _left_out(
    norm: NormLayer, only: Sequence[re.Pattern[str]], skip: Sequence[re.Pattern[str]]
) -> str:
    """Which pattern leaves a layer as it is; empty if none does."""
    if only and not any(pattern.search(norm.name) for pattern in only):
        return "not matched by `only`"
    for pattern in skip:
        if pattern.search(norm.name):
            return f"matched by `skip={pattern.pattern!r}`"
    return ""


def _listed(patterns: Patterns) -> list[str]:
    if isinstance(patterns, str):
        return [patterns]
    return list(patterns or ())


def _patterns(name: str, patterns: Patterns, norms: Sequence[NormLayer]) -> list[re.Pattern[str]]:
    """Compile the patterns of an argument, each of which has to match a layer."""
    compiled = []
    for text in _listed(patterns):
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise UsageError(
                f"`{name}={text!r}` is not a regular expression ({one_line(error)}); escape or "
                "mend it"
            ) from None
        if not any(pattern.search(norm.name) for norm in norms):
            raise RetrofitError(
                f"`{name}={text!r}` matches none of the {plural(len(norms), 'layer')}; "
                "`named_modules()` and `retrofit inspect` list their names"
            )
        compiled.append(pattern)
    return compiled


def _no_norms(to: str, functions: Sequence[str]) -> str:
    sentences = ["this model has no normalization layer at all", *functions]
    return f"nothing to convert to {to}: {'; '.join(sentences)}; choose another model"


def _nothing_to_convert(plan: Plan, norms: Sequence[NormLayer], target: Target) -> str:
    """Say why no layer would be converted, and what to do instead."""
    counts = Counter(row.source for row in plan.layers)
    held = ", ".join(f"{count} {label}" for label, count in counts.most_common())
    sentences = list(dict.fromkeys(row.reason for row in plan.layers))
    foreign = {norm.family for norm in norms}.difference(target.families)
    # Those of the same converter are advised in the layers' reasons.
    others = [
        other.name
        for other in TARGETS.values()
        if foreign.intersection(other.families) and other.converter != target.converter
    ]
    if others:
        sentences.append(f"other targets that convert what it holds: {', '.join(others)}")
    return (
        f"nothing to convert to {plan.to} (the model holds {held}): {'; '.join(sentences)}; "
        "`retrofit inspect MODEL` lists them"
    )


def _refuse_without_activations(plan: Plan, converter: Converter, sites: Sites | None) -> None:
    """Refuse a target that is pointless without activations where it would convert none."""
    if not converter.takes_activations or plan.proxied:
        return
    why = plan.note_on_activations
    if not why and not converter.identity:
        # A network without activations, as one of linear layers: the target has a form for it.
        return
    if sites is not None and sites.hindrance:
        why = f"what follows its norm is unknown: {sites.hindrance}"
    raise RetrofitError(
        f"{plan.to} would convert no activation: {why or 'none follows a norm'}; use gn or ln, "
        "which leave them alone"
    )


def refuse_constants(plan: Plan, norms: Sequence[NormLayer], shapes: Shapes) -> None:
    """Refuse to normalize sets of a single value each, of which a normalization makes a constant.

    Args:
        plan: The plan.
        norms: The layers that it is about.
        shapes: What a run of the network gave each layer, by name; empty if it was not run.

    Raises:
        RetrofitError: If a layer would normalize sets of one value.
    """
    layers = {norm.name: norm for norm in norms}
    constant = [
        row.name
        for row in plan.converted
        if _makes_constants(row, layers[row.name], shapes.get(row.name, ()))
    ]
    if constant:
        raise RetrofitError(
            f"every group of {shortlist(constant)} would hold a single value, of which a "
            "normalization makes a constant; the model is left as it was: take fewer groups with "
            "`groups`, keep them with `skip`, or pass example `inputs` whose maps have more "
            "positions"
        )


def _makes_constants(row: LayerRow, norm: NormLayer, shapes: Sequence[torch.Size]) -> bool:
    """Whether a layer would normalize a single value at a time, on an input of one of the shapes.

    A BatchNorm1d that was not called counts as if its input had one position a channel.
    """
    mean = getattr(norm.layer, "running_mean", None)
    if mean is None:
        # A GroupNorm keeps its groups.
        return False
    channels = len(mean)
    # gn and ln (and -pn) settle `num_groups`, evonorm-s0 `groups`; frn-tlu takes each channel alone.
    groups = row.options.get("num_groups", row.options.get("groups", channels))
    positions = [math.prod(shape[2:]) for shape in shapes]
    if not positions and norm.known_class == "BatchNorm1d":
        positions = [1]
    return any(channels * count == groups for count in positions)
