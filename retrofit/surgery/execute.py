"""Carry out a plan on a network, and set the strength of what it converted."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers import StrengthMixin
from retrofit.surgery.census import Found, find_norms
from retrofit.surgery.converters import converter_for
from retrofit.surgery.planning import plan, plural
from retrofit.surgery.records import Plan, Report

_FUSING_METHODS = ("fuse", "reparameterize", "switch_to_deploy", "fuse_model")


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
    strength = 0.0 if converter.identity and device.type != "meta" else None
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
        RetrofitError: If the model holds no converted layer that has one.
    """
    converted = [module for module in model.modules() if isinstance(module, StrengthMixin)]
    if not converted:
        raise RetrofitError("the model holds no converted layer that has a strength; convert it first")
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


def _check_structure(plan: Plan, found: dict[str, Found]) -> None:
    planned = {row.name: row.source for row in plan.layers}
    actual = {name: layer.label for name, layer in found.items()}
    if planned == actual:
        return
    differing = [name for name in {**planned, **actual} if planned.get(name) != actual.get(name)]
    first = differing[0]
    raise RetrofitError(
        f"the plan was made for another model: {plural(len(differing), 'normalization layer')} differ, first "
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
        f"{plural(blocks, 'block')} can re-parameterise (fuse BatchNorm into convolutions); they now refuse to: "
        "the converted layers are no longer affine",
    )


def _refuse(block: str, method: str, *_: Any, **__: Any) -> NoReturn:
    raise RetrofitError(
        f"{block}.{method}() would fuse a converted layer as if it were its source; re-parameterise before converting"
    )


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
