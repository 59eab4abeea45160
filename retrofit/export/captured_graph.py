"""A captured graph while its constants are folded: what is constant in it, which layers may take a
map in, and how nodes are put in and taken out.
"""

from collections import defaultdict
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.fx.node import map_arg

from retrofit.export.capture import Program
from retrofit.export.graph_nodes import ATEN, arguments, shape_of, value_of
from retrofit.layers.constant_maps import LinearMap
from retrofit.layers.inference_forms import ChannelAffine, ConstantNorm

_TRANSPOSED = {
    ATEN.conv_transpose1d.default,
    ATEN.conv_transpose2d.input,
    ATEN.conv_transpose3d.input,
}
_CONVOLUTIONS = {
    kind
    for convolution in (ATEN.conv1d, ATEN.conv2d, ATEN.conv3d)
    for kind in (convolution.default, convolution.padding)
}
# Linear in the mathematical sense: linear layers and convolutions.
LINEAR = {ATEN.linear.default, *_TRANSPOSED, *_CONVOLUTIONS}


class AffineMap(nn.Module):
    """scale * x + shift along a dimension, 1 or the last: a node of a graph that is being folded.

    `layers` are the normalization layers that it is a part of.
    """

    def __init__(
        self,
        scale: Tensor,
        shift: Tensor,
        dim: int = 1,
        layers: frozenset[str] = frozenset(),
    ) -> None:
        """Keep (C,) constants in float64."""
        super().__init__()
        self.scale = scale
        self.shift = shift
        self.dim = dim
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Compute the map in float64."""
        shape = [1] * x.ndim
        shape[self.dim] = len(self.scale)
        return (x * self.scale.view(shape) + self.shift.view(shape)).to(x.dtype)

    def then(self, other: "AffineMap") -> "AffineMap":
        """Return the map that applies this one, then the other."""
        return AffineMap(
            scale=self.scale * other.scale,
            shift=other.scale * self.shift + other.shift,
            dim=self.dim,
            layers=self.layers | other.layers,
        )

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing, as the one before a frozen estimate."""
        return bool((self.scale == 1).all() and (self.shift == 0).all())

    def lowered(self) -> nn.Module:
        """Return float32 operations of the same function: along dimension 1 a batch normalization,
        one operation, which ONNX Runtime keeps in the layout of its convolutions.
        """
        if self.dim == 1:
            return ConstantNorm(torch.zeros_like(self.shift), self.scale, self.shift)
        return ChannelAffine(self.scale, self.shift, self.dim)


class CapturedGraph:
    """The graph of a captured program, and what its layers have become so far (`layers`)."""

    def __init__(self, program: Program) -> None:
        """Compute the constants of the graph."""
        self.module: fx.GraphModule = program.module
        self.graph = self.module.graph
        self.layers = program.layers
        self.batch_norms = program.batch_norms
        self._constants = _constants_of(self.module)
        self._tied = _tied_of(self.module)

    def constant(self, value: Any) -> Tensor | None:
        """Return the value of an argument that no input reaches; None for others."""
        if isinstance(value, Node):
            return self._constants.get(value)
        return None

    def affine_map(self, node: Node) -> AffineMap | None:
        """Return the affine map that a node is; None for others."""
        if node.op != "call_module":
            return None
        part = self.module.get_submodule(str(node.target))
        if isinstance(part, AffineMap):
            return part
        return None

    def affine_maps(self) -> list[tuple[Node, AffineMap]]:
        """Return the nodes that are affine maps, in their order."""
        maps = ((node, self.affine_map(node)) for node in self.graph.nodes)
        return [(node, affine) for node, affine in maps if affine is not None]

    def linear(self, node: Node) -> LinearMap | None:
        """Return a convolution or linear layer whose weight is a constant that nothing else uses;
        None for others.
        """
        if node.target not in LINEAR:
            return None
        values = arguments(node)
        weight = self.constant(values["weight"])
        if weight is None or not self._has_one_reader(values["weight"]):
            return None
        bias = self.constant(values["bias"])
        if bias is None and values["bias"] is not None:
            return None
        # It takes a single sample, without a batch dimension
        if node.target is not ATEN.linear.default and len(shape_of(node)) != weight.ndim:
            return None
        transposed = node.target in _TRANSPOSED
        groups = values.get("groups", 1)
        padding = values.get("padding", "valid")
        pads = transposed or _pads_zeros(padding, weight)
        return LinearMap.of(weight, bias, groups, transposed, pads)

    def set_linear(self, node: Node, layer: LinearMap) -> None:
        """Give a convolution or linear layer other constants."""
        values = arguments(node)
        values["weight"] = self._store(node, values["weight"], layer.torch_weight())
        if layer.bias is not None:
            values["bias"] = self._store(node, values["bias"], layer.bias)
        node.args = tuple(values.values())
        node.kwargs = {}

    def insert(self, before: Node, x: Any, part: nn.Module) -> Node:
        """Insert a module that takes `x` and gives what the node `before` gives."""
        name = self._unused_name("_form")
        self.module.add_module(name, part.eval())
        with self.graph.inserting_before(before):
            node = self.graph.call_module(name, (x,))
        node.meta["val"] = before.meta["val"]
        return node

    def set_module(self, node: Node, part: nn.Module) -> None:
        """Put another module in the place of an inserted one."""
        setattr(self.module, str(node.target), part.eval())

    def replace(self, node: Node, other: Any) -> None:
        """Let the users of a node use another one."""
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)

    def _store(self, before: Node, replaced: Node | None, value: Tensor) -> Node:
        """Return a node that holds a constant: the node that it replaces, if nothing else reads
        that, else a new one.
        """
        value = value.float()
        if replaced is not None and replaced.op == "get_attr" and self._has_one_reader(replaced):
            constant = self._constants[replaced]
            constant.data = value
            return replaced
        name = self._unused_name("_folded")
        self.module.register_buffer(name, value)
        graph = self.graph
        with graph.inserting_before(before):
            node = graph.get_attr(name)
        self._constants[node] = value
        return node

    def _unused_name(self, prefix: str) -> str:
        """Return a name that the module does not have: it may be a folded network itself."""
        names = (f"{prefix}_{number}" for number in count(1))
        return next(name for name in names if not hasattr(self.module, name))

    def _has_one_reader(self, node: Node) -> bool:
        """Return whether one node alone uses a constant."""
        return len(node.users) == 1 and node not in self._tied


def _constants_of(module: fx.GraphModule) -> dict[Node, Any]:
    """Compute the nodes that no input reaches, nothing writes to, and are not random."""
    written = {node.args[0] for node in module.graph.nodes if node.target is ATEN.copy_.default}
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and node not in written:
            values[node] = value_of(module, node)
        elif _is_pure(node) and values.keys() >= set(node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


def _tied_of(module: fx.GraphModule) -> set[Node]:
    """Return the constants that lie in one memory with others, as tied weights do."""
    in_memory: dict[int, list[Node]] = defaultdict(list)
    for node in module.graph.find_nodes(op="get_attr"):
        value = value_of(module, node)
        if isinstance(value, Tensor):
            in_memory[value.untyped_storage().data_ptr()].append(node)
    return {node for nodes in in_memory.values() for node in nodes if len(nodes) > 1}


def _is_pure(node: Node) -> bool:
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and not is_random and not node.is_impure()


def _pads_zeros(padding: Any, weight: Tensor) -> bool:
    if padding == "same":
        return weight[0, 0].numel() > 1
    return padding != "valid" and any(padding)
