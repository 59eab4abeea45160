"""Capture what a network computes in evaluation: its layers as inference forms, traced once by torch.export.

The power transform is one node of the captured graph, `retrofit::power`, so that it can be approximated; all else is
plain ATen.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map, tree_map_only

from retrofit.errors import RetrofitError
from retrofit.export.power_forms import FrozenTransform
from retrofit.export.silence import cause_of, silence
from retrofit.inputs import Call, is_detector
from retrofit.layers import ProxyNorm
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.forms import EstimatedTransform, GroupConvolution, MigratedForm, TwoBranch
from retrofit.layers.frozen_batch_norm import PlainAffine
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery.families import find_norms
from retrofit.utils.evaluating import copied
from retrofit.utils.placement import device_of

_KINDS = {
    FrozenTransform: "frozen",
    EstimatedTransform: "estimated",
    MigratedForm: "group",
    TwoBranch: "two branches",
    GroupConvolution: "group convolution",
}


@dataclass
class Program:
    """What a network computes in evaluation, in float32 and without gradients.

    Attributes:
        module: The captured module, of ATen operations; where the network could not be captured, a copy of it whose
            layers compute by their forms.
        call: What it was captured with.
        shapes: What torch.export is told of the dimensions of `call` that may vary.
        batch_norms: The names of the BatchNorms that are no layers of ours.
        layers: What each normalization layer that is called has become, by name: see `FoldedLayer`.
        note: Why the network was not captured; empty if it was.
    """

    module: Any
    call: Call
    shapes: Any
    batch_norms: frozenset[str]
    layers: dict[str, str] = field(default_factory=dict)
    note: str = ""

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
    lambdas: Mapping[str, float] | None = None,
) -> Program:
    """Capture a network with an example call.

    Args:
        model: Any network, converted or not; it is not changed.
        call: The example.
        batch: The number of samples, fixed; None lets it vary.
        dynamic_size: Whether what lies behind the channels of each input may vary too.
        lambdas: lambda, strength included, that layers take instead of their estimates, by name.

    Returns:
        The program; one with a note where torch.export cannot capture the network.
    """
    net = copied(model).float().eval().requires_grad_(False)
    call = placed(with_rows(call, batch or max(2, call.batch)), device_of(net), torch.float32)
    batch_norms = frozenset(norm.name for norm in find_norms(net) if norm.family in ("bn", "frozen-bn"))
    program = Program(net, call, _shapes(call, batch is None, dynamic_size), batch_norms)
    named = {layer: name for name, layer in net.named_modules() if isinstance(layer, ConvertedLayer)}
    forms = {layer: _form(layer, (lambdas or {}).get(name)) for layer, name in named.items()}
    for layer, name in named.items():
        if "forward" in vars(layer):  # somebody's own
            program.layers[name] = "kept"
        else:
            kind = _kind(layer, forms[layer])
            vars(layer)["forward"] = partial(_noting, forms[layer], program.layers, name, kind)
    if is_detector(model):
        program.note = "detectors sort and suppress boxes, which torch.export cannot capture"
        return program
    try:
        with _powers_as_nodes(forms.values()):
            exported = _exported(net, call, program.shapes).run_decompositions({})
    except RetrofitError as error:
        program.note = str(error)
        return program
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


def _noting(form: nn.Module, layers: dict[str, str], name: str, kind: str, x: Tensor) -> Tensor:
    """Compute what a layer computes by its form, as the layer's own forward."""
    if kind:
        layers[name] = kind
    out: Tensor = form.forward(x)
    return out


def _form(layer: ConvertedLayer, lmbda: float | None) -> nn.Module:
    """Return what computes in the place of a layer: with a constant lambda, if one is given."""
    form = layer.inference_form()
    if lmbda is not None:
        for part in form.modules():
            if isinstance(part, EstimatedTransform):
                frozen = FrozenTransform(part, lmbda)
                part.add_module("frozen", frozen)
                vars(part)["forward"] = frozen.forward
    return form


def _kind(layer: ConvertedLayer, form: nn.Module) -> str:
    """Return what a layer has become if nothing is folded: see `FoldedLayer`; empty for what is no normalization."""
    if isinstance(layer, ProxyNorm | WeightStandardization | PlainAffine):
        return ""
    kinds = {type(part) for part in form.modules()}
    for part, kind in _KINDS.items():
        if part in kinds:
            return kind
    return "normalization" if layer.affine_map() is None else "affine"


@contextmanager
def _powers_as_nodes(forms: Iterable[nn.Module]) -> Iterator[None]:
    """Let the power transforms of some forms be single operations for a while."""
    powers = [part for form in forms for part in form.modules() if isinstance(part, TwoBranch)]
    for part in powers:
        vars(part)["forward"] = partial(_as_node, part.constants)
    try:
        yield
    finally:
        for part in powers:
            del vars(part)["forward"]


def _as_node(constants: tuple[Tensor, Tensor, Tensor], h: Tensor) -> Tensor:
    out: Tensor = torch.ops.retrofit.power(h, *constants)
    return out


def select_rows(call: Call, rows: Tensor) -> Call:
    """Return a call with some of its samples: rows of each tensor that has as many as the first."""
    batch = call.batch

    def selected(x: Tensor) -> Tensor:
        return x[rows.to(x.device)] if x.ndim and len(x) == batch else x

    return replace(call, args=tree_map_only(Tensor, selected, call.args), kwargs=_mapped(selected, call.kwargs))


def with_rows(call: Call, rows: int) -> Call:
    """Return a call with another number of samples, those of `call` in turn."""
    return call if rows == call.batch else select_rows(call, torch.arange(rows) % call.batch)


def placed(call: Call, device: torch.device, dtype: torch.dtype) -> Call:
    """Return a call whose tensors lie on a device, its floating-point numbers in a precision."""

    def moved(x: Tensor) -> Tensor:
        return x.detach().to(device, dtype if x.is_floating_point() else x.dtype)

    return replace(call, args=tree_map_only(Tensor, moved, call.args), kwargs=_mapped(moved, call.kwargs))


def _mapped(function: Callable[[Tensor], Tensor], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    mapped: dict[str, Any] = tree_map_only(Tensor, function, dict(kwargs))
    return mapped


def _shapes(call: Call, varies: bool, dynamic_size: bool) -> Any:
    """Return the dimensions that may vary, as torch.export takes them: the batch's, those behind the channels."""

    def of(x: Any) -> dict[int, Any] | None:
        if not isinstance(x, Tensor):
            return None
        dims = [0] if varies and x.ndim and len(x) == call.batch else []
        dims += range(2, x.ndim) if dynamic_size else []
        return dict.fromkeys(dims, torch.export.Dim.DYNAMIC)

    return tree_map(of, (call.args, dict(call.kwargs)))


def _exported(net: nn.Module, call: Call, shapes: Any) -> torch.export.ExportedProgram:
    """Run torch.export.

    Raises:
        RetrofitError: If it cannot capture the network.
    """
    args, kwargs = shapes
    try:
        with silence(), torch.no_grad():
            signature = inspect.signature(net.forward).bind(*args, **kwargs).arguments
            return torch.export.export(net, call.args, dict(call.kwargs), dynamic_shapes=dict(signature), strict=False)
    except Exception as error:  # torch.export raises anything that the network's code does
        raise RetrofitError(f"torch.export cannot capture the network ({cause_of(error)})") from error
