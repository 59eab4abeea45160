"""What a captured network takes: another call is refused in one line that says what to do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from retrofit.errors import RetrofitError
from retrofit.inputs import Call
from retrofit.utils.text import one_line, shown

# torch's name of the submodule that checks the conditions of the capture.
GUARDS = "_guards_fn"
_AGAIN = "fold it again with example `inputs` like those of this call"


def refuse_other_calls(module: fx.GraphModule, call: Call) -> None:
    """Let a captured module raise RetrofitError for calls that are not like the captured one.

    torch.compile and torch.export trace torch's own conditions instead.
    """
    leaves, structure = tree_flatten((call.args, dict(call.kwargs)))
    arguments: dict[str, Any] = {}
    nodes = module.graph.find_nodes(op="placeholder")
    for node, leaf in zip(nodes, leaves, strict=True):
        is_tensor = isinstance(leaf, Tensor)
        arguments[str(node.target)] = CapturedTensor.of(node, leaf) if is_tensor else leaf
    signature = Signature(structure, list(arguments), list(call.kwargs))
    module.register_forward_pre_hook(signature, prepend=True, with_kwargs=True)
    if hasattr(module, GUARDS):
        conditions = getattr(module, GUARDS)
        setattr(module, GUARDS, Guards(conditions, arguments, call))


@dataclass(frozen=True)
class CapturedTensor:
    """A tensor that a captured network takes."""

    name: str
    dtype: torch.dtype
    # None where the size may vary
    sizes: tuple[int | None, ...]

    @classmethod
    def of(cls, node: fx.Node, example: Tensor) -> "CapturedTensor":
        """Read the sizes that are fixed from the captured graph."""
        sizes = [size if isinstance(size, int) else None for size in node.meta["val"].shape]
        return cls(str(node.target), example.dtype, tuple(sizes))

    def check(self, value: Tensor, placement: Tensor, is_only_one: bool) -> None:
        """Raise RetrofitError for a tensor of another device or type than the network's, or of
        another rank or size than the captured one.

        Args:
            value: The tensor that is passed.
            placement: A tensor on the network's device, of its type.
            is_only_one: Whether the network takes no other argument.
        """
        device = placement.device
        if value.device != device:
            raise self._refusal(device, value.device, f"move it with `.to('{device}')`")
        self._check_dtype(value, placement)
        sizes = tuple(value.shape)
        if not self._takes(sizes):
            advice = self._advice(sizes, is_only_one)
            raise self._refusal(_product(self.sizes), _product(sizes), advice)

    def _check_dtype(self, value: Tensor, placement: Tensor) -> None:
        dtype = self.dtype
        if dtype.is_floating_point:
            if torch.is_autocast_enabled(placement.device.type):
                return
            dtype = placement.dtype
        if value.dtype != dtype:
            raise self._refusal(dtype, value.dtype, f"convert it with `.to({dtype})`")

    def _takes(self, sizes: tuple[int, ...]) -> bool:
        if len(sizes) != len(self.sizes):
            return False
        pairs = zip(self.sizes, sizes, strict=True)
        return all(expected in (None, size) for expected, size in pairs)

    def _advice(self, sizes: tuple[int, ...], is_only_one: bool) -> str:
        if not is_only_one or len(sizes) != len(self.sizes):
            return _AGAIN
        if sizes[1:] == self.sizes[1:]:
            return f"fold it again without `batch`, or with `batch={sizes[0]}`"
        advice = f"fold it again with `input_size={sizes[1:]}`"
        if len(sizes) > 2 and sizes[1] == self.sizes[1]:
            advice += ", or with `dynamic_size=True`"
        return advice

    def _refusal(self, expected: Any, passed: Any, advice: str) -> RetrofitError:
        difference = f"the folded network takes `{self.name}` of {expected}, not of {passed}"
        return RetrofitError(f"{difference}; {advice}")


@dataclass(frozen=True)
class Signature:
    """The structure of the arguments that a network was captured with: a hook before its calls."""

    structure: TreeSpec
    names: list[str]
    keywords: list[str]

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise RetrofitError if a call passes other arguments."""
        if torch.compiler.is_compiling():
            return
        keywords = self.keywords
        if set(kwargs) == set(keywords):
            kwargs = {name: kwargs[name] for name in keywords}
        _, structure = tree_flatten((args, kwargs))
        if structure != self.structure:
            known = ", ".join(f"`{name}`" for name in self.names)
            raise RetrofitError(
                "the folded network takes exactly the arguments that it was captured with, "
                f"{known}; {_AGAIN}"
            )


class Guards(nn.Module):
    """A node of the captured graph that takes all arguments and refuses those that differ from the
    captured ones.

    It also checks torch's other conditions, such as equal sizes of two arguments.
    """

    placement: Tensor

    def __init__(self, conditions: nn.Module, arguments: Mapping[str, Any], call: Call) -> None:
        super().__init__()
        self.conditions = conditions
        self.arguments = arguments
        # Empty; follows the network's device and dtype through `_apply`. Not a buffer: a second
        # capture has torch's guards in the place of this module, and would look for it there.
        device = next((tensor.device for tensor in call.tensors), torch.device("cpu"))
        self.placement = torch.empty(0, dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Guards":
        super()._apply(fn, recurse)
        self.placement = fn(self.placement)
        return self

    def forward(self, *values: Any) -> None:
        """Raise RetrofitError if other arguments are passed."""
        if torch.compiler.is_compiling():
            self.conditions(*values)
            return
        for (name, expected), value in zip(self.arguments.items(), values, strict=True):
            if isinstance(expected, CapturedTensor) and isinstance(value, Tensor):
                expected.check(value, self.placement, is_only_one=len(values) == 1)
            elif type(value) is not type(expected) or value != expected:
                raise RetrofitError(
                    f"the folded network was captured with {_in_words(expected)} as `{name}`, not "
                    f"{_in_words(value)}; {_AGAIN}"
                )
        try:
            self.conditions(*values)
        except AssertionError as error:
            raise RetrofitError(
                "the folded network was captured under a condition that this call does not meet "
                f"({one_line(error)}); {_AGAIN}"
            ) from error


def _in_words(argument: Any) -> str:
    if isinstance(argument, Tensor | CapturedTensor):
        return "a tensor"
    return shown(argument)


def _product(sizes: tuple[int | None, ...]) -> str:
    """Return "Nx3x32x32": sizes in words, N for one that may vary."""
    words = ["N" if size is None else str(size) for size in sizes]
    return "x".join(words) or "no dimension"
