"""What a captured network takes: another call is refused in one line that says what to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from retrofit.errors import RetrofitError
from retrofit.inputs import Call
from retrofit.utils.text import one_line, shown

# torch's name of the submodule that checks the conditions of the capture
GUARDS = "_guards_fn"
_AGAIN = "fold it again with example `inputs` like those of this call"


def refusing_other_calls(captured: fx.GraphModule, call: Call) -> fx.GraphModule:
    """Return a captured network as a module that holds only the tensors it uses, and raises
    RetrofitError for calls that are not like the captured one.

    torch.compile and torch.export trace torch's own conditions instead, which copies are left with
    too.
    """
    # It registers a form's constants, which then move with the module
    module = fx.GraphModule(captured, captured.graph)
    leaves, structure = tree_flatten((call.args, dict(call.kwargs)))
    nodes = module.graph.find_nodes(op="placeholder")
    arguments = {
        str(node.target): CapturedTensor.of(node) if isinstance(leaf, Tensor) else leaf
        for node, leaf in zip(nodes, leaves, strict=True)
    }
    signature = Signature(structure, list(call.kwargs), arguments)
    module.register_forward_pre_hook(signature, with_kwargs=True)
    return module.eval()


def unmet_condition(module: nn.Module, values: Sequence[Any]) -> str:
    """Return the first condition of its capture that the values of a captured network's arguments
    do not meet; empty if they meet all.
    """
    conditions = getattr(module, GUARDS, None)
    if conditions is None:
        return ""
    try:
        conditions(*values)
    except AssertionError as error:
        return one_line(error)
    return ""


@dataclass(frozen=True)
class CapturedTensor:
    """A tensor that a captured network takes."""

    dtype: torch.dtype
    # None where the size may vary
    sizes: tuple[int | None, ...]

    @classmethod
    def of(cls, node: fx.Node) -> "CapturedTensor":
        """Read from the captured graph which sizes are fixed."""
        example = node.meta["val"]
        sizes = [size if isinstance(size, int) else None for size in example.shape]
        return cls(example.dtype, tuple(sizes))

    def takes(self, value: Any) -> bool:
        """Return whether a value is such a tensor."""
        if not isinstance(value, Tensor) or value.ndim != len(self.sizes):
            return False
        # The network's own precision may have been changed since
        both_float = value.is_floating_point() and self.dtype.is_floating_point
        if value.dtype != self.dtype and not both_float:
            return False
        pairs = zip(self.sizes, value.shape, strict=True)
        return all(expected in (None, size) for expected, size in pairs)

    def __str__(self) -> str:
        """In words, N for a size that may vary."""
        sizes = ["N" if size is None else str(size) for size in self.sizes]
        return f"a {self.dtype} tensor of {'x'.join(sizes)}"


@dataclass(frozen=True)
class Signature:
    """The arguments that a network was captured with: a hook before its calls."""

    structure: TreeSpec
    keywords: list[str]
    # By name, what it takes: a tensor, or a constant
    arguments: Mapping[str, Any]

    def __call__(
        self, module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise RetrofitError if a call passes other arguments."""
        if torch.compiler.is_compiling():
            return
        if kwargs.keys() == set(self.keywords):
            kwargs = {name: kwargs[name] for name in self.keywords}
        values, structure = tree_flatten((args, kwargs))
        if structure != self.structure:
            names = ", ".join(f"`{name}`" for name in self.arguments)
            raise RetrofitError(
                "the folded network takes exactly the arguments that it was captured with, "
                f"{names}; {_AGAIN}"
            )
        self._check_values(values)
        condition = unmet_condition(module, values)
        if condition:
            raise RetrofitError(
                "the folded network was captured under a condition that this call does not meet "
                f"({condition}); {_AGAIN}"
            )

    def _check_values(self, values: list[Any]) -> None:
        pairs = zip(self.arguments.items(), values, strict=True)
        for (name, expected), value in pairs:
            if isinstance(expected, CapturedTensor):
                is_like = expected.takes(value)
            else:
                is_of_type = type(value) is type(expected)
                is_like = is_of_type and value == expected
            if not is_like:
                raise RetrofitError(
                    f"the folded network takes {_in_words(expected)} as `{name}`, not "
                    f"{_in_words(value)}; {_AGAIN}"
                )


def _in_words(argument: Any) -> str:
    if isinstance(argument, Tensor):
        argument = CapturedTensor(argument.dtype, tuple(argument.shape))
    if isinstance(argument, CapturedTensor):
        return str(argument)
    return shown(argument)
