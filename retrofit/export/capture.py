"""Capture what a network computes in evaluation: its layers as inference forms, traced once by torch.export.

The power transform is one node of the captured graph, `retrofit::power`, so that it can be approximated; all else is
plain ATen.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from retrofit.errors import RetrofitError
from retrofit.inputs import Call, is_detector
from retrofit.layers import ProxyNorm
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.forms import EstimatedTransform, GroupConvolution, MigratedForm, TwoBranch
from retrofit.layers.frozen_batch_norm import PlainAffine
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery.families import find_norms
from retrofit.utils.running import copied, device_of, silence
from retrofit.utils.text import cause_of

ATEN = torch.ops.aten
_KINDS = {
    EstimatedTransform: "estimated",
    MigratedForm: "group",
    TwoBranch: "two branches",
    GroupConvolution: "group convolution",
}


@torch.library.custom_op("retrofit::power", mutates_args=())
def power(h: Tensor, lmbda: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return gamma * psi(h; lambda) + beta of standardised values (N, C, *), with (C,) constants."""
    return TwoBranch(lmbda, gamma, beta)(h).contiguous()


power.register_fake(lambda h, *_: torch.empty_like(h, memory_format=torch.contiguous_format))
POWER = torch.ops.retrofit.power.default


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
    lambdas: Mapping[str, float] | None = None,
) -> Program:
    """Capture a network with an example call; it is not changed.

    The number of samples may vary unless `batch` fixes it; with `dynamic_size` what lies behind the channels may too.
    `lambdas`, by layer and strength included, take the place of estimates.
    """
    net = copied(model).float().eval().requires_grad_(False)
    call = call.resized(batch or max(2, call.batch)).to(device_of(net), torch.float32)
    batch_norms = frozenset(norm.name for norm in find_norms(net) if norm.family in ("bn", "frozen-bn"))
    shapes = torch.export.ShapesCollection()
    for x in call.tensors:
        dims = [0] if batch is None and x.ndim and len(x) == call.batch else []
        dims += range(2, x.ndim) if dynamic_size else []
        shapes[x] = dict.fromkeys(dims, torch.export.Dim.DYNAMIC)
    program, powers = Program(net, call, shapes, batch_norms), []
    for name, layer in [(name, layer) for name, layer in net.named_modules() if isinstance(layer, ConvertedLayer)]:
        form = layer.inference_form()
        parts = list(form.modules())
        default = "normalization" if layer.affine_map() is None else "affine"
        kind = next((kind for cls, kind in _KINDS.items() if any(type(part) is cls for part in parts)), default)
        for part in parts:
            if lambdas is not None and name in lambdas and isinstance(part, EstimatedTransform):
                part.freeze(lambdas[name])
                kind = "frozen"
        if isinstance(layer, ProxyNorm | WeightStandardization | PlainAffine):
            kind = ""  # it is no normalization
        if "forward" in vars(layer):  # somebody's own
            program.layers[name] = "kept"
        else:
            vars(layer)["forward"] = partial(_by_form, form, program.layers, name, kind)
            powers += [part for part in form.modules() if isinstance(part, TwoBranch)]
    if is_detector(model):
        program.note = "detectors sort and suppress boxes, which torch.export cannot capture"
        return program
    for part in powers:
        vars(part)["forward"] = lambda h, part=part: POWER(h, *part.constants)
    try:
        program.module = _exported(net, call, shapes).run_decompositions({}).module()
    except RetrofitError as error:
        program.note = str(error)
        return program
    finally:
        for part in powers:
            del vars(part)["forward"]
    for name in ("train", "eval"):  # they refuse, but the mode of a captured module does not matter
        vars(program.module).pop(name, None)
    for owner in program.module.modules():
        for name, value in list(vars(owner).items()):
            if isinstance(value, Tensor):  # a form's constant: as a buffer it moves with the module
                delattr(owner, name)
                owner.register_buffer(name, value)
    program.module.eval()
    return program


def _by_form(form: nn.Module, layers: dict[str, str], name: str, kind: str, x: Tensor) -> Any:
    """A layer's forward by its form, which notes that the layer is called, and what it has become so far."""
    if kind:
        layers[name] = kind
    return form.forward(x)


def _exported(net: nn.Module, call: Call, shapes: torch.export.ShapesCollection) -> torch.export.ExportedProgram:
    """Run torch.export; a RetrofitError says why it cannot capture the network."""
    try:
        with silence(), torch.no_grad():
            return torch.export.export(net, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises anything that the network's code does
        raise RetrofitError(f"torch.export cannot capture the network ({cause_of(error)})") from error


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of an ATen operator by name, in their order, defaults included."""
    expected = node.target._schema.arguments  # type: ignore[union-attr]
    values = dict(zip((argument.name for argument in expected), node.args, strict=False)) | node.kwargs
    return {argument.name: values.get(argument.name, argument.default_value) for argument in expected}


def users_of(node: Node) -> list[Node]:
    """Return the nodes that use a value; what only checks its type does not."""
    return [user for user in node.users if user.target is not ATEN._assert_tensor_metadata.default]


def shape_of(node: Node) -> tuple[Any, ...]:
    """Return the shape of a node's value."""
    return tuple(node.meta["val"].shape)


def layer_of(node: Node) -> str:
    """Return the name of the innermost module that a node comes from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def attribute_of(module: fx.GraphModule, node: Node) -> Any:
    """Return the value of a `get_attr` node."""
    return operator.attrgetter(str(node.target))(module)
