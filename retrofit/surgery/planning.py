"""Decide what becomes of every normalization layer, and say why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from retrofit.conversion_options import OPTIONS, ConversionOptions, takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.record import unwrapped
from retrofit.surgery.converter import Converter, Decision, converter_for
from retrofit.surgery.families import FAMILIES, NormLayer, find_norms
from retrofit.surgery.plan_and_report import LayerRow, Plan
from retrofit.utils.text import one_line, plural, shown

Patterns = str | Iterable[str] | None


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
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a torch.nn.Module is converted, not {shown(model)}; build the network first, as timm.create_model does"
        )
    model = unwrapped(model)
    converter = converter_for(to)
    only_patterns, skip_patterns = _compile("only", only), _compile("skip", skip)
    families = _families(source) or converter.sources
    if unknown := options.keys() - OPTIONS.keys():
        raise TypeError(f"plan() and convert() have no argument {', '.join(sorted(unknown))}; see help(retrofit.plan)")
    wanted = ConversionOptions(**options)
    wanted.check(to)
    found = list(find_norms(model))
    for name, patterns in (("only", only_patterns), ("skip", skip_patterns)):
        for pattern in patterns:
            if not any(pattern.search(layer.name) for layer in found):
                raise RetrofitError(
                    f"`{name}={pattern.pattern!r}` matches none of the {plural(len(found), 'layer')}; "
                    "`named_modules()` and `retrofit inspect` list their names"
                )
    ruled = {
        layer.name: _rule(layer, to, converter, families, only_patterns, skip_patterns) or layer for layer in found
    }
    decided = converter.plan(model, [entry for entry in ruled.values() if isinstance(entry, NormLayer)], wanted)
    rows = []
    for layer in found:
        entry = ruled[layer.name]
        fate = entry if isinstance(entry, Decision) else decided.layers[layer.name]
        rows.append(LayerRow(layer.name, layer.label, fate.target, fate.status, fate.reason, dict(fate.options)))
    asked = {
        "only": [p.pattern for p in only_patterns],
        "skip": [p.pattern for p in skip_patterns],
        "source": sorted(families),
        **wanted.record(),
    }
    made = Plan(to, tuple(rows), asked, decided.edits)
    if not made.counts["converted"]:
        raise RetrofitError(_nothing_to_convert(to, families, found, made))
    taken = any(row.kind == "activation" and row.status == "converted" for row in made.edits)
    if converter.takes_activations and not taken and (converter.identity or made.activations):
        plainer = to.removesuffix("-pn") if converter.identity else "gn"
        why = made.activations or "none follows a norm"
        raise RetrofitError(f"{to} would convert no activation: {why}; use `to={plainer!r}`, which leaves them alone")
    return made


def _rule(
    layer: NormLayer,
    to: str,
    converter: Converter,
    families: frozenset[str],
    only: list[re.Pattern[str]],
    skip: list[re.Pattern[str]],
) -> Decision | None:
    """What is decided about a layer before any converter is asked; None to ask."""
    if layer.family is not None and layer.family not in families:
        hint = ""
        if layer.family in converter.sources:
            hint = f" here (name {layer.family!r} in `source` too)"
        elif layer.family == "frozen-bn":
            hint = " (frozen, gn, ln, gn-pn and ln-pn take it; timm.layers.unfreeze_batch_norm_2d makes it BatchNorm)"
        return Decision("kept", reason=f"{FAMILIES[layer.family]} is not a source of {to}{hint}")
    if only and not any(pattern.search(layer.name) for pattern in only):
        return Decision("kept", reason="not matched by `only`")
    for pattern in skip:
        if pattern.search(layer.name):
            return Decision("kept", reason=f"matched by `skip={pattern.pattern!r}`")
    if layer.status == "kept":
        return Decision("kept", reason=layer.reason)
    if layer.status == "unsupported":
        return Decision("unsupported", reason=layer.reason)
    return None


def _compile(name: str, patterns: Patterns) -> list[re.Pattern[str]]:
    compiled = []
    for pattern in _listed(patterns):
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(
                f"`{name}={pattern!r}` is not a regular expression ({one_line(error)}); escape or mend it"
            ) from None
    return compiled


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


def _nothing_to_convert(to: str, families: frozenset[str], found: list[NormLayer], made: Plan) -> str:
    wanted = " or ".join(FAMILIES[family] for family in sorted(families))
    if not found:
        return f"{to} converts {wanted} layers, and this model has no normalization layer at all; choose another model"
    held = ", ".join(f"{n} {label}" for label, n in Counter(layer.label for layer in found).most_common())
    usual = {"bn": "bnn", "ln": "lnn", "gn": "gnn", "in": "inn", "frozen-bn": "frozen"}
    other = [usual[f] for f in dict.fromkeys(layer.family for layer in found if layer.status == "known") if f in usual]
    matching = [target for target in other if target != to]
    if matching and not any(layer.family in families for layer in found):
        return (
            f"{to} converts {wanted} layers, of which this model has none (it holds {held}); try `to={matching[0]!r}`"
        )
    reasons = "; ".join(dict.fromkeys(row.reason for row in made.layers if row.reason))
    return f"nothing to convert to {to} (the model holds {held}): {reasons}; `retrofit inspect MODEL` lists them"
