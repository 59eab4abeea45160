"""What the nodes of a captured graph say of themselves."""

import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.operator_schemas import normalize_function

ATEN = torch.ops.aten


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of an ATen operator by name, in their order, defaults
    included.
    """
    normalized: Any = normalize_function(
        node.target,  # type: ignore[arg-type]
        node.args,
        node.kwargs,
        normalize_to_only_use_kwargs=True,
    )
    return dict(normalized.kwargs)


def users_of(node: Node) -> list[Node]:
    """Return the nodes that use a value; what only checks its type does not."""
    return [user for user in node.users if user.target is not ATEN._assert_tensor_metadata.default]


def shape_of(node: Node) -> tuple[Any, ...]:
    """Return the shape of a node's value."""
    return tuple(node.meta["val"].shape)


def layer_of(node: Node) -> str:
    """Return the name of the innermost module that a node comes from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if stack:
        return str(stack[-1][0])
    return ""


def value_of(module: fx.GraphModule, node: Node) -> Any:
    """Return the value of a `get_attr` node."""
    return operator.attrgetter(str(node.target))(module)
