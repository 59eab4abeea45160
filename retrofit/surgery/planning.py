"""Decide what becomes of every normalization layer, and say why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from retrofit.conversion_options import OPTIONS, ConversionOptions, takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.surgery.converter import Converter, Decision, converter_for
from retrofit.surgery.families import FAMILIES, NormLayer, find_norms
from retrofit.surgery.functional_norms import functional_norms
from retrofit.surgery.guards import network_in
from retrofit.surgery.plan_and_report import LayerRow, Plan
from retrofit.utils.text import one_line, plural

Patterns = str | Iterable[str] | None

_USUAL = {"bn": "bnn", "ln": "lnn", "gn": "gnn", "in": "inn", "frozen-bn": "frozen"}
"""The target to try for a network that holds a family."""


@takes_options
def plan(
    model: nn.Module,
    to: str = "bnn",
    *,
    only: Patterns = None,
    skip: Patterns = None,
    source: Patterns = None,
    **options: Any,
) -> Plan:
    """Decide what a conversion would do to every normalization layer of `model`; change nothing.

    Args:
        model: Any network.
        to: Target, a key of `TARGETS`.
        only: Convert only layers whose name one of these regular expressions finds (`re.search`).
        skip: Keep layers whose name one of these finds.
        source: Families to convert ("bn", "ln", "gn", "in", "frozen-bn"); None for the target's own.
        **options: See below.

    Returns:
        The plan, which `apply` executes.

    Raises:
        UsageError: For what is no network, an unknown target or family, an option out of range, or a pattern that does
            not compile.
        RetrofitError: If a pattern matches no layer, or nothing would be converted.
    """
    model = network_in(model)
    converter = converter_for(to)
    included, excluded = _compiled("only", only), _compiled("skip", skip)
    families = _families(source) or converter.sources
    if unknown := options.keys() - OPTIONS.keys():
        raise TypeError(f"plan() and convert() have no argument {', '.join(sorted(unknown))}; see help(retrofit.plan)")
    settled = ConversionOptions(**options)
    settled.check(to)

    norms = list(find_norms(model))
    _refuse_unmatched(norms, only=included, skip=excluded)
    rules = {norm.name: _rule(norm, to, converter, families, included, excluded) for norm in norms}
    decisions = converter.plan(model, [norm for norm in norms if rules[norm.name] is None], settled)
    rows = [_row(norm, rules[norm.name] or decisions.layers[norm.name]) for norm in norms]
    patterns = {"only": [pattern.pattern for pattern in included], "skip": [pattern.pattern for pattern in excluded]}
    record = {**patterns, "source": sorted(families), **settled.record()}
    result = Plan(to, tuple(rows), record, decisions.edits, decisions.sites)
    if not result.counts["converted"]:
        raise RetrofitError(_nothing_to_convert(model, families, norms, result))
    edited = any(row.kind == "activation" and row.status == "converted" for row in result.edits)
    if converter.takes_activations and not edited and (converter.identity or result.activations):
        plainer = to.removesuffix("-pn") if converter.identity else "gn"
        why = result.activations or "none follows a norm"
        raise RetrofitError(f"{to} would convert no activation: {why}; use `to={plainer!r}`, which leaves them alone")
    return result


def _row(norm: NormLayer, fate: Decision) -> LayerRow:
    return LayerRow(norm.name, norm.label, fate.target, fate.status, fate.reason, dict(fate.options))


def _rule(
    norm: NormLayer,
    to: str,
    converter: Converter,
    families: frozenset[str],
    only: Sequence[re.Pattern[str]],
    skip: Sequence[re.Pattern[str]],
) -> Decision | None:
    """Return what the caller's rules decide about a layer; None to ask the converter."""
    if norm.family is not None and norm.family not in families:
        hint = ""
        if norm.family in converter.sources:
            hint = f" here (name {norm.family!r} in `source` too)"
        elif norm.family == "frozen-bn":
            hint = " (frozen, gn, ln, gn-pn and ln-pn take it; timm.layers.unfreeze_batch_norm_2d makes it BatchNorm)"
        return Decision("kept", reason=f"{FAMILIES[norm.family]} is not a source of {to}{hint}")
    if only and not any(pattern.search(norm.name) for pattern in only):
        return Decision("kept", reason="not matched by `only`")
    for pattern in skip:
        if pattern.search(norm.name):
            return Decision("kept", reason=f"matched by `skip={pattern.pattern!r}`")
    return None if norm.status == "known" else Decision(norm.status, reason=norm.reason)


def _compiled(name: str, patterns: Patterns) -> list[re.Pattern[str]]:
    compiled = []
    for pattern in _listed(patterns):
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(
                f"`{name}={pattern!r}` is not a regular expression ({one_line(error)}); escape or mend it"
            ) from None
    return compiled


def _refuse_unmatched(norms: Sequence[NormLayer], **patterns: Sequence[re.Pattern[str]]) -> None:
    for name, given in patterns.items():
        for pattern in given:
            if not any(pattern.search(norm.name) for norm in norms):
                raise RetrofitError(
                    f"`{name}={pattern.pattern!r}` matches none of the {plural(len(norms), 'layer')}; "
                    "`named_modules()` and `retrofit inspect` list their names"
                )


def _families(source: Patterns) -> frozenset[str]:
    families = frozenset(_listed(source))
    for family in families:
        if family not in FAMILIES:
            raise UsageError(f"`source={family!r}` is no family; choose from {', '.join(FAMILIES)}")
    return families


def _listed(patterns: Patterns) -> list[str]:
    if patterns is None:
        return []
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _nothing_to_convert(model: nn.Module, families: frozenset[str], norms: Sequence[NormLayer], result: Plan) -> str:
    sources = " or ".join(FAMILIES[family] for family in sorted(families))
    if not norms:
        called = "".join(f"; {note}" for note in functional_norms(model))
        return (
            f"{result.to} converts {sources} layers, and this model has no normalization layer at all{called}; choose "
            "another model"
        )
    held = ", ".join(f"{n} {label}" for label, n in Counter(norm.label for norm in norms).most_common())
    targets = [_USUAL[str(norm.family)] for norm in norms if norm.status == "known"]
    others = [target for target in targets if target != result.to]
    if others and not any(norm.family in families for norm in norms):
        return (
            f"{result.to} converts {sources} layers, of which this model has none (it holds {held}); try "
            f"`to={others[0]!r}`"
        )
    reasons = "; ".join(dict.fromkeys(row.reason for row in result.layers if row.reason))
    return f"nothing to convert to {result.to} (the model holds {held}): {reasons}; `retrofit inspect MODEL` lists them"
