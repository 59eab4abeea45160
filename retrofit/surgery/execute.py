"""Carry out a plan on a network, and set the strength of what it converted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from retrofit.compare import Reference
from retrofit.conversion_options import takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Inputs, example_calls
from retrofit.layers import MigratedGroupNorm, ProxyNorm, StrengthMixin
from retrofit.record import record_of, set_record, unwrapped
from retrofit.surgery.converter import converter_for
from retrofit.surgery.families import NormLayer, find_norms
from retrofit.surgery.guards import guard
from retrofit.surgery.plan_and_report import Plan, Report
from retrofit.surgery.planning import Patterns, plan
from retrofit.surgery.restore import unchanged_on_failure
from retrofit.utils.placement import device_of
from retrofit.utils.text import plural, shortlist


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
    if (inner := unwrapped(model)) is not model:
        converted, report = apply(plan, inner)
        return model if converted is inner else converted, report
    converter = converter_for(plan.to)
    found = {layer.name: layer for layer in find_norms(model)}
    _check_structure(plan, found)
    record, before = record_of(model), _parameters(model)
    device = device_of(model)
    with unchanged_on_failure(model):
        surveyed = converter.survey(model, plan)
        built: dict[nn.Module, nn.Module] = {}
        names: dict[nn.Module, str] = {}
        for row in plan.layers:
            if row.status != "converted":
                continue
            module = found[row.name].module
            if module not in built:
                own = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), device)
                built[module] = converter.build(module, row, own)
                names[module] = row.name
            if not row.name:
                model = built[module]
            else:
                parent, _, leaf = row.name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, built[module])
        for proxied in (module for module in model.modules() if isinstance(module, ProxyNorm)):
            if proxied.norm in built:
                proxied.follow(built[proxied.norm])
        notes: tuple[str, ...] = (plan.activations,) if plan.activations else ()
        notes += converter.finish(model, plan, surveyed)
        notes += guard(model, set(built.values()))
        for source, name in names.items():  # a layer that stays is its own counterpart
            if built[source] is not source:
                vars(source)["forward"] = partial(_refuse_call, name)
        set_record(model, **{**vars(record), "plans": (*record.plans, plan)})
    strength = 0.0 if converter.has_strength and device.type != "meta" else None
    return model, Report(plan, before, _parameters(model), strength, notes)


def _refuse_call(name: str, *_: Any, **__: Any) -> NoReturn:
    """The forward of a converted layer's source."""
    raise RetrofitError(
        f"the network calls the source of {name or 'the layer'}, which is converted, by a reference of its own (from a "
        "list, or elsewhere besides its name); keep that layer with `skip`"
    )


def plans_of(model: nn.Module) -> list[Plan]:
    """Return the conversions that a network went through, in order."""
    return list(record_of(model).plans)


def replay(model: nn.Module, plans: Iterable[Plan]) -> nn.Module:
    """Repeat conversions on a network of the structure that they were made for; return the network to use."""
    for made in plans:
        model, _ = apply(made, model)
    return model


@takes_options
def convert(
    model: nn.Module,
    to: str = "bnn",
    *,
    only: Patterns = None,
    skip: Patterns = None,
    source: Patterns = None,
    check: bool = True,
    inputs: Inputs | None = None,
    input_size: Sequence[int] | None = None,
    **options: Any,
) -> tuple[nn.Module, Report]:
    """Plan, apply, and check that the network is still its source's function in evaluation.

    The check runs source and converted network on the same inputs, and compares outputs and layers. It leaves modes,
    buffers and random state as they were. Where it cannot run, a note of the report that begins `not checked:` says
    why.

    Args:
        model: Any network; converted in place.
        to: Target, a key of `TARGETS`.
        only: As for `plan`, as are the options.
        skip: As for `plan`.
        source: As for `plan`.
        check: Whether to check.
        inputs: What the network is run on: a tensor, a tuple of positional or a mapping of keyword arguments. If None,
            seeded random samples of `input_size`.
        input_size: Shape of one sample, (C, H, W); what the model says of itself if None, or 3 x 224 x 224.
        **options: See below.

    Returns:
        The network to use, and the report.

    Raises:
        UsageError: As `plan`.
        RetrofitError: As `plan`, or if the check fails, or the network does not take the `inputs` or the `input_size`
            that are given. The model is then unchanged.
    """
    if isinstance(model, nn.Module) and (inner := unwrapped(model)) is not model:
        network, report = convert(
            inner, to, only=only, skip=skip, source=source, check=check, input_size=input_size, **options
        )
        return model if network is inner else network, report
    made = plan(model, to, only=only, skip=skip, source=source, **options)
    converter = converter_for(to)
    with unchanged_on_failure(model):
        reference, reason = reference_of(model, inputs, input_size) if check else (None, "")
        model, report = apply(made, model)
        if reference is None:
            return model, replace(report, notes=(*report.notes, *([f"not checked: {reason}"] if reason else ())))
        if constant := _constant_layers(model, reference):
            raise RetrofitError(
                f"every group of {shortlist(constant)} would hold a single value, of which a normalization makes a "
                "constant; the model is left as it was: take fewer groups with `groups`, or keep them with `skip`"
            )
        result = reference.compare(model, layers=converter.identity)
        converted = {row.name for row in made.layers if row.status == "converted"}
        finite = math.isfinite(result.max_abs_diff)
        problem = result.problem() if converter.identity else "" if finite else _NOT_FINITE
        if problem:
            raise RetrofitError(
                f"{problem}; the model is left as it was: keep the layers concerned with `skip`, or pass `check=False` "
                "where it is known to amplify rounding errors"
            )
    notes = (*report.notes, *_uncalled_note(reference.uncalled & converted))
    if result.not_checked:
        return model, replace(report, notes=(*notes, str(result)))
    return model, replace(report, check=result, notes=notes)


_NOT_FINITE = "the converted network's outputs are not finite, or of another shape"


def reference_of(
    model: nn.Module, inputs: Inputs | None, input_size: Sequence[int] | None
) -> tuple[Reference | None, str]:
    """Run a network, to compare with it what becomes of it; or say why that cannot be.

    Raises:
        RetrofitError: If it does not take the inputs, or samples of the size, that are given.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors):
        return None, "in half precision rounding hides what the check looks for; convert in float32 to be sure"
    try:
        calls = example_calls(model, inputs, input_size)
        return Reference(model, calls, layers=[found.name for found in find_norms(model)]), ""
    except RetrofitError as error:
        if inputs is not None or input_size is not None:
            raise
        return None, str(error)


def _constant_layers(model: nn.Module, source: Reference) -> list[str]:
    """Return the names of the layers that normalize groups of one channel and one position."""
    found = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, MigratedGroupNorm))
    single = [name for name, layer in found if layer.num_groups == layer.num_channels]
    return [name for name in single if any(math.prod(shape[2:]) == 1 for shape in source.shapes[name])]


def _uncalled_note(names: set[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (
        f"not called in the check, before the conversion and after it: {plural(len(names), 'converted layer')} "
        f"({shortlist(sorted(names))}); only training calls such layers, or code that reads their tensors, for which "
        "nothing changes",
    )


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
