"""Capture what a network computes in evaluation: its layers as inference forms, traced once by
torch.export.

The power transform is one node of the captured graph, `retrofit::power`; all else is plain ATen.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from retrofit.errors import RetrofitError
from retrofit.export.graph_nodes import ATEN
from retrofit.export.power_operator import POWER
from retrofit.export.signature import GUARDS, refusing_other_calls
from retrofit.inputs import Call
from retrofit.layers import ProxyNorm, inference_forms
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.frozen_batch_norm import PlainAffine
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery.norm_layers import find_norms
from retrofit.utils.forward_pass import copied_for_inference, device_of, random_states_kept, silence
from retrofit.utils.progress import announced_if_slow
from retrofit.utils.snapshot import left_as_it_was
from retrofit.utils.text import cause_of

_FORM_NAMES = {
    inference_forms.EstimatedTransform: "estimated",
    inference_forms.MigratedForm: "group",
    inference_forms.TwoBranch: "two branches",
    inference_forms.GroupConvolution: "group convolution",
}
NO_DETECTORS = "detectors sort and suppress boxes, which torch.export cannot capture"
# A layer whose forward is somebody's own
_KEPT = "kept"
# Converted layers that are no normalization: reports leave them out
_NO_NORMS = (ProxyNorm, WeightStandardization, PlainAffine)


@dataclass
class Program:
    """What a network computes in evaluation, in float32 and without gradients."""

    # Of ATen operations; if it could not be captured, a copy whose layers compute by their forms
    module: Any
    call: Call
    # The dimensions of `call` that may vary
    shapes: ShapesCollection
    # Names of the BatchNorm layers, frozen ones too
    batch_norms: frozenset[str]
    # What each normalization layer has become (see `FoldedLayer`). Layers that are never called are
    # left out, but for those with somebody's own forward.
    layers: dict[str, str] = field(default_factory=dict)
    # Why the network was not captured; empty if it was
    not_captured: str = ""

    def unconditional(self) -> fx.GraphModule:
        """Return the captured module, as it is now, without the checks of its input."""
        graph = copy.deepcopy(self.module.graph)
        for node in graph.find_nodes(op="call_module", target=GUARDS):
            graph.erase_node(node)
        return fx.GraphModule(self.module, graph)

    def exported(self) -> ExportedProgram:
        """Capture that again, for an ONNX file."""
        module = self.unconditional()
        for node in module.graph.find_nodes(op="call_function", target=ATEN.group_norm.default):
            node.target = _group_norm
        module.recompile()
        return _exported(module, self.call, self.shapes)


def capture(
    model: nn.Module,
    call: Call,
    *,
    batch: int | None = None,
    dynamic_size: bool = False,
    lambdas: Mapping[str, float] | None = None,
    is_detector: bool = False,
) -> Program:
    """Capture a network with an example call; it is not changed.

    Args:
        model: The network.
        call: The example call.
        batch: The number of samples that every call has; None if it may vary.
        dynamic_size: Whether the sizes behind the channels may vary.
        lambdas: By layer, a constant in place of its estimates of lambda, strength included.
        is_detector: Whether the network is a detector. Nothing is captured of it; its layers
            compute by their forms.
    """
    net = copied_for_inference(model)
    call = call.resized(batch or max(2, call.batch)).to(device_of(net), torch.float32)
    norms = find_norms(net)
    program = Program(
        module=net,
        call=call,
        shapes=_varying_shapes(call, batch is None, dynamic_size),
        batch_norms=frozenset(norm.name for norm in norms if norm.family in ("bn", "frozen-bn")),
    )
    form_names, powers = _put_forms(net, lambdas or {})
    if is_detector:
        program.not_captured = NO_DETECTORS
        return program
    try:
        with announced_if_slow("torch.export is capturing the network"), _one_node_each(powers):
            exported = _exported(net, call, program.shapes, functional=True)
    except RetrofitError as error:
        advice = "some networks need a fixed `batch=1`, or no `dynamic_size`"
        if len(call.tensors) > 1:
            advice += ", or `inputs` whose number of samples is no other size of theirs"
        program.not_captured = f"{error}; {advice}"
        return program
    module = exported.module()
    _take_any_layout(module)
    program.module = refusing_other_calls(module, call)
    called = _called_layers(program.module)
    program.layers = {
        name: form for name, form in form_names.items() if name in called or form == _KEPT
    }
    return program


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _cudnn_enabled: bool = True,
) -> Tensor:
    """Compute a group normalization that becomes ONNX's InstanceNormalization.

    ONNX's GroupNormalization computes a variance as E[x^2] - E[x]^2, which is negative by rounding
    for a flat image, and NaN then.
    """
    samples, channels = x.shape[:2]
    elements = math.prod(x.shape[2:])
    result, _, _ = torch.native_group_norm(
        x.contiguous(), weight, bias, samples, channels, elements, groups, eps
    )
    return result


def _varying_shapes(call: Call, any_batch: bool, dynamic_size: bool) -> ShapesCollection:
    shapes = ShapesCollection()
    samples = call.batch
    for x in call.tensors:
        dims: list[int] = []
        if dynamic_size:
            dims += range(2, x.ndim)
        has_batch = x.ndim and len(x) == samples
        if any_batch and has_batch:
            dims.append(0)
        shapes[x] = dict.fromkeys(dims, Dim.DYNAMIC)
    return shapes


def _put_forms(
    net: nn.Module, lambdas: Mapping[str, float]
) -> tuple[dict[str, str], list[nn.Module]]:
    """Let the converted layers of a network compute by their forms; return what each normalization
    becomes, and the power transforms in the forms.
    """
    names: dict[str, str] = {}
    powers: list[nn.Module] = []
    for name, layer in net.named_modules():
        if not isinstance(layer, ConvertedLayer):
            continue
        is_norm = not isinstance(layer, _NO_NORMS)
        attributes = vars(layer)
        # Somebody's own forward is another function than the form
        if "forward" in attributes:
            if is_norm:
                names[name] = _KEPT
            continue
        form = layer.inference_form()
        parts = list(form.modules())
        form_name = _form_name(layer, parts)
        if form_name == "estimated" and name in lambdas:
            form_name = "frozen"
            device = device_of(net)
            _freeze_estimates(parts, lambdas[name], device)
        if is_norm:
            names[name] = form_name
        attributes["forward"] = form.forward
        branches = [part for part in parts if isinstance(part, inference_forms.TwoBranch)]
        powers += branches
    return names, powers


def _form_name(layer: ConvertedLayer, parts: Sequence[nn.Module]) -> str:
    classes = set(map(type, parts))
    for form_class, form_name in _FORM_NAMES.items():
        if form_class in classes:
            return form_name
    if layer.affine_map() is None:
        return "normalization"
    return "affine"


def _freeze_estimates(parts: Sequence[nn.Module], lmbda: float, device: torch.device) -> None:
    for part in parts:
        if isinstance(part, inference_forms.EstimatedTransform):
            part.freeze(lmbda, device)


def _take_any_layout(module: Any) -> None:
    """Reshape tensors that the captured graph only views: in channels-last images, the same numbers
    may lie otherwise than in the example.
    """
    for node in module.graph.find_nodes(op="call_function", target=ATEN.view.default):
        node.target = ATEN.reshape.default


def _called_layers(module: fx.GraphModule) -> set[str]:
    """Return the names of the modules that the nodes of a captured graph come from."""
    return {
        str(name)
        for node in module.graph.nodes
        for name, _ in node.meta.get("nn_module_stack", {}).values()
    }


@contextmanager
def _one_node_each(powers: list[Any]) -> Iterator[None]:
    """Let power transforms be captured as one node each."""
    for part in powers:
        vars(part)["forward"] = lambda h, part=part: POWER(h, *part.constants)
    try:
        yield
    finally:
        for part in powers:
            del vars(part)["forward"]


def _exported(
    net: nn.Module,
    call: Call,
    shapes: ShapesCollection,
    functional: bool = False,
) -> ExportedProgram:
    """Run torch.export; with `functional`, no operation of the program writes to a tensor.

    Raises:
        RetrofitError: If the network cannot be captured.
    """
    try:
        states_kept = random_states_kept(device_of(net))
        with silence(), torch.no_grad(), left_as_it_was(net), states_kept:
            exported = torch.export.export(
                net, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=False
            )
            if functional:
                return exported.run_decompositions({})
            return exported
    # Capturing runs the network's code, which may raise anything.
    except Exception as error:
        raise RetrofitError(
            f"torch.export cannot capture the network ({cause_of(error)})"
        ) from error
