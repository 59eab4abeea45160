"""plan -> apply -> report: decide what becomes of every normalization layer, do it, and say what was done."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers import StrengthMixin
from retrofit.surgery import batch_independent, normality  # noqa: F401  (they register their targets)
from retrofit.surgery.census import FAMILIES, Found, find_norms
from retrofit.surgery.converters import Decision, Options, converter_for
from retrofit.surgery.records import LayerRow, Plan, Report

_FUSING_METHODS = ("fuse", "reparameterize", "switch_to_deploy", "fuse_model")

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
            "auto" picks per layer the most that keep its output, measured on `calibrate`. None for the paper's 8.
        noise: xi of the converted layers, for the normality targets; None for the paper's (0.4; LayerNorm 1.0).
        pn_params: For the -pn targets, learn ProxyNorm's own parameters beta~ and gamma~ (None: yes, as the paper).
        pn_restore: For the -pn targets, keep each channel at the mean and scale that the next layer was trained for
            (None: yes; False for training from scratch, as the paper).
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
    options = Options(groups, noise, pn_params, pn_restore, ws, calibrate)
    found = list(find_norms(model))
    for flag, patterns in (("only", only_patterns), ("skip", skip_patterns)):
        for pattern in patterns:
            if not any(pattern.search(layer.name) for layer in found):
                raise RetrofitError(
                    f"--{flag} {pattern.pattern!r} matches none of the {_plural(len(found), 'layer')}; "
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
        "pn_params": pn_params,
        "pn_restore": pn_restore,
        "ws": ws,
    }
    made = Plan(to, tuple(rows), asked, converter.edits(model, rows, options))
    if not made.counts["converted"]:
        raise RetrofitError(_nothing_to_convert(to, families, found, made))
    return made


def apply(plan: Plan, model: nn.Module) -> tuple[nn.Module, Report]:
    """Execute `plan` on `model`, in place, and seed the converted layers at strength 0.

    Parameters are moved, not copied: the network takes no second copy of its weights, and an optimizer that holds them
    keeps working.

    Args:
        plan: A plan made for this model or one of the same structure.
        model: The network to convert.

    Returns:
        The network to use (another object only if `model` itself is a normalization layer), and the report.

    Raises:
        RetrofitError: If the model's layers are not those of the plan; the model is then unchanged.
    """
    converter = converter_for(plan.to)
    found = {layer.name: layer for layer in find_norms(model)}
    _check_structure(plan, found)
    before = _parameters(model)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    converter.begin(model, plan)
    built: dict[int, nn.Module] = {}
    for row in plan.layers:
        if row.status != "converted":
            continue
        module = found[row.name].module
        if id(module) not in built:
            own = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), device)
            built[id(module)] = converter.build(module, row, own)
        if not row.name:
            model = built[id(module)]
        else:
            parent, _, leaf = row.name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, built[id(module)])
    notes = converter.finish(model, plan)
    notes += _guard_fusing(model, set(map(id, built.values())))
    history: list[Plan] = [*getattr(model, "_retrofit_plans", []), plan]
    model._retrofit_plans = history  # type: ignore[assignment]
    strength = None if device.type == "meta" else 0.0
    return model, Report(plan, before, _parameters(model), strength, notes)


def convert(model: nn.Module, to: str = "bnn", **options: Any) -> tuple[nn.Module, Report]:
    """Plan and apply in one go.

    Args:
        model: Any network; converted in place.
        to: Target, a key of `TARGETS`.
        **options: As for `plan`.

    Returns:
        The network to use, and the report.

    Raises:
        UsageError: As `plan`.
        RetrofitError: As `plan`.
    """
    return apply(plan(model, to, **options), model)


def set_strength(model: nn.Module, strength: float) -> int:
    """Set the strength of every converted layer of `model`: 0 is the source network, 1 the paper's.

    Args:
        model: A converted network.
        strength: t in [0, 1].

    Returns:
        How many layers were set.

    Raises:
        UsageError: If `strength` lies outside [0, 1].
        RetrofitError: If the model holds no converted layer.
    """
    converted = [module for module in model.modules() if isinstance(module, StrengthMixin)]
    if not converted:
        raise RetrofitError("the model holds no converted layer; convert it first")
    if not 0.0 <= strength <= 1.0:
        raise UsageError(f"strength must lie in [0, 1], not {strength}; 0 is the source network, 1 the paper's")
    for module in converted:
        module.set_strength(strength)
    return len(converted)


def strength_of(model: nn.Module) -> float | None:
    """Return the strength of `model`'s converted layers; None if it has none, or they are on the meta device.

    Raises:
        RetrofitError: If the layers differ in strength.
    """
    values = {
        module.strength.item()
        for module in model.modules()
        if isinstance(module, StrengthMixin) and not module.strength.is_meta
    }
    if len(values) > 1:
        raise RetrofitError(
            f"the converted layers differ in strength ({min(values)} to {max(values)}); set_strength first"
        )
    return values.pop() if values else None


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


def _check_structure(plan: Plan, found: dict[str, Found]) -> None:
    planned = {row.name: row.source for row in plan.layers}
    actual = {name: layer.label for name, layer in found.items()}
    if planned == actual:
        return
    differing = [name for name in {**planned, **actual} if planned.get(name) != actual.get(name)]
    first = differing[0]
    raise RetrofitError(
        f"the plan was made for another model: {_plural(len(differing), 'normalization layer')} differ, first "
        f"{first!r} ({planned.get(first, 'absent')} in the plan, {actual.get(first, 'absent')} here); make a new plan"
    )


def _guard_fusing(model: nn.Module, converted: set[int]) -> tuple[str, ...]:
    """Make methods that would fuse a converted layer as if it were its source refuse instead."""
    blocks = 0
    for module in model.modules():
        methods = [name for name in _FUSING_METHODS if callable(getattr(type(module), name, None))]
        if methods and any(id(child) in converted for child in module.modules()):
            blocks += 1
            for name in methods:
                vars(module)[name] = functools.partial(_refuse, type(module).__name__, name)
    if not blocks:
        return ()
    return (
        f"{_plural(blocks, 'block')} can re-parameterise (fuse BatchNorm into convolutions); they now refuse to: "
        "the converted layers are no longer affine",
    )


def _refuse(block: str, method: str, *_: Any, **__: Any) -> NoReturn:
    raise RetrofitError(
        f"{block}.{method}() would fuse a converted layer as if it were its source; re-parameterise before converting"
    )


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
