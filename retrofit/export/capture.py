"""Capture what a network computes in evaluation: its layers as inference forms, traced once by torch.export.

The power transform is one node of the captured graph, `retrofit::power`, so that it can be approximated; all else is
plain ATen.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import RetrofitError
from retrofit.export.power_forms import POWER
from retrofit.inputs import Call, is_detector
from retrofit.layers import ProxyNorm
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.forms import EstimatedTransform, GroupConvolution, MigratedForm, TwoBranch
from retrofit.layers.frozen_batch_norm import PlainAffine
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery.families import find_norms
from retrofit.utils.running import copied, device_of, silence
from retrofit.utils.text import cause_of

_KINDS = {
    EstimatedTransform: "estimated",
    MigratedForm: "group",
    TwoBranch: "two branches",
    GroupConvolution: "group convolution",
}


@dataclass
class Program:
    """What a network computes in evaluation, in float32 and without gradients."""

    module: Any  # of ATen operations; if it could not be captured, a copy whose layers compute by their forms
    call: Call
    shapes: torch.export.ShapesCollection  # the dimensions of `call` that may vary
    batch_norms: frozenset[str]  # those that are no layers of ours
    layers: dict[str, str] = field(default_factory=dict)  # what each that is called has become: see `FoldedLayer`
    note: str = ""  # why the network was not captured

    def exported(self) -> torch.export.ExportedProgram:
        """Capture the module again, as it is now, without the checks of its input."""
        graph = copy.deepcopy(self.module.graph)
        for node in graph.find_nodes(op="call_module", target="_guards_fn"):
            graph.erase_node(node)
        return _exported(fx.GraphModule(self.module, graph), self.call, self.shapes)


def capture(
    model: nn.Module,
    call: Call,
    *,
    batch: int | None = None,
    dynamic_size: bool = False,
    lambdas: Mapping[str, float] = MappingProxyType({}),
) -> Program:
    """Capture a network with an example call; it is not changed.

    The number of samples may vary unless `batch` fixes it; with `dynamic_size` what lies behind the channels may too.
    `lambdas`, by layer and strength included, take the place of estimates.
    """
    net = copied(model).float().eval().requires_grad_(False)
    call = call.resized(batch or max(2, call.batch)).to(device_of(net), torch.float32)
    batch_norms = frozenset(norm.name for norm in find_norms(net) if norm.family in ("bn", "frozen-bn"))
    program = Program(net, call, _shapes(call, batch is None, dynamic_size), batch_norms)
    named = {layer: name for name, layer in net.named_modules() if isinstance(layer, ConvertedLayer)}
    forms = {layer: layer.inference_form() for layer in named}
    for layer, name in named.items():
        kind = _kind(layer, forms[layer])
        for part in forms[layer].modules():
            if name in lambdas and isinstance(part, EstimatedTransform):
                part.freeze(lambdas[name])
                kind = "frozen"
        if "forward" in vars(layer):  # somebody's own
            program.layers[name] = "kept"
        else:
            vars(layer)["forward"] = partial(_by_form, forms[layer], program.layers, name, kind)
    if is_detector(model):
        program.note = "detectors sort and suppress boxes, which torch.export cannot capture"
        return program
    powers = [part for form in forms.values() for part in form.modules() if isinstance(part, TwoBranch)]
    for part in powers:
        vars(part)["forward"] = partial(POWER, **dict(zip(("lmbda", "gamma", "beta"), part.constants, strict=True)))
    try:
        exported = _exported(net, call, program.shapes).run_decompositions({})
    except RetrofitError as error:
        program.note = str(error)
        return program
    finally:
        for part in powers:
            del vars(part)["forward"]
    program.module = exported.module()
    for name in ("train", "eval"):  # they refuse, but the mode of a captured module does not matter
        vars(program.module).pop(name, None)
    for owner in program.module.modules():
        for name, value in list(vars(owner).items()):
            if isinstance(value, Tensor):  # a form's constant: as a buffer it moves with the module
                delattr(owner, name)
                owner.register_buffer(name, value)
    program.module.eval()
    return program


def _by_form(form: nn.Module, layers: dict[str, str], name: str, kind: str, x: Tensor) -> Tensor:
    """A layer's forward by its form, which notes that the layer is called."""
    if kind:
        layers[name] = kind
    out: Tensor = form.forward(x)
    return out


def _kind(layer: ConvertedLayer, form: nn.Module) -> str:
    """Return what a layer has become if nothing is folded: see `FoldedLayer`; empty for what is no normalization."""
    if isinstance(layer, ProxyNorm | WeightStandardization | PlainAffine):
        return ""
    kinds = {type(part) for part in form.modules()}
    default = "normalization" if layer.affine_map() is None else "affine"
    return next((kind for part, kind in _KINDS.items() if part in kinds), default)


def _shapes(call: Call, varies: bool, dynamic_size: bool) -> torch.export.ShapesCollection:
    """Return the dimensions that may vary: the batch's, those behind the channels."""
    shapes = torch.export.ShapesCollection()
    for x in call.tensors:
        dims = [0] if varies and x.ndim and len(x) == call.batch else []
        dims += range(2, x.ndim) if dynamic_size else []
        shapes[x] = dict.fromkeys(dims, torch.export.Dim.DYNAMIC)
    return shapes


def _exported(net: nn.Module, call: Call, shapes: torch.export.ShapesCollection) -> torch.export.ExportedProgram:
    """Run torch.export; a RetrofitError says why it cannot capture the network."""
    try:
        with silence(), torch.no_grad():
            return torch.export.export(net, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises anything that the network's code does
        raise RetrofitError(f"torch.export cannot capture the network ({cause_of(error)})") from error
