"""Decide what becomes of every normalization layer, and say why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from retrofit.conversion_options import FAMILIES, OPTIONS, ConversionOptions, takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.graph.sites import Sites
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.families import NormLayer, find_norms, functional_norms
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
    return plan_and_sites(network_in(model), to, only, skip, source, options)[0]


def plan_and_sites(
    model: nn.Module, to: str, only: Patterns, skip: Patterns, source: Patterns, options: dict[str, Any]
) -> tuple[Plan, Sites | None]:
    """Return what `plan` does, and where the activations are that the plan is about."""
    converter = converter_for(to)
    if unknown := options.keys() - OPTIONS.keys():
        raise TypeError(f"plan() and convert() have no argument {', '.join(sorted(unknown))}; see help(retrofit.plan)")
    settled = ConversionOptions(**options)
    settled.check(to)
    families = frozenset(_listed(source)) or converter.sources
    for family in families - FAMILIES.keys():
        raise UsageError(f"`source={family!r}` is no family; choose from {', '.join(FAMILIES)}")
    norms = list(find_norms(model))
    included, excluded = _patterns("only", only, norms), _patterns("skip", skip, norms)

    rows = {norm.name: _row_by_rule(norm, to, converter, families, included, excluded) for norm in norms}
    decisions = converter.plan(model, [norm for norm in norms if rows[norm.name] is None], settled)
    rows |= {row.name: row for row in decisions.layers}
    layers = tuple(row for row in rows.values() if row is not None)
    patterns = {"only": [pattern.pattern for pattern in included], "skip": [pattern.pattern for pattern in excluded]}
    record = {**patterns, "source": sorted(families), **settled.record()}
    result = Plan(to, layers, record, tuple(decisions.edits))
    if not result.converted:
        raise RetrofitError(_nothing_to_convert(model, families, norms, result))
    if converter.takes_activations and not result.proxied and (converter.identity or result.activations):
        plainer = to.removesuffix("-pn") if converter.identity else "gn"
        why = result.activations or "none follows a norm"
        raise RetrofitError(f"{to} would convert no activation: {why}; use `to={plainer!r}`, which leaves them alone")
    return result, decisions.sites


def _listed(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _patterns(name: str, patterns: Patterns, norms: Sequence[NormLayer]) -> list[re.Pattern[str]]:
    """Compile the patterns of an argument, each of which has to match a layer."""
    compiled = []
    for pattern in _listed(patterns):
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(
                f"`{name}={pattern!r}` is not a regular expression ({one_line(error)}); escape or mend it"
            ) from None
        if not any(compiled[-1].search(norm.name) for norm in norms):
            raise RetrofitError(
                f"`{name}={pattern!r}` matches none of the {plural(len(norms), 'layer')}; "
                "`named_modules()` and `retrofit inspect` list their names"
            )
    return compiled


def _row_by_rule(
    norm: NormLayer,
    to: str,
    converter: Converter,
    families: frozenset[str],
    only: Sequence[re.Pattern[str]],
    skip: Sequence[re.Pattern[str]],
) -> LayerRow | None:
    """Return the row of a layer that the caller's rules leave as it is; None to ask the converter."""
    if norm.family is not None and norm.family not in families:
        hint = ""
        if norm.family in converter.sources:
            hint = f" here (name {norm.family!r} in `source` too)"
        elif norm.family == "frozen-bn":
            hint = " (frozen, gn, ln, gn-pn and ln-pn take it; timm.layers.unfreeze_batch_norm_2d makes it BatchNorm)"
        return norm.row("kept", f"{norm.family_name} is not a source of {to}{hint}")
    if only and not any(pattern.search(norm.name) for pattern in only):
        return norm.row("kept", "not matched by `only`")
    for pattern in skip:
        if pattern.search(norm.name):
            return norm.row("kept", f"matched by `skip={pattern.pattern!r}`")
    return None if norm.status == "known" else norm.row(norm.status, norm.reason)


def _nothing_to_convert(model: nn.Module, families: frozenset[str], norms: Sequence[NormLayer], result: Plan) -> str:
    sources = " or ".join(FAMILIES[family] for family in sorted(families))
    if not norms:
        called = "".join(f"; {note}" for note in functional_norms(model))
        return (
            f"{result.to} converts {sources} layers, and this model has no normalization layer at all{called}; choose "
            "another model"
        )
    held = ", ".join(f"{n} {label}" for label, n in Counter(norm.label for norm in norms).most_common())
    others = [_USUAL[str(norm.family)] for norm in norms if norm.status == "known"]
    others = [target for target in others if target != result.to]
    if others and not any(norm.family in families for norm in norms):
        return (
            f"{result.to} converts {sources} layers, of which this model has none (it holds {held}); try "
            f"`to={others[0]!r}`"
        )
    reasons = "; ".join(dict.fromkeys(row.reason for row in result.layers if row.reason))
    return f"nothing to convert to {result.to} (the model holds {held}): {reasons}; `retrofit inspect MODEL` lists them"
