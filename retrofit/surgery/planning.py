"""Decide what becomes of every normalization layer, and say why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.core import NoiseKind
from retrofit.layers.whitening import Whitening
from retrofit.surgery import batch_independent, decorrelated, normality, rivals  # noqa: F401  (they register their targets)
from retrofit.surgery.census import FAMILIES, Found, find_norms
from retrofit.surgery.converters import Decision, Options, converter_for
from retrofit.surgery.records import LayerRow, Plan

Patterns = str | Iterable[str] | None


def plan(
    model: nn.Module,
    to: str = "bnn",
    *,
    only: Patterns = None,
    skip: Patterns = None,
    source: Patterns = None,
    groups: int | Literal["auto"] | None = None,
    noise: float | None = None,
    noise_kind: NoiseKind | None = None,
    alpha: float | None = None,
    newton_steps: int | None = None,
    group_size: int | None = None,
    whitening: Whitening | None = None,
    pn_params: bool | None = None,
    pn_restore: bool | None = None,
    ws: bool | None = None,
    calibrate: Iterable[Tensor] | None = None,
) -> Plan:
    """Decide what a conversion would do to every normalization layer of `model`; change nothing.

    Args:
        model: Any network.
        to: Target, a key of `TARGETS`.
        only: Convert only layers whose name one of these regular expressions finds (`re.search`).
        skip: Keep layers whose name one of these finds.
        source: Families to convert ("bn", "ln", "gn", "in"); None for the target's own.
        groups: Most groups a layer gets, for the gn targets: it is the largest divisor of its channels up to that.
            "auto" picks per layer the most that keep its output, measured on `calibrate`. None for the paper's 8
            (evonorm-s0: 32).
        noise: xi of the converted layers, for the normality targets; None for the paper's (0.4; LayerNorm 1.0).
            0 for no noise.
        noise_kind: For the normality targets, "scaled" (None: this, the paper's), "unscaled" or "gaussian-dropout".
        alpha: For the normality targets, the degree of gaussianization; None for the paper's 1, 0 for no transform.
        newton_steps: For the normality targets, Newton iterations of the lambda estimate; None for the paper's 1.
        group_size: For dbn and dbnn, most channels that are whitened together: each layer takes the largest divisor of
            its channels up to that. None for the paper's 16.
        whitening: For dbn and dbnn, "eigen" (None: this) or "newton-schulz", IterNorm's approximation.
        pn_params: For the -pn targets, learn ProxyNorm's own parameters beta~ and gamma~ (None: yes, as the paper).
        pn_restore: For the -pn targets and `ws`, keep each channel at the mean and scale that the next layer was
            trained for (None: yes; False for training from scratch, as the paper).
        ws: For the gn and ln targets, also standardise the weights of the convolutions before the layers.
        calibrate: Batches of images, (N, C, H, W), for `groups="auto"`.

    Returns:
        The plan, which `apply` executes.

    Raises:
        UsageError: For an unknown target or family, an option out of range, or a pattern that does not compile.
        RetrofitError: If a pattern matches no layer, or nothing would be converted.
    """
    converter = converter_for(to)
    only_patterns, skip_patterns = _compile("only", only), _compile("skip", skip)
    families = _families(source) or converter.sources
    options = Options(
        groups=groups,
        noise=noise,
        noise_kind=noise_kind,
        alpha=alpha,
        newton_steps=newton_steps,
        group_size=group_size,
        whitening=whitening,
        pn_params=pn_params,
        pn_restore=pn_restore,
        ws=ws,
        calibrate=calibrate,
    )
    found = list(find_norms(model))
    for flag, patterns in (("only", only_patterns), ("skip", skip_patterns)):
        for pattern in patterns:
            if not any(pattern.search(layer.name) for layer in found):
                raise RetrofitError(
                    f"--{flag} {pattern.pattern!r} matches none of the {plural(len(found), 'layer')}; "
                    "list their names with `retrofit inspect`"
                )
    converter.prepare(model, found, options)
    rows = []
    for layer in found:
        decision = _rule(layer, to, families, only_patterns, skip_patterns) or converter.decide(layer, options)
        rows.append(
            LayerRow(layer.name, layer.label, decision.target, decision.status, decision.reason, dict(decision.options))
        )
    asked = {
        "only": [p.pattern for p in only_patterns],
        "skip": [p.pattern for p in skip_patterns],
        "source": sorted(families),
        "groups": groups,
        "noise": noise,
        "noise_kind": noise_kind,
        "alpha": alpha,
        "newton_steps": newton_steps,
        "group_size": group_size,
        "whitening": whitening,
        "pn_params": pn_params,
        "pn_restore": pn_restore,
        "ws": ws,
    }
    made = Plan(to, tuple(rows), asked, converter.edits(model, rows, options))
    if not made.counts["converted"]:
        raise RetrofitError(_nothing_to_convert(to, families, found, made))
    return made


def _rule(
    layer: Found, to: str, families: frozenset[str], only: list[re.Pattern[str]], skip: list[re.Pattern[str]]
) -> Decision | None:
    """What is decided about a layer before any converter is asked; None to ask."""
    if layer.family is not None and layer.family not in families:
        return Decision(
            "kept", reason=f"{FAMILIES[layer.family]} is not a source of {to} (--from {layer.family} adds it)"
        )
    if only and not any(pattern.search(layer.name) for pattern in only):
        return Decision("kept", reason="not matched by --only")
    for pattern in skip:
        if pattern.search(layer.name):
            return Decision("kept", reason=f"matched by --skip {pattern.pattern!r}")
    if layer.status == "kept":
        return Decision("kept", reason=layer.reason)
    if layer.status == "unsupported":
        return Decision("unsupported", reason=layer.reason)
    return None


def _compile(flag: str, patterns: Patterns) -> list[re.Pattern[str]]:
    compiled = []
    for pattern in _listed(patterns):
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(f"--{flag} {pattern!r} is not a regular expression ({error}); escape or mend it") from None
    return compiled


def _families(source: Patterns) -> frozenset[str]:
    families = frozenset(_listed(source))
    for family in families:
        if family not in FAMILIES:
            raise UsageError(f"unknown source family {family!r}; choose from {', '.join(FAMILIES)}")
    return families


def _listed(patterns: Patterns) -> list[str]:
    if patterns is None:
        return []
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _nothing_to_convert(to: str, families: frozenset[str], found: list[Found], made: Plan) -> str:
    wanted = " or ".join(FAMILIES[family] for family in sorted(families))
    if not found:
        return f"{to} converts {wanted} layers, and this model has no normalization layer at all; choose another model"
    held = ", ".join(f"{n} {label}" for label, n in Counter(layer.label for layer in found).most_common())
    usual = {"bn": "bnn", "ln": "lnn", "gn": "gnn", "in": "inn"}
    other = [usual[f] for f in dict.fromkeys(layer.family for layer in found if layer.status == "known") if f in usual]
    matching = [target for target in other if target != to]
    if matching and not any(layer.family in families for layer in found):
        return f"{to} converts {wanted} layers, of which this model has none (it holds {held}); try --to {matching[0]}"
    reasons = "; ".join(dict.fromkeys(row.reason for row in made.layers if row.reason))
    return f"nothing to convert to {to} (the model holds {held}): {reasons}; see `retrofit inspect MODEL --to {to}`"


def plural(n: int, noun: str) -> str:
    """Return the count with its noun."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
