"""Carry out a plan on a network, whole or not at all."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from torch import fx, nn

from retrofit.errors import RetrofitError
from retrofit.graph.sites import Sites
from retrofit.layers import FrozenBatchNorm, ProxyNorm
from retrofit.layers.strength import strength_layers
from retrofit.record import record_of, set_record
from retrofit.surgery.families import find_norms
from retrofit.surgery.plan_and_report import Plan, Report
from retrofit.surgery.planning import converter_for, network_in
from retrofit.utils.running import device_of, kept_values, put_back
from retrofit.utils.text import plural

_FUSING_METHODS = ("fuse", "reparameterize", "switch_to_deploy", "fuse_model")


def apply(plan: Plan, model: nn.Module, sites: Sites | None = None) -> tuple[nn.Module, Report]:
    """Execute a plan, made for this model or one of the same structure, in place; new layers start
    at strength 0.

    Layers that were converted before keep their strength. Parameters are moved, not copied, so that
    an optimizer that holds them keeps working. `sites` are where the activations of the plan are,
    if they were found in this very model.

    Returned are the network to use (another object only if `model` itself is a normalization
    layer), and the report. A RetrofitError says that the model's layers are not those of the plan.
    Whatever is raised, or interrupts, leaves the model as it was.
    """
    if (inner := network_in(model)) is not model:
        converted, report = apply(plan, inner, sites)
        return model if converted is inner else converted, report
    converter = converter_for(plan.to)
    norms = {norm.name: norm for norm in find_norms(model)}
    planned = {row.name: row.source for row in plan.layers}
    actual = {name: norm.label for name, norm in norms.items()}
    for name in {**planned, **actual}:
        if planned.get(name) != actual.get(name):
            raise RetrofitError(
                f"the plan was made for another model: {name!r} is {planned.get(name, 'absent')} in the plan and "
                f"{actual.get(name, 'absent')} here; make a new plan"
            )
    record, device = record_of(model), device_of(model)
    params_before = sum(p.numel() for p in model.parameters())
    with unchanged_on_failure(model):
        if sites is None and plan.proxied:
            sites = converter.sites_of(model)
        places = {(site.norm, site.place): site for site in sites.sites} if sites else {}
        if lost := plan.proxied - {place for place, site in places.items() if site.activation}:
            raise RetrofitError(
                f"the plan was made for another model: here no activation follows {min(lost)[0]}; make a new plan"
            )
        built: dict[nn.Module, nn.Module] = {}
        for row in plan.converted:
            # a GroupNorm that stays, whose activation is converted
            if row.target == row.source:
                continue
            norm = norms[row.name]
            if norm.module not in built:
                tensors = chain(norm.layer.parameters(), norm.layer.buffers())
                own = next((tensor.device for tensor in tensors), device)
                built[norm.module] = converter.build(norm.layer, row, own)
            if not row.name:
                model = built[norm.module]
            else:
                model.set_submodule(row.name, built[norm.module])
        for module in model.modules():
            if isinstance(module, ProxyNorm) and module.norm in built:
                module.follow(built[module.norm])
        notes = [plan.activations] if plan.activations else []
        if thawed := sum(
            bool(source._buffers.keys() & new._parameters.keys()) for source, new in built.items()
        ):
            notes.append(
                f"gamma and beta of {plural(thawed, 'frozen layer')} were constants and are parameters now, which "
                "train: build the optimizer after the conversion"
            )
        notes += converter.finish(model, plan, places)
        notes += _call_the_norms(model, set(built.values()))
        for row in plan.converted:
            # other references to it may call it
            if (source := norms[row.name].module) in built:
                vars(source)["forward"] = partial(
                    _refuse,
                    f"the network calls the source of {row.name or 'the layer'}, which is converted, by a reference "
                    "of its own (from a list, or elsewhere besides its name); keep that layer with `skip`",
                )
        set_record(model, **{**vars(record), "plans": (*record.plans, plan)})
    strength = 0.0 if converter.has_strength and device.type != "meta" else None
    return model, Report(
        plan, params_before, sum(p.numel() for p in model.parameters()), strength, tuple(notes)
    )


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    """Take a method's place: a partial of a function of this module can be copied and pickled with
    the network.
    """
    raise RetrofitError(message)


def _call_the_norms(model: nn.Module, converted: set[nn.Module]) -> list[str]:
    """Let no block take the tensors of a converted layer in place of calling it; return notes for
    the report.

    Blocks refuse to fuse what is no affine map. torch's transformer in evaluation takes gamma and
    beta on a fast path, which has no switch: a layer takes it for the activations of this number
    alone, and an encoder that packs its tokens by their mask counts on its layers to take it.
    """
    fusing = packing = 0
    for module in model.modules():
        inside = converted.intersection(module.modules())
        methods = [name for name in _FUSING_METHODS if callable(getattr(type(module), name, None))]
        if methods and not all(isinstance(layer, FrozenBatchNorm) for layer in inside):
            fusing += 1
            for name in methods:
                vars(module)[name] = partial(
                    _refuse,
                    f"{type(module).__name__}.{name}() would fuse a converted layer as if it were its source; "
                    "re-parameterise before converting",
                )
        if inside and isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif inside and isinstance(module, nn.TransformerEncoder):
            packing += module.use_nested_tensor
            module.use_nested_tensor = False
    notes = []
    if fusing:
        notes.append(
            f"{plural(fusing, 'block')} can re-parameterise (fuse BatchNorm into convolutions); they now refuse to: "
            "the converted layers are no longer affine"
        )
    if packing:
        notes.append(
            f"{plural(packing, 'transformer encoder')} no longer packs tokens by their mask, with which torch calls no "
            "norm: in evaluation what it puts out for masked tokens is no longer 0"
        )
    return notes


def allow_fusing(model: nn.Module) -> None:
    """Let blocks fuse again that hold no layer with a strength any more."""
    for module in model.modules():
        if not strength_layers(module):
            for name in _FUSING_METHODS:
                if getattr(vars(module).get(name), "func", None) is _refuse:
                    del vars(module)[name]


@contextmanager
def unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Put `model` back as it was if what happens inside fails or is interrupted.

    Classes, attributes, children and hooks of every module are kept, the memory of every tensor,
    and the values of the normalization layers' own parameters, the only ones that a conversion
    writes to.
    """
    memory = [(tensor, tensor.data) for tensor in chain(model.parameters(), model.buffers())]
    modules = []
    for module in model.modules():
        tables = [
            (table, dict(table)) for table in vars(module).values() if isinstance(table, dict)
        ]
        modules.append((module, type(module), dict(vars(module)), tables))
    norms = {norm.module for norm in find_norms(model)}
    values = kept_values(tensor for norm in norms for tensor in norm.parameters(recurse=False))
    try:
        yield
    except BaseException:
        for tensor, data in memory:
            tensor.data = data
        for module, cls, attributes, tables in modules:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            for table, entries in tables:
                table.clear()
                table.update(entries)
            if isinstance(module, fx.GraphModule):
                # its graph is an attribute, the code made of it is not
                module.recompile()
        put_back(values)
        raise


def plans_of(model: nn.Module) -> list[Plan]:
    """Return the conversions that a network went through, in order."""
    return list(record_of(model).plans)


def replay(model: nn.Module, plans: Iterable[Plan]) -> nn.Module:
    """Repeat conversions on a network of the structure that they were made for; return the network
    to use.
    """
    for plan in plans:
        model, _ = apply(plan, model)
    return model
