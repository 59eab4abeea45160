"""Carry out a plan on a network, whole or not at all."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
from torch import fx, nn

from retrofit.errors import RetrofitError
from retrofit.graph.norm_sites import Site, Sites
from retrofit.graph.rewrite import replace_module
from retrofit.layers import ProxyNorm
from retrofit.record import network_in, plans_of, set_record, unwrapped
from retrofit.surgery import bypass_guards
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.norm_layers import NormLayer, find_norms
from retrofit.surgery.plan_and_report import LayerRow, Plan, Report
from retrofit.utils.forward_pass import device_of
from retrofit.utils.snapshot import Snapshot
from retrofit.utils.text import plural


def apply(plan: Plan, model: nn.Module) -> tuple[nn.Module, Report]:
    """Carry out a plan in place, whole or not at all: whatever is raised, or interrupts, leaves the
    model as it was.

    The plan was made for this model or one of the same structure. New layers start at strength 0;
    layers that were converted before keep theirs. Parameters are moved, not copied, so that an
    optimizer that holds them keeps working.

    Returns:
        The network to use (another object only if `model` itself is a normalization layer), and the
        report.

    Raises:
        UsageError: If `model` is no network, or the plan's target is unknown.
        RetrofitError: If the model's layers are not those of the plan.
    """
    network = network_in(model)
    part = _part_of(network, plan)
    # `plans_of` sets `part` where a part was converted by itself; from here on, that is the model.
    part_plan = replace(plan, part="")
    converter = converter_for(plan.to)
    norms = list(find_norms(part))
    _check_layers(part_plan, norms)
    with unchanged_on_failure(network, norms):
        sites = None
        if plan.proxied:
            sites = converter.sites_of(part)
        converted, report = execute(part_plan, converter, part, norms, sites)
        if converted is part:
            return model, report
        if part is network:
            return converted, report
        _replace_part(network, part, converted)
        return model, report


def _replace_part(network: nn.Module, part: nn.Module, converted: nn.Module) -> None:
    """Put a converted part in the place of the part that it was made of."""
    names = (name for name, module in network.named_modules() if module is part)
    replace_module(network, next(names), converted)


def _part_of(network: nn.Module, plan: Plan) -> nn.Module:
    """Return the module that the plan's names start from."""
    try:
        return unwrapped(network.get_submodule(plan.part))
    except AttributeError:
        raise RetrofitError(
            f"the plan was made for another model: it converts {plan.part!r}, which is absent "
            "here; make a new plan"
        ) from None


def _check_layers(plan: Plan, norms: Sequence[NormLayer]) -> None:
    """Refuse a plan for layers of other names or classes."""
    planned = {row.name: row.source for row in plan.layers}
    actual = {norm.name: norm.label for norm in norms}
    names = {**planned, **actual}
    for name in names:
        if planned.get(name) != actual.get(name):
            in_plan = planned.get(name, "absent")
            here = actual.get(name, "absent")
            raise RetrofitError(
                f"the plan was made for another model: {name!r} is {in_plan} in the plan "
                f"and {here} here; make a new plan"
            )


def execute(
    plan: Plan,
    converter: Converter,
    model: nn.Module,
    norms: Sequence[NormLayer],
    sites: Sites | None,
) -> tuple[nn.Module, Report]:
    """The steps of `apply`, on layers and sites that the caller found; what is raised leaves the
    model half done.

    Args:
        plan: The plan.
        converter: The converter of its target.
        model: The network.
        norms: All its normalization layers.
        sites: Where the activations of the plan are; None for a plan that touches none.

    Returns:
        The network to use, and the report.

    Raises:
        RetrofitError: If an activation of the plan is absent.
    """
    # If the network is itself a layer, its successor adopts the record with its attributes.
    earlier = plans_of(model)
    set_record(model, plans=(*earlier, plan))
    device = device_of(model)
    params_before = _count_parameters(model)
    sites_by_call = _sites_by_call(plan, sites)
    layers = {norm.name: norm for norm in norms}
    rows = [row for row in plan.converted if not converter.converts_in_place(layers[row.name])]
    built = _build(converter, rows, layers, device)
    sources = {row.name: layers[row.name].module for row in rows}
    for name, source in sources.items():
        if not name:
            model = built[source]
        else:
            model.set_submodule(name, built[source])
    _have_proxies_follow(model, built)
    converted = set(built.values())
    bypass_guards.keep_transformer_off_its_fast_path(model, converted)
    notes = [
        plan.note_on_activations,
        _note_on_thawed(built),
        *converter.finish(model, plan, sites_by_call),
        bypass_guards.refuse_fusing(model, converted),
        bypass_guards.stop_packing_of_masked_tokens(model, converted),
    ]
    bypass_guards.refuse_calls_of_sources(sources)
    has_strength = converter.has_strength and device.type != "meta"
    strength = 0.0 if has_strength else None
    sentences = tuple(filter(None, notes))
    return model, Report(plan, params_before, _count_parameters(model), strength, sentences)


def _sites_by_call(plan: Plan, sites: Sites | None) -> dict[tuple[str, int], Site]:
    """Return the sites by norm and call; refuse a plan for an activation that is absent."""
    if sites is None:
        return {}
    sites_by_call = {(site.norm, site.call_index): site for site in sites.sites}
    followed = {call for call, site in sites_by_call.items() if site.activation is not None}
    lost = plan.proxied - followed
    if lost:
        raise RetrofitError(
            f"the plan was made for another model: here no activation follows {min(lost)[0]}; make "
            "a new plan"
        )
    return sites_by_call


def _build(
    converter: Converter,
    rows: Sequence[LayerRow],
    layers: dict[str, NormLayer],
    device: torch.device,
) -> dict[nn.Module, nn.Module]:
    """Return the new layer for each source, on the source's device, or on `device` if the source
    holds no tensors.
    """
    built: dict[nn.Module, nn.Module] = {}
    for row in rows:
        norm = layers[row.name]
        if norm.module in built:
            continue
        tensors = chain(norm.layer.parameters(), norm.layer.buffers())
        home = next((tensor.device for tensor in tensors), device)
        built[norm.module] = converter.build(norm.layer, row, home)
    return built


def _have_proxies_follow(model: nn.Module, built: dict[nn.Module, nn.Module]) -> None:
    """Tell the proxies of an earlier conversion which layers took their norms' places."""
    for module in model.modules():
        if isinstance(module, ProxyNorm) and module.norm in built:
            module.follow(built[module.norm])


def _note_on_thawed(built: dict[nn.Module, nn.Module]) -> str:
    thawed = sum(bool(old._buffers.keys() & new._parameters.keys()) for old, new in built.items())
    if not thawed:
        return ""
    return (
        f"gamma and beta of {plural(thawed, 'frozen layer')} were constants and are parameters "
        "now, which train: build the optimizer after the conversion"
    )


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def unchanged_on_failure(model: nn.Module, norms: Iterable[NormLayer]) -> Iterator[None]:
    """Put `model` back as it was if what happens inside fails or is interrupted.

    A conversion writes to the own parameters of the normalization layers, `norms`, and to the
    values of no other parameter or buffer.
    """
    written = {parameter for norm in norms for parameter in norm.module.parameters(recurse=False)}
    tensors = chain(model.parameters(), model.buffers())
    snapshot = Snapshot(model, unwritten=[tensor for tensor in tensors if tensor not in written])
    try:
        yield
    except BaseException:
        snapshot.restore()
        for module in model.modules():
            if isinstance(module, fx.GraphModule):
                # Its graph was put back as an attribute; its code is generated from it.
                module.recompile()
        raise


def unrepeated(plans: Iterable[Plan], model: nn.Module) -> list[Plan]:
    """Return the plans that a network has not gone through: its code may build it of parts that are
    converted already.

    Plans are the same if their decisions are; the numbers in them depend on the weights.
    """
    past_decisions = [_decisions(plan) for plan in plans_of(model)]
    return [plan for plan in plans if _decisions(plan) not in past_decisions]


def _decisions(plan: Plan) -> tuple[str, str, list[tuple[str, str, str | None]]]:
    return plan.to, plan.part, [(row.name, row.source, row.target) for row in plan.layers]


def replay(model: nn.Module, plans: Iterable[Plan]) -> nn.Module:
    """Repeat conversions on a network of the structure that they were made for; return the network
    to use.
    """
    for plan in plans:
        model, _ = apply(plan, model)
    return model
