"""Fold constants into the convolutions and linear layers of a captured graph, where who uses what
is a fact.

An affine map per channel (evaluation's batch normalization, products and sums with constants) goes
into what computes its input or what takes its output; a whitening into the convolution before it.
Of a power transform a form is left.
"""

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.fx.node import map_arg

from retrofit.export.capture import (
    POWER,
    Fit,
    Program,
    Transform,
    arguments,
    layer_of,
    shape_of,
    users_of,
    value_of,
)
from retrofit.layers.constant_maps import ChannelMap, LinearMap
from retrofit.layers.forms import ChannelAffine, ConstantNorm

ATEN = torch.ops.aten
# stands for an `Affine` in a graph that is being folded
_AFFINE = operator.pos
_TRANSPOSED = {
    ATEN.conv_transpose1d.default,
    ATEN.conv_transpose2d.input,
    ATEN.conv_transpose3d.input,
}
_LINEAR = {ATEN.linear.default, *_TRANSPOSED}
_LINEAR |= {
    kind
    for conv in (ATEN.conv1d, ATEN.conv2d, ATEN.conv3d)
    for kind in (conv.default, conv.padding)
}
_NORM = ATEN._native_batch_norm_legit_no_training.default
_SUMS = {ATEN.add.Tensor: 1.0, ATEN.sub.Tensor: -1.0}
_PRODUCTS = {ATEN.mul.Tensor: 1.0, ATEN.div.Tensor: -1.0}


@dataclass(frozen=True)
class Affine:
    """scale * x + shift along a dimension: 1, or the last."""

    # (C,) in float64, as is `shift`
    scale: Tensor
    shift: Tensor
    dim: int = 1
    # that it is a part of
    layers: frozenset[str] = frozenset()
    # whether it may be written as a batch normalization
    is_norm: bool = False

    def then(self, other: "Affine") -> "Affine":
        """Return the map that applies this one, then the other."""
        shift = other.scale * self.shift + other.shift
        is_norm = self.is_norm or other.is_norm
        return Affine(
            self.scale * other.scale, shift, self.dim, self.layers | other.layers, is_norm
        )


def fold(program: Program, fits: Mapping[Node, Fit]) -> None:
    """Fold a captured program's constants in place, power transforms by `fits`; its `layers` say
    what each became.
    """
    folding = _Folding(program)
    for node in list(folding.graph.nodes):
        if node.target is POWER:
            found = Transform.of(folding.module, node)
            folding.replace_power(found, fits.get(node) or found.exact_form())
        elif node.target in _LINEAR:
            folding.merge_whitening(node)
        else:
            folding.fold_affine(node)
    for node in reversed(folding.graph.find_nodes(op="call_function", target=_AFFINE)):
        folding.fold_into_consumer(node)
    folding.lower_affine_maps()
    folding.graph.eliminate_dead_code(
        lambda node: node.op not in ("get_attr", "call_function") or node.is_impure()
    )
    module = folding.module
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    called = tuple(f"{node.target}." for node in module.graph.nodes if node.op == "call_module")
    held = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name in {name for name, _ in held if not name.startswith(called)} - used:
        owner, _, attribute = name.rpartition(".")
        delattr(module.get_submodule(owner), attribute)
    module.recompile()


class _Folding:
    """The graph of one program while it is folded."""

    def __init__(self, program: Program) -> None:
        self.layers, self.batch_norms = program.layers, program.batch_norms
        self.module: fx.GraphModule = program.module
        self.graph = self.module.graph
        self.maps: dict[Node, Affine] = {}
        self.folded: set[str] = set()
        self.added = 0
        self.constants: dict[
            Node, Any
            # what no input reaches, nothing writes to, and is not random
        ] = {}
        written = [
            node.args[0]
            for node in self.graph.find_nodes(op="call_function", target=ATEN.copy_.default)
        ]
        for node in self.graph.nodes:
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if node.op == "get_attr" and node not in written:
                self.constants[node] = value_of(self.module, node)
            pure = node.op == "call_function" and not random and not node.is_impure()
            if pure and self.constants.keys() >= set(node.all_input_nodes):
                args, kwargs = map_arg((node.args, node.kwargs), self.constants.__getitem__)
                self.constants[node] = node.target(*args, **kwargs)
        attributes = self.graph.find_nodes(op="get_attr")
        self.readers = Counter(
            _memory(value_of(self.module, node)) for node in attributes for _ in node.users
        )

    # Affine maps

    def fold_affine(self, node: Node) -> None:
        """Merge an operation that is an affine map per channel into the layer before it, or into a
        map before it.
        """
        norm: Any = node.args[0] if node.target is operator.getitem else None
        is_norm = norm is not None and norm.target is _NORM and node.args[1] == 0
        found = self._batch_norm(norm) if is_norm else self._arithmetic(node)
        if found is None:
            return
        if layer_of(node) in self.batch_norms:
            self.layers.setdefault(layer_of(node), "affine")
        self._replace(node, self._mapped(norm if is_norm else node, *found))
        if is_norm and not norm.users:
            self.graph.erase_node(norm)

    def _batch_norm(self, norm: Node) -> tuple[Node, Affine] | None:
        """Return the input and the map of evaluation's batch normalization."""
        values = arguments(norm)
        given = [values[name] for name in ("running_mean", "running_var", "weight", "bias")]
        constants: list[Any] = [self._constant(value) for value in given]
        if any(
            constant is None and value is not None
            for constant, value in zip(constants, given, strict=True)
        ):
            return None
        mean, var, weight, bias = constants
        scale, shift = ChannelMap.of(mean, var, values["eps"], weight, bias).affine()
        return values["input"], Affine(scale, shift, 1, frozenset([layer_of(norm)]), is_norm=True)

    def _arithmetic(self, node: Node) -> tuple[Node, Affine] | None:
        """Return the input and the map of a sum with, or a product by, one float32 constant for
        each channel.
        """
        if node.op != "call_function" or node.target not in (*_SUMS, *_PRODUCTS) or node.kwargs:
            return None
        commutes = node.target in (ATEN.add.Tensor, ATEN.mul.Tensor)
        place = 1 if commutes and self._constant(node.args[0]) is not None else 0
        x, value = node.args[place], self._constant(node.args[1 - place])
        if value is None or not isinstance(x, Node) or self._constant(x) is not None:
            return None
        shape = shape_of(x)
        dims = [dim for dim, size in enumerate(value.shape, len(shape) - value.ndim) if size != 1]
        same = x.meta["val"].dtype == node.meta["val"].dtype == value.dtype == torch.float32
        if (
            not same
            or shape != shape_of(node)
            or len(dims) != 1
            or dims[0] not in (1, len(shape) - 1)
        ):
            return None
        dim, vector = dims[0], value.flatten().double()
        scale = (
            torch.ones_like(vector) if node.target in _SUMS else vector ** _PRODUCTS[node.target]
        )
        shift = vector * _SUMS[node.target] if node.target in _SUMS else torch.zeros_like(vector)
        return (
            (x, Affine(scale, shift, dim, frozenset([layer_of(node)])))
            if scale.isfinite().all()
            else None
        )

    def _mapped(self, user: Node, x: Any, one: Affine) -> Any:
        """Return the node of a map of `x`, which `user` computes: the layer or map before it, if
        that can take it.
        """
        # until it is lowered
        self.folded |= one.layers
        before, feeder, alone = self.maps.get(x), self._linear(x), users_of(x) == [user]
        if alone and before is not None and before.dim == one.dim:
            self.maps[x] = before.then(one)
            return x
        if alone and feeder is not None and _fits(x, one, feeder.weight.shape[:2]):
            self._set(x, feeder.then(one.scale, one.shift))
            return x
        node = self._insert(user, "call_function", _AFFINE, x)
        self.maps[node] = one
        return node

    def fold_into_consumer(self, node: Node) -> None:
        """Fold a map into the layer that alone takes its output; where that puts zeros beside it,
        only the scale.
        """
        one, users = self.maps[node], users_of(node)
        consumer = self._linear(users[0]) if len(users) == 1 and users[0].args[0] is node else None
        if consumer is None or not _fits(users[0], one, consumer.weight.shape[:3:2]):
            return
        rest = torch.zeros_like(one.shift)
        if consumer.pads_zeros and bool(one.shift.any()):
            if one.is_norm or not bool((one.scale > 0).all()):
                return
            rest = one.shift / one.scale
        self._set(users[0], consumer.after(one.scale, one.shift if not rest.any() else 0 * rest))
        self.maps[node] = Affine(torch.ones_like(rest), rest, one.dim, one.layers)

    def lower_affine_maps(self) -> None:
        """Put operations in the place of the maps that are left, and note which layers are folded."""
        for node in self.graph.find_nodes(op="call_function", target=_AFFINE):
            one = self.maps[node]
            if bool(
                (one.scale == 1).all() and (one.shift == 0).all()
            ):  # of a frozen estimate, for one
                self._replace(node, node.args[0])
                continue
            self.folded -= one.layers
            norm = ConstantNorm(torch.zeros_like(one.shift), one.scale, one.shift)
            form = (
                norm
                if one.is_norm and one.dim == 1
                else ChannelAffine(one.scale, one.shift, last=one.dim != 1)
            )
            self._replace(node, self._form(node, node.args[0], form))
        self.layers.update(
            {name: "folded" for name in self.folded if self.layers.get(name) == "affine"}
        )

    # Whitening and power transforms

    def merge_whitening(self, node: Node) -> None:
        """Merge a convolution of size 1, of as many channels a group as it takes, into the layer
        before it.
        """
        x: Any = node.args[0]
        matrix, feeder = self._linear(node), self._linear(x)
        if (
            matrix is None
            or feeder is None
            or users_of(x) != [node]
            or _channel_dim(x) != _channel_dim(node)
        ):
            return
        _, out, inner, *size = matrix.weight.shape
        moves = (
            set(arguments(node).get("stride", [1])) != {1} or matrix.pads_zeros or matrix.transposed
        )
        merged = (
            None if moves or out != inner or math.prod(size) != 1 else feeder.then_groups(matrix)
        )
        if merged is not None:
            self._set(x, merged)
            if self.layers.get(layer_of(node)) == "group convolution":
                self.layers[layer_of(node)] = "folded"
            self._replace(node, x)

    def replace_power(self, found: Transform, fit: Fit) -> None:
        """Put a fit, or an exact form, in the place of a power transform."""
        node, name = found.node, layer_of(found.node)
        folds_away = frozenset([name] if fit.form == "affine" else ())
        x = self._mapped(
            node, node.args[0], Affine(found.sign * fit.scale, fit.shift, 1, folds_away, True)
        )
        for part in fit.parts:
            x = self._form(node, x, part)
        if fit.after is not None:
            x = self._mapped(node, x, Affine(fit.after, torch.zeros_like(fit.after)))
        if self.layers.get(name) != "frozen":
            self.layers[name] = fit.form
        if fit.has_activation and found.relu is not None:
            self._replace(found.relu, x)
            self.graph.erase_node(node)
        else:
            self._replace(node, x)

    # Nodes

    def _constant(self, value: Any) -> Tensor | None:
        """Return the value of an argument that no input reaches."""
        return self.constants.get(value) if isinstance(value, Node) else None

    def _linear(self, node: Any) -> LinearMap | None:
        """Return a convolution or linear layer whose weight is a constant that nothing else uses;
        None for others.
        """
        if not isinstance(node, Node) or node.target not in _LINEAR:
            return None
        values = arguments(node)
        weight, bias = (self._constant(values[name]) for name in ("weight", "bias"))
        if (
            weight is None
            or (bias is None and values["bias"] is not None)
            or len(values["weight"].users) != 1
        ):
            return None
        if values["weight"].op == "get_attr" and self.readers[_memory(weight)] != 1:
            return None
        if node.target is not ATEN.linear.default and len(shape_of(node)) != weight.ndim:
            # a single sample without its batch
            return None
        transposed = node.target in _TRANSPOSED
        padding = values.get("padding", "valid")
        pads = (
            weight[0, 0].numel() > 1
            if padding == "same"
            else transposed or (padding != "valid" and any(padding))
        )
        return LinearMap.of(weight, bias, values.get("groups", 1), transposed, pads)

    def _set(self, node: Node, layer: LinearMap) -> None:
        """Give a convolution or linear layer other constants."""
        values = arguments(node)
        for name, value in (("weight", layer.torch_weight()), ("bias", layer.bias)):
            if value is not None:
                values[name] = self._stored(node, values[name], value.float())
        node.args, node.kwargs = tuple(values.values()), {}

    def _stored(self, before: Node, held: Any, value: Tensor) -> Node:
        """Return a node of a constant: under the name of what it replaces, if nothing else uses
        that.
        """
        is_own = held is not None and held.op == "get_attr" and len(held.users) == 1
        if is_own and self.readers[_memory(self._constant(held))] == 1:
            owner, _, name = str(held.target).rpartition(".")
            module, node = self.module.get_submodule(owner), held
            setattr(
                module,
                name,
                nn.Parameter(value, requires_grad=False) if name in module._parameters else value,
            )
        else:
            self.added += 1
            self.module.register_buffer(f"_folded_{self.added}", value)
            with self.graph.inserting_before(before):
                node = self.graph.get_attr(f"_folded_{self.added}")
        self.constants[node] = value
        self.readers[_memory(value)] = 1
        return node

    def _form(self, before: Node, x: Any, form: nn.Module) -> Node:
        self.added += 1
        self.module.add_module(f"_form_{self.added}", form.eval())
        return self._insert(before, "call_module", f"_form_{self.added}", x)

    def _insert(self, before: Node, op: str, target: Any, x: Any) -> Node:
        with self.graph.inserting_before(before):
            node = self.graph.create_node(op, target, (x,))
        value = before.meta[
            "val"
        ]  # of a batch normalization its output, and statistics of training
        node.meta["val"] = value[0] if isinstance(value, (tuple, list)) else value
        return node

    def _replace(self, node: Node, other: Any) -> None:
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)


def _channel_dim(node: Node) -> int:
    """Return the dimension that a convolution or linear layer mixes."""
    return len(shape_of(node)) - 1 if node.target is ATEN.linear.default else 1


def _fits(node: Node, one: Affine, channels: torch.Size) -> bool:
    return _channel_dim(node) == one.dim and channels.numel() == len(one.scale)


def _memory(value: Any) -> int:
    """Return where a tensor's values lie: tied weights are two attributes of one memory."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else id(value)
