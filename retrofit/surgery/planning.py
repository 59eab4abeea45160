"""`retrofit.plan`: what a conversion would do to every normalization layer of a network."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from retrofit.conversion_options import ConversionOptions, takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.graph.sites import Sites
from retrofit.record import unwrapped
from retrofit.registry import FAMILIES, target_named
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.families import NormLayer, find_norms, functional_norms
from retrofit.surgery.plan_and_report import LayerRow, Plan
from retrofit.utils.text import one_line, plural, shown

Patterns = str | Iterable[str] | None

# the target to try for a family
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
    return plan_and_sites(network, list(find_norms(network)), request)[0]


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
    model: nn.Module, norms: Sequence[NormLayer], request: PlanRequest
) -> tuple[Plan, Sites | None]:
    """Plan for the layers that were found in `model`.

    Returns:
        The plan, and where the activations are that it is about.

    Raises:
        TypeError: If an option is unknown.
        UsageError: As for `plan`.
        RetrofitError: As for `plan`.
    """
    converter = converter_for(request.to)
    options = ConversionOptions(**request.options)
    options.check(request.to)
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
        raise RetrofitError(_nothing_to_convert(model, rules, norms, plan))
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
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _patterns(name: str, patterns: Patterns, norms: Sequence[NormLayer]) -> list[re.Pattern[str]]:
    """Compile the patterns of an argument, each of which has to match a layer."""
    compiled = []
    for text in _listed(patterns):
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise UsageError(
                f"`{name}={text!r}` is not a regular expression ({one_line(error)}); escape or mend it"
            ) from None
        if not any(pattern.search(norm.name) for norm in norms):
            raise RetrofitError(
                f"`{name}={text!r}` matches none of the {plural(len(norms), 'layer')}; "
                "`named_modules()` and `retrofit inspect` list their names"
            )
        compiled.append(pattern)
    return compiled


def _nothing_to_convert(
    model: nn.Module, rules: _Rules, norms: Sequence[NormLayer], plan: Plan
) -> str:
    """Say why nothing would be converted, and what to do instead."""
    families = " or ".join(FAMILIES[family] for family in sorted(rules.families))
    sources = f"{plan.to} converts {families} layers"
    if not norms:
        functions = "".join(f"; {sentence}" for sentence in functional_norms(model, norms))
        return (
            f"{sources}, and this model has no normalization layer at all{functions}; choose "
            "another model"
        )
    counts = Counter(norm.label for norm in norms).most_common()
    held = ", ".join(f"{count} {label}" for label, count in counts)
    if not any(norm.family in rules.families for norm in norms):
        for norm in norms:
            usual = _USUAL[str(norm.family)] if norm.status == "known" else plan.to
            if usual != plan.to:
                return (
                    f"{sources}, of which this model has none (it holds {held}); try `to={usual!r}`"
                )
    reasons = "; ".join(dict.fromkeys(row.reason for row in plan.layers if row.reason))
    return (
        f"nothing to convert to {plan.to} (the model holds {held}): {reasons}; `retrofit inspect "
        "MODEL` lists them"
    )


def _refuse_without_activations(plan: Plan, converter: Converter, sites: Sites | None) -> None:
    """Refuse a target that is pointless without activations where it would convert none."""
    if not converter.takes_activations or plan.proxied:
        return
    if not converter.identity and not plan.activations:
        # A network of linear layers may do without any.
        return
    plainer = plan.to.removesuffix("-pn") if converter.identity else "gn"
    why = plan.activations or "none follows a norm"
    if sites is not None and sites.hindrance:
        why = f"what follows its norm is unknown: {sites.hindrance}"
    raise RetrofitError(
        f"{plan.to} would convert no activation: {why}; use `to={plainer!r}`, which leaves them alone"
    )


def network_in(model: nn.Module) -> nn.Module:
    """Return the network inside wrappers of torch.compile and DataParallel, which call it as it is.

    Raises:
        UsageError: If it is no network.
        RetrofitError: If it is or holds what keeps its parameters or its code elsewhere.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a torch.nn.Module is converted, not {shown(model)}; build the network first, as "
            "timm.create_model does"
        )
    keepers = ("DistributedDataParallel", "FullyShardedDataParallel", "DTensor")
    for part in (*model.modules(), *model.parameters()):
        if type(part).__name__.startswith(keepers) or isinstance(part, ScriptModule):
            raise RetrofitError(
                f"{type(part).__name__} holds parameters or code that no conversion reaches; "
                "convert the network first, then wrap, shard or script it"
            )
    return unwrapped(model)
