"""Fold constants into the convolutions and linear layers of a captured graph, which shows who
uses what.

An affine map per channel (evaluation's batch normalization, products and sums with constants) goes
into the layer that computes its input, or into the one that takes its output. A whitening goes into
the convolution before it. A power transform becomes its exact form or an approximation. Each pass
leaves a graph that computes the same as before.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from retrofit.export.capture import Program
from retrofit.export.captured_graph import LINEAR, AffineMap, CapturedGraph
from retrofit.export.graph_nodes import ATEN, arguments, layer_of, shape_of, users_of
from retrofit.export.power_operator import POWER, Replacement, Transform
from retrofit.export.signature import refusing_other_calls
from retrofit.layers.constant_maps import ChannelMap, LinearMap

_NORM = ATEN._native_batch_norm_legit_no_training.default
_SUMS = {ATEN.add.Tensor: 1.0, ATEN.sub.Tensor: -1.0}
_PRODUCTS = {ATEN.mul.Tensor: 1.0, ATEN.div.Tensor: -1.0}
_COMMUTATIVE = {ATEN.add.Tensor, ATEN.mul.Tensor}


def fold_program(program: Program, fits: Mapping[Node, Replacement]) -> None:
    """Fold a captured program's constants in place, power transforms by `fits`; its `layers` say
    what each became.
    """
    graph = CapturedGraph(program)
    replace_power_transforms(graph, fits)
    for fold_pass in PASSES:
        fold_pass(graph)
    _remove_unused(graph)
    program.module = refusing_other_calls(graph.module, program.call)


def _remove_unused(graph: CapturedGraph) -> None:
    """Remove what nothing uses, but for inputs, checks and what writes to a tensor."""

    def must_stay(node: Node) -> bool:
        return node.op not in ("get_attr", "call_function") or node.is_impure()

    graph.graph.eliminate_dead_code(must_stay)


def replace_power_transforms(graph: CapturedGraph, fits: Mapping[Node, Replacement]) -> None:
    """Put a fit, or the exact form, in the place of each power transform."""
    for node in graph.graph.find_nodes(op="call_function", target=POWER):
        transform = Transform.of(graph.module, node)
        replacement = fits.get(node) or transform.exact_form()
        name = layer_of(node)
        scale = transform.sign * replacement.scale
        before = AffineMap(scale, replacement.shift, 1, frozenset([name]))
        x: Any = node.args[0]
        for part in (before, *replacement.parts):
            x = graph.insert(node, x, part)
        if graph.layers.get(name) != "frozen":
            graph.layers[name] = replacement.form
        if replacement.has_activation and transform.relu is not None:
            graph.replace(transform.relu, x)
        graph.replace(node, x)


def recognize_affine_maps(graph: CapturedGraph) -> None:
    """Make an affine map of each batch normalization, and of each sum and product with one constant
    for each channel.
    """
    for node in list(graph.graph.nodes):
        # A constant stays as it is: others may have been computed from it
        if graph.constant(node) is not None:
            continue
        recognized = _batch_norm(graph, node) or _arithmetic(graph, node)
        if recognized is None:
            continue
        x, affine = recognized
        name = layer_of(node)
        if name in graph.batch_norms:
            graph.layers.setdefault(name, "affine")
        graph.replace(node, graph.insert(node, x, affine))
    # A normalization of which nothing is left would count as a user of its input
    _remove_unused(graph)


def _batch_norm(graph: CapturedGraph, output: Node) -> tuple[Any, AffineMap] | None:
    """Return the input and the map of evaluation's batch normalization, by the node that takes its
    output, and not its statistics.
    """
    if output.target is not operator.getitem or output.args[1] != 0:
        return None
    norm: Any = output.args[0]
    if norm.target is not _NORM:
        return None
    values = arguments(norm)
    given = [values[name] for name in ("running_mean", "running_var", "weight", "bias")]
    constants: list[Any] = list(map(graph.constant, given))
    # Of an affine that is off, both are None
    if constants.count(None) > given.count(None):
        return None
    mean, var, weight, bias = constants
    constant_map = ChannelMap.of(mean, var, values["eps"], weight, bias)
    scale, shift = constant_map.affine()
    layers = frozenset([layer_of(norm)])
    return values["input"], AffineMap(scale, shift, 1, layers)


def _arithmetic(graph: CapturedGraph, node: Node) -> tuple[Any, AffineMap] | None:
    """Return the input and the map of a sum with, or a product by, one float32 constant for each
    channel.
    """
    if node.target not in (*_SUMS, *_PRODUCTS) or node.kwargs:
        return None
    x, operand = node.args
    if node.target in _COMMUTATIVE and graph.constant(x) is not None:
        x, operand = operand, x
    value = graph.constant(operand)
    if value is None or not isinstance(x, Node):
        return None
    dim = _channel_dim_of(value, x, node)
    if dim is None:
        return None
    scale, shift = _scale_and_shift(node.target, value.flatten().double())
    if not scale.isfinite().all():
        return None
    layers = frozenset([layer_of(node)])
    return x, AffineMap(scale, shift, dim, layers)


def _scale_and_shift(operator: Any, constant: Tensor) -> tuple[Tensor, Tensor]:
    """Return the map, (C,) each, of a sum with a constant or a product by it."""
    if operator in _SUMS:
        return torch.ones_like(constant), constant * _SUMS[operator]
    return constant ** _PRODUCTS[operator], torch.zeros_like(constant)


def _channel_dim_of(value: Tensor, x: Node, result: Node) -> int | None:
    """Return the dimension, 1 or the last, along which a float32 constant varies in an operation on
    `x`; None if it varies along another, or along several or none.
    """
    dtypes = {x.meta["val"].dtype, result.meta["val"].dtype, value.dtype}
    if dtypes != {torch.float32} or shape_of(x) != shape_of(result):
        return None
    rank = len(shape_of(x))
    sizes = enumerate(value.shape, rank - value.ndim)
    dims = [dim for dim, size in sizes if size != 1]
    if dims in ([1], [rank - 1]):
        return dims[0]
    return None


def merge_adjacent_maps(graph: CapturedGraph) -> None:
    """Merge an affine map into the one that alone takes its output."""
    for node, affine in graph.affine_maps():
        previous: Any = node.args[0]
        before = graph.affine_map(previous)
        if before is not None and before.dim == affine.dim and users_of(previous) == [node]:
            graph.set_module(node, before.then(affine))
            graph.replace(previous, previous.args[0])


def _producer_of(graph: CapturedGraph, node: Node) -> tuple[Any, LinearMap | None]:
    """Return the convolution or linear layer whose output a node alone takes, None if it is none."""
    producer: Any = node.args[0]
    layer = graph.linear(producer)
    if layer is None or users_of(producer) != [node]:
        return producer, None
    return producer, layer


def fold_into_producers(graph: CapturedGraph) -> None:
    """Fold an affine map into the layer whose output it alone takes."""
    for node, affine in graph.affine_maps():
        producer, layer = _producer_of(graph, node)
        if layer is None:
            continue
        groups, outputs = layer.weight.shape[:2]
        if _has_same_channels(producer, affine, groups * outputs):
            graph.set_linear(producer, layer.then(affine.scale, affine.shift))
            graph.replace(node, producer)


def merge_whitenings(graph: CapturedGraph) -> None:
    """Merge a whitening (a convolution of kernel size 1 that gives as many channels in each group as
    it takes) into the layer before it.
    """
    layers = [node for node in graph.graph.nodes if node.target in LINEAR]
    for node in layers:
        producer, layer = _producer_of(graph, node)
        if layer is None:
            continue
        if _channel_dim(producer) != _channel_dim(node):
            continue
        matrix = _point_matrix(graph, node)
        if matrix is None:
            continue
        merged = layer.then_groups(matrix)
        if merged is None:
            continue
        graph.set_linear(producer, merged)
        name = layer_of(node)
        if graph.layers.get(name) == "group convolution":
            graph.layers[name] = "folded"
        graph.replace(node, producer)


def _point_matrix(graph: CapturedGraph, node: Node) -> LinearMap | None:
    """Return a layer of kernel size 1 with as many output as input channels in each group; None for
    others.
    """
    matrix = graph.linear(node)
    if matrix is None or matrix.transposed or matrix.pads_zeros:
        return None
    _, outputs, inputs, *size = matrix.weight.shape
    is_strided = set(arguments(node).get("stride", [1])) != {1}
    is_square = outputs == inputs and math.prod(size) == 1
    return matrix if is_square and not is_strided else None


def fold_into_consumers(graph: CapturedGraph) -> None:
    """Fold an affine map into the layer that alone takes its output, unless zeros that the layer
    pads with would have to be shifted too.
    """
    for node, affine in reversed(graph.affine_maps()):
        users = users_of(node)
        if len(users) != 1 or users[0].args[0] is not node:
            continue
        consumer = users[0]
        layer = graph.linear(consumer)
        if layer is None:
            continue
        groups, _, inputs = layer.weight.shape[:3]
        if not _has_same_channels(consumer, affine, groups * inputs):
            continue
        if not layer.pads_zeros or not affine.shift.any():
            graph.set_linear(consumer, layer.after(affine.scale, affine.shift))
            graph.replace(node, node.args[0])


def lower_affine_maps(graph: CapturedGraph) -> None:
    """Put operations in the place of the maps that are left, and note which layers are folded."""
    unfolded: set[str] = set()
    for node, affine in graph.affine_maps():
        if affine.is_identity:
            source = node.args[0]
            graph.replace(node, source)
        else:
            unfolded |= affine.layers
            operations = affine.lowered()
            graph.set_module(node, operations)
    forms = graph.layers
    for name, form in forms.items():
        is_folded = form == "affine" and name not in unfolded
        if is_folded:
            forms[name] = "folded"


def _channel_dim(node: Node) -> int:
    """Return the dimension that a convolution or linear layer mixes."""
    if node.target is ATEN.linear.default:
        return len(shape_of(node)) - 1
    return 1


def _has_same_channels(node: Node, affine: AffineMap, channels: int) -> bool:
    """Return whether a map is along the dimension of a layer's channels, and of as many."""
    return _channel_dim(node) == affine.dim and channels == len(affine.scale)


PASSES: tuple[Callable[[CapturedGraph], None], ...] = (
    recognize_affine_maps,
    merge_adjacent_maps,
    fold_into_producers,
    merge_whitenings,
    fold_into_consumers,
    lower_affine_maps,
)
"""The passes after the power transforms, in this order: a whitening takes in its affine map before
it is itself merged.
"""
