"""Carry out a plan on a network, and set the strength of what it converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers import ProxyNorm, StrengthMixin
from retrofit.record import record_of, set_record
from retrofit.surgery import guards
from retrofit.surgery.converter import converter_for
from retrofit.surgery.families import NormLayer, find_norms
from retrofit.surgery.plan_and_report import Plan, Report
from retrofit.surgery.restore import unchanged_on_failure
from retrofit.utils.placement import device_of
from retrofit.utils.text import plural


def apply(plan: Plan, model: nn.Module) -> tuple[nn.Module, Report]:
    """Execute `plan` on `model`, in place, and seed the layers that it converts at strength 0.

    Layers that were converted before keep their strength: the network is then its source as that stood.

    Parameters are moved, not copied: the network takes no second copy of its weights, and an optimizer that holds them
    keeps working.

    Args:
        plan: A plan made for this model or one of the same structure.
        model: The network to convert.

    Returns:
        The network to use (another object only if `model` itself is a normalization layer), and the report.

    Raises:
        RetrofitError: If the model's layers are not those of the plan. Whatever is raised, or interrupts, leaves the
            model as it was.
    """
    if (inner := guards.network_in(model)) is not model:
        converted, report = apply(plan, inner)
        return model if converted is inner else converted, report
    converter = converter_for(plan.to)
    norms = {norm.name: norm for norm in find_norms(model)}
    _check_structure(plan, norms)
    before, record = _parameters(model), record_of(model)
    device = device_of(model)
    with unchanged_on_failure(model):
        survey = converter.survey(model, plan)
        built: dict[nn.Module, Any] = {}
        for row in plan.layers:
            if row.status != "converted":
                continue
            norm = norms[row.name]
            if norm.module not in built:
                own = next((tensor.device for tensor in (*norm.layer.parameters(), *norm.layer.buffers())), device)
                new = converter.build(norm.layer, row, own)
                built[norm.module] = norm.module if new is norm.layer else new
            model = _put(model, row.name, built[norm.module])
        for proxied in (module for module in model.modules() if isinstance(module, ProxyNorm)):
            if proxied.norm in built:
                proxied.follow(built[proxied.norm])
        notes = [plan.activations] if plan.activations else []
        notes += _thawed_note(built)
        notes += converter.finish(model, plan, survey)
        changed = {source: new for source, new in built.items() if new is not source}
        notes += guards.refuse_fusing(model, set(changed.values()))
        notes += guards.call_the_norms(model, set(changed.values()))
        guards.refuse_calls({norm.module: norm.name for norm in norms.values() if norm.module in changed})
        set_record(model, **{**vars(record), "plans": (*record.plans, replace(plan, sites=None))})
    strength = 0.0 if converter.has_strength and device.type != "meta" else None
    return model, Report(plan, before, _parameters(model), strength, tuple(notes))


def _put(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Put a layer in the place of the one of a name; return the network, which is the layer itself for the root."""
    if not name:
        return layer
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)
    return model


def _thawed_note(built: Mapping[nn.Module, nn.Module]) -> tuple[str, ...]:
    """Say of how many layers gamma and beta were constants and are parameters now."""
    thawed = sum(bool(source._buffers.keys() & new._parameters.keys()) for source, new in built.items())
    if not thawed:
        return ()
    return (
        f"gamma and beta of {plural(thawed, 'frozen layer')} were constants and are parameters now, which train: build "
        "the optimizer after the conversion",
    )


def plans_of(model: nn.Module) -> list[Plan]:
    """Return the conversions that a network went through, in order."""
    return list(record_of(model).plans)


def replay(model: nn.Module, plans: Iterable[Plan]) -> nn.Module:
    """Repeat conversions on a network of the structure that they were made for; return the network to use."""
    for made in plans:
        model, _ = apply(made, model)
    return model


def set_strength(model: nn.Module, strength: float) -> int:
    """Set the strength of every converted layer of `model`: 0 is the source network, 1 the paper's.

    All of them get the same one, also those of a network that was converted in several goes; to set some, give the part
    of the network that holds them (`retrofit.set_strength(model.layer4, 0.5)`).

    Args:
        model: A converted network, or a part of one.
        strength: t in [0, 1].

    Returns:
        How many layers were set.

    Raises:
        UsageError: If `strength` lies outside [0, 1].
        RetrofitError: If the model holds no converted layer that has one.
    """
    converted = strength_layers(model)
    if not converted:
        raise RetrofitError("the model holds no converted layer that has a strength; convert it first")
    if not 0.0 <= strength <= 1.0:
        raise UsageError(f"strength must lie in [0, 1], not {strength}; 0 is the source network, 1 the paper's")
    for module in converted:
        module.set_strength(strength)
    return len(converted)


def strength_layers(model: nn.Module) -> list[StrengthMixin]:
    """Return the layers of `model` that have a strength, each once."""
    return [module for module in model.modules() if isinstance(module, StrengthMixin)]


def strength_of(model: nn.Module) -> float | None:
    """Return the strength of `model`'s converted layers; None if it has none, or they are on the meta device.

    Raises:
        RetrofitError: If the layers differ in strength.
    """
    values = {layer.strength.item() for layer in strength_layers(model) if not layer._code.is_meta}
    if len(values) > 1:
        raise RetrofitError(
            f"the converted layers differ in strength ({min(values)} to {max(values)}); set_strength first"
        )
    return values.pop() if values else None


def _check_structure(plan: Plan, found: dict[str, NormLayer]) -> None:
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


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
