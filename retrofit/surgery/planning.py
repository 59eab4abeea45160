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
from retrofit.record import network_in
from retrofit.registry import FAMILIES, target_named
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.functional_norms import functional_norms
from retrofit.surgery.norm_layers import NormLayer, find_norms
from retrofit.surgery.plan_and_report import LayerRow, Plan
from retrofit.utils.text import one_line, plural, shortlist

Patterns = str | Iterable[str] | None
Shapes = Mapping[str, Sequence[torch.Size]]

# The target to suggest for a family.
_USUAL = {
    "bn": "bnn",
    "ln": "lnn",
    "gn": "gnn",
    "in": "inn",
    "frozen-bn": "frozen",
}


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
        source: Families of layers to convert ("bn", "ln", "gn", "in", "frozen-bn"); by default, the
            target's.
        **options: Options of the target, such as `groups`, `noise` or `calibrate`.

    Returns:
        The plan, which `apply` executes.

    Raises:
        UsageError: If `model` is not a network, the target or a family is unknown, an option is out
            of range, or a pattern does not compile.
        RetrofitError: If a pattern matches no layer, or nothing would be converted.
    """
    network = network_in(model)
    request = PlanRequest(to, only, skip, source, options)
    norms = list(find_norms(network))
    functional = functional_norms(network, norms)
    planned, _ = plan_and_sites(network, norms, functional, request)
    return planned


@dataclass(frozen=True)
class PlanRequest:
    """What the caller of `plan` or `convert` asks for; see `plan`."""

    to: str
    only: Patterns = None
    skip: Patterns = None
    source: Patterns = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rules:
    """The caller's rules on which layers to convert."""

    to: str
    families: frozenset[str]
    only: Sequence[re.Pattern[str]]
    skip: Sequence[re.Pattern[str]]

    def against(self, norm: NormLayer) -> str:
        """Why the rules leave a layer as it is; empty if they let it through."""
        if norm.family is not None and norm.family not in self.families:
            return f"{norm.family_name} is not a source of {self.to}{self._hint(norm.family)}"
        if self.only and not any(pattern.search(norm.name) for pattern in self.only):
            return "not matched by `only`"
        for pattern in self.skip:
            if pattern.search(norm.name):
                return f"matched by `skip={pattern.pattern!r}`"
        return ""

    def _hint(self, family: str) -> str:
        if family in target_named(self.to).families:
            return f" here (name {family!r} in `source` too)"
        if family == "frozen-bn":
            return (
                " (frozen, gn, ln, gn-pn and ln-pn take it; timm.layers.unfreeze_batch_norm_2d "
                "makes it BatchNorm)"
            )
        return ""

    def record(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "only": [pattern.pattern for pattern in self.only],
            "skip": [pattern.pattern for pattern in self.skip],
            "source": sorted(self.families),
        }


def plan_and_sites(
    model: nn.Module, norms: Sequence[NormLayer], functions: Sequence[str], request: PlanRequest
) -> tuple[Plan, Sites | None]:
    """Plan for the layers that were found in `model`.

    Args:
        model: The network.
        norms: Its normalization layers.
        functions: Sentences on normalizations that its code calls as functions.
        request: What the caller asks for.

    Returns:
        The plan, and the sites of its activations; None if it is about none.

    Raises:
        TypeError: If an option is unknown.
        UsageError: As for `plan`.
        RetrofitError: As for `plan`.
    """
    converter = converter_for(request.to)
    options = ConversionOptions(**request.options)
    options.check(target_named(request.to))
    rules = _rules(request, converter, norms)

    rows: dict[str, LayerRow] = {}
    undecided = []
    for norm in norms:
        reason = rules.against(norm)
        if reason:
            rows[norm.name] = norm.row("kept", reason)
        elif norm.status != "known":
            rows[norm.name] = norm.row(norm.status, norm.reason)
        else:
            undecided.append(norm)
    decisions, edits, sites = converter.plan(model, undecided, options)
    rows.update({row.name: row for row in decisions})

    layers = tuple(rows[norm.name] for norm in norms)
    record = {**rules.record(), **options.record()}
    plan = Plan(request.to, layers, record, tuple(edits))
    if not plan.converted:
        raise RetrofitError(_nothing_to_convert(rules, norms, functions, plan))
    _refuse_without_activations(plan, converter, sites)
    return plan, sites


def _rules(request: PlanRequest, converter: Converter, norms: Sequence[NormLayer]) -> _Rules:
    families = frozenset(_listed(request.source)) or converter.sources
    for family in families - FAMILIES.keys():
        raise UsageError(f"`source={family!r}` is no family; choose from {', '.join(FAMILIES)}")
    only = _patterns("only", request.only, norms)
    skip = _patterns("skip", request.skip, norms)
    return _Rules(request.to, families, only, skip)


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


def _nothing_to_convert(
    rules: _Rules, norms: Sequence[NormLayer], functions: Sequence[str], plan: Plan
) -> str:
    """Say why nothing would be converted, and what to do instead."""
    names = [FAMILIES[family] for family in sorted(rules.families)]
    families = " or ".join(names)
    sources = f"{plan.to} converts {families} layers"
    if not norms:
        called = "".join(f"; {sentence}" for sentence in functions)
        return (
            f"{sources}, and this model has no normalization layer at all{called}; choose another "
            "model"
        )
    held = _counts_of_classes(norms)
    usual = _usual_target(rules, norms, plan.to)
    if usual is not None:
        return f"{sources}, of which this model has none (it holds {held}); try `to={usual!r}`"
    reasons = [row.reason for row in plan.layers if row.reason]
    why = "; ".join(dict.fromkeys(reasons))
    return (
        f"nothing to convert to {plan.to} (the model holds {held}): {why}; `retrofit inspect "
        "MODEL` lists them"
    )


def _counts_of_classes(norms: Sequence[NormLayer]) -> str:
    counts = Counter(norm.label for norm in norms)
    return ", ".join(f"{count} {label}" for label, count in counts.most_common())


def _usual_target(rules: _Rules, norms: Sequence[NormLayer], to: str) -> str | None:
    """Return another target that takes layers of a model, if it holds none of the rules' families;
    None if it does, or if there is none.
    """
    if any(norm.family in rules.families for norm in norms):
        return None
    usual = [_USUAL[str(norm.family)] for norm in norms if norm.status == "known"]
    return next((target for target in usual if target != to), None)


def _refuse_without_activations(plan: Plan, converter: Converter, sites: Sites | None) -> None:
    """Refuse a target that is pointless without activations where it would convert none."""
    if not converter.takes_activations or plan.proxied:
        return
    # None is converted and none is left: the network has none, as one of linear layers.
    if not converter.identity and not plan.note_on_activations:
        return
    plainer = "gn"
    if converter.identity:
        plainer = plan.to.removesuffix("-pn")
    why = plan.note_on_activations or "none follows a norm"
    if sites is not None and sites.hindrance:
        why = f"what follows its norm is unknown: {sites.hindrance}"
    raise RetrofitError(
        f"{plan.to} would convert no activation: {why}; use `to={plainer!r}`, which leaves them "
        "alone"
    )


def refuse_constants(plan: Plan, norms: Sequence[NormLayer], shapes: Shapes | None) -> None:
    """Refuse to normalize sets of a single value each, of which a normalization makes a constant.

    Args:
        plan: The plan.
        norms: The layers that it is about.
        shapes: What a run of the network gave each layer, by name; None if it was not run.

    Raises:
        RetrofitError: If a layer would normalize sets of one value.
    """
    layers = {norm.name: norm for norm in norms}
    constant = [
        row.name
        for row in plan.converted
        if _makes_constants(row, layers[row.name], (shapes or {}).get(row.name, ()))
    ]
    if not constant:
        return
    unless = ""
    if shapes is None:
        unless = ", or show by example `inputs` that its maps have more positions"
    raise RetrofitError(
        f"every group of {shortlist(constant)} would hold a single value, of which a normalization "
        "makes a constant; the model is left as it was: take fewer groups with `groups`, keep them "
        f"with `skip`{unless}"
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
