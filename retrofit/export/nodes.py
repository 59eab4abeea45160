"""What the nodes of a captured graph are: arguments, users, shapes; power transforms, and layers that mix channels."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx import Node

from retrofit.layers.constant_maps import LinearMap

ATEN = torch.ops.aten
_TRANSPOSED = (ATEN.conv_transpose1d.default, ATEN.conv_transpose2d.input, ATEN.conv_transpose3d.input)
LINEAR = (
    *(ATEN.linear.default, ATEN.conv1d.default, ATEN.conv2d.default, ATEN.conv3d.default, ATEN.convolution.default),
    *(ATEN.conv1d.padding, ATEN.conv2d.padding, ATEN.conv3d.padding, *_TRANSPOSED),
)


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


@dataclass(frozen=True)
class Transform:
    """A power transform of a graph: gamma * psi(sign * h; lambda) + beta, (C,) each in float64, with gamma >= 0, since
    gamma * psi(h; lambda) = -gamma * psi(-h; 2 - lambda).
    """

    node: Node
    sign: Tensor
    lmbda: Tensor
    gamma: Tensor
    beta: Tensor
    relu: Node | None  # the ReLU or ReLU6 that alone takes the output
    high: float | None  # its upper limit, inf or 6

    @classmethod
    def of(cls, module: fx.GraphModule, node: Node) -> Transform:
        """Return the transform of a `retrofit::power` node."""
        lmbda, gamma, beta = (attribute_of(module, arg).double() for arg in node.args[1:])  # type: ignore[arg-type]
        sign = torch.where(gamma < 0, -1.0, 1.0).to(gamma)
        users = users_of(node)
        high = _upper_limit(users[0]) if len(users) == 1 else None
        relu = None if high is None else users[0]
        return cls(node, sign, torch.where(gamma < 0, 2 - lmbda, lmbda), gamma.abs(), beta, relu, high)


def _upper_limit(node: Node) -> float | None:
    """Return the limit above of a function that is 0 below 0 and else the identity up to it; None for others."""
    if node.target is ATEN.relu.default:
        return float("inf")
    if node.target not in (ATEN.hardtanh.default, ATEN.clamp.default):
        return None
    values = arguments(node)
    low, high = (values.get(name) for name in (("min_val", "max_val") if "min_val" in values else ("min", "max")))
    return None if low != 0 or isinstance(high, Node) else float("inf" if high is None else high)


def per_channel(value: Tensor, x: Node, out: Node) -> tuple[int, Tensor] | None:
    """Return the dimension of the channels that a constant has one value for each of, and the values, float64."""
    shape = shape_of(x)
    same = shape == shape_of(out) and x.meta["val"].dtype == out.meta["val"].dtype == value.dtype == torch.float32
    wide = (1,) * (len(shape) - value.ndim) + tuple(value.shape)
    dims = [dim for dim, size in enumerate(wide) if size != 1]
    if not same or len(wide) != len(shape) or len(dims) != 1 or dims[0] not in (1, len(shape) - 1):
        return None
    return (dims[0], value.flatten().double()) if wide[dims[0]] == shape[dims[0]] else None


def border_of(node: Node) -> Literal["zeros", "values"] | None:
    """Return what a padding puts beside maps (N, C, *): zeros, or values from within; None for anything else."""
    values = arguments(node)
    pads, fill = values.get("pad") or values["padding"], values.get("value")
    if len(pads) > 2 * (len(shape_of(node)) - 2):
        return None  # it pads the channels
    if node.target is ATEN.constant_pad_nd.default or values.get("mode") == "constant":
        return None if fill else "zeros"
    return "values"


def linear_map(node: Node, weight: Tensor, bias: Tensor | None) -> LinearMap:
    """Return what a call of one of `LINEAR` computes with these constants."""
    values = arguments(node)
    transposed = node.target in _TRANSPOSED or bool(values.get("transposed"))
    padding = values.get("padding", "valid")
    pads = weight[0, 0].numel() > 1 if padding == "same" else transposed or (padding != "valid" and any(padding))
    return LinearMap.of(weight, bias, values.get("groups", 1), transposed, pads)
