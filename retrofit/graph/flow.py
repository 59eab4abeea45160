"""Questions to one traced graph: who consumes a value, what kind of step a node is, where values come from and go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from retrofit.graph import kinds
from retrofit.graph.trace import Scope, trace

_METADATA = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "size", "dim", "numel", "stride"}
_ADD = {"add", "iadd", "add_", "sub", "isub", "sub_"}
_MUL = {"mul", "imul", "mul_", "multiply", "truediv", "div", "div_"}
_CAT = {"cat", "concat", "concatenate", "stack"}
_SHAPE = {
    "view", "reshape", "reshape_as", "view_as", "flatten", "unflatten", "permute", "transpose", "movedim", "squeeze",
    "unsqueeze",
}  # fmt: skip
_SAME = {"contiguous", "clone", "to", "type", "type_as", "half", "bfloat16", "float", "double"}
_SPREAD = {"getitem", "chunk", "split", "unbind", "expand", "expand_as", "sum", "softmax", "interpolate"}
_CONVS = (nn.modules.conv._ConvNd, nn.Linear)
_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_WINDOWS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_POOL_CALLS: Collection[Any] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_WINDOW_CALLS: Collection[Any] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)

# Steps that leave a value's channels to themselves, on the way to a mean pooling.
_TO_POOL = {"same", "shape", "concatenation", "constant"}
# Steps inside a squeeze-excite, before and after the activation in question.
_IN_GATE = {"same", "shape", "constant", "convolution", "linear", "norm", "activation", "addition"}
_OUT_OF_GATE = {*_IN_GATE, "spread", "module"}


def call_name(node: fx.Node) -> str:
    """The bare name of the function or method that a node calls, e.g. "add" for `operator.add`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.strip("_") + ("_" if name.endswith("_") and not name.startswith("_") else "")


class Flow:
    """One scope's graph with the kind of each node.

    Args:
        scope: A traced module.
        is_norm: What counts as a norm.
        activations: The modules that are activations.
        names: The model's name for each of its modules.
    """

    def __init__(
        self,
        scope: Scope,
        is_norm: Callable[[nn.Module], bool],
        activations: Collection[nn.Module],
        names: dict[nn.Module, str],
    ) -> None:
        self.scope = scope
        self.names = names
        self.modules = scope.modules
        self._is_norm = is_norm
        self._activations = activations
        self.steps = {node: self._step(node) for node in scope.graph.nodes}

    def consumers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that use a node's value, not just its shape or type."""
        return [user for user in node.users if self.steps[user] != "metadata"]

    def source(self, node: fx.Node) -> fx.Node | None:
        """The node whose value a one-input step works on."""
        found = node.args[0] if node.args else node.kwargs.get("input")
        return found if isinstance(found, fx.Node) else None

    def before(self, node: fx.Node) -> fx.Node | None:
        """The source of `node`, past dropouts and identities."""
        found = self.source(node)
        while found is not None and self.steps[found] == "same":
            found = self.source(found)
        return found

    def after(self, node: fx.Node) -> list[fx.Node]:
        """The consumers of `node`, past dropouts and identities."""
        found = []
        for user in self.consumers(node):
            found += self.after(user) if self.steps[user] == "same" else [user]
        return found

    def describe(self, node: fx.Node) -> str:
        """Words for a node: a module's class and name, or a function's name."""
        if node.op == "call_module":
            module = self.modules[node]
            return f"{type(module).__name__} {self.names[module]}".rstrip()
        if node.op == "placeholder":
            return f"the input of {self.scope.name or 'the model'}"
        return f"{call_name(node)}()" if node.op.startswith("call") else str(node.target)

    def reaches_final_pool(self, node: fx.Node) -> bool:
        """Whether no layer but dropout, reshaping or squeeze-excite lies between `node` and the final mean pooling."""
        while True:
            users = self.after(node)
            gated = [user for user in users if self.steps[user] == "product"]
            if len(gated) == 1 and all(user in gated or self.steps[user] == "pool" for user in users):
                node = gated[0]  # a squeeze-excite, which scales channels by their own means
                continue
            if len(users) != 1:
                return False
            node = users[0]
            if self.steps[node] == "pool":
                return True
            if self.steps[node] == "window":
                return all(self.steps[later] != "norm" for later in self._downstream(node))
            if self.steps[node] not in _TO_POOL:
                return False

    def in_squeeze_excite(self, node: fx.Node) -> bool:
        """Whether `node` works on pooled values, one a channel, that go on to multiply other features."""
        return self.is_pooled(node) and any(
            self.steps[later] == "product" for later in self._downstream(node, _OUT_OF_GATE)
        )

    def is_pooled(self, node: fx.Node) -> bool:
        """Whether `node` works on pooled values, one a channel."""
        upstream = self.source(node)
        while upstream is not None and self.steps[upstream] in _IN_GATE:
            upstream = self.source(upstream)
        return upstream is not None and self.steps[upstream] == "pool"

    def is_gate(self, node: fx.Node) -> bool:
        """Whether `node` is a sigmoid whose output multiplies other features."""
        module = self.modules.get(node) or kinds.function_module(node)
        if module is None or not kinds.is_gate(module):
            return False
        return any(self.steps[later] == "product" for later in self._downstream(node, {"same", "shape", "spread"}))

    def _downstream(self, node: fx.Node, through: Collection[str] | None = None) -> set[fx.Node]:
        """The nodes that follow `node`, not going on past steps other than `through`."""
        seen: set[fx.Node] = set()
        ahead = self.consumers(node)
        while ahead:
            found = ahead.pop()
            if found not in seen:
                seen.add(found)
                if through is None or self.steps[found] in through:
                    ahead += self.consumers(found)
        return seen

    def _step(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return self._module_step(self.modules[node])
        if node.op in ("call_function", "call_method"):
            return self._call_step(node)
        return {"output": "output", "placeholder": "input"}.get(node.op, "constant")

    def _module_step(self, module: nn.Module) -> str:
        if self._is_norm(module) or kinds.is_norm(module):
            return "norm"
        if kinds.is_altered(module):
            return "module"
        if module in self._activations:
            return "activation"
        if isinstance(module, nn.Identity) or kinds.is_drop(module):
            return "same"
        if isinstance(module, _CONVS):
            return "linear" if isinstance(module, nn.Linear) else "convolution"
        if isinstance(module, _WINDOWS):
            return "window"
        if isinstance(module, _POOLS):
            return _pool_step(module.output_size)
        return "shape" if isinstance(module, (nn.Flatten, nn.Unflatten)) else "module"

    def _call_step(self, node: fx.Node) -> str:
        name = call_name(node)
        if name in _METADATA or (name == "getattr" and node.args[1] in _METADATA) or name == "assert":
            return "metadata"
        if kinds.function_module(node) is not None:
            return "activation"
        if kinds.is_drop_call(node) or name in _SAME:
            return "same"
        if node.target in _POOL_CALLS:
            return _pool_step(node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size"))
        if node.target in _WINDOW_CALLS:
            return "window"
        if name == "mean":
            return "pool" if _over_space(node) else "call"
        if name in _ADD or name in _MUL:
            tensors = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
            if len(tensors) < 2:
                return "constant"
            return "addition" if name in _ADD else "product"
        for step, found in (("concatenation", _CAT), ("shape", _SHAPE), ("spread", _SPREAD)):
            if name in found:
                return step
        return "call"


class Flows:
    """Every traced graph of a model, and what is called, held, shared and read in it.

    Args:
        model: Any module.
        is_norm: What counts as a norm.
        activations: The modules that are activations.

    Attributes:
        coverage: What `trace` gave.
        names: The model's name for each of its modules.
        holders: What holds a module, with its name there.
        sharers: How many modules hold a parameter.
        flows: The graphs.
        counts: How often each module is called, in all graphs together.
        read: The modules whose parameters or buffers another module's code reads.
    """

    def __init__(
        self, model: nn.Module, is_norm: Callable[[nn.Module], bool], activations: Collection[nn.Module] = ()
    ) -> None:
        self.coverage = trace(model, is_norm, activations)
        self.names = {module: name for name, module in model.named_modules()}
        self.holders: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
        self.sharers: Counter[nn.Parameter] = Counter()
        for module in model.modules():
            self.sharers.update(p for p in module._parameters.values() if p is not None)
            for name, child in module._modules.items():
                if child is not None:
                    self.holders[child].append((module, name))
        self.flows = [Flow(scope, is_norm, activations, self.names) for scope in self.coverage.scopes]
        self.counts = Counter(module for flow in self.flows for module in flow.modules.values())
        # Nodes without users come from those who look at a module while it is traced (`is_norm` does).
        self.read = {
            flow.scope.module.get_submodule(str(node.target).rpartition(".")[0])
            for flow in self.flows
            for node in flow.scope.graph.nodes
            if node.op == "get_attr" and node.users
        }

    def above(self, module: nn.Module) -> set[nn.Module]:
        """All that holds a module, at any depth."""
        above: set[nn.Module] = set()
        ahead = [holder for holder, _ in self.holders[module]]
        while ahead:
            if (holder := ahead.pop()) not in above:
                above.add(holder)
                ahead += [higher for higher, _ in self.holders[holder]]
        return above

    def is_shared(self, layer: nn.Module) -> bool:
        """Whether another module holds one of a layer's parameters."""
        return any(self.sharers[parameter] > 1 for parameter in layer.parameters())


def _pool_step(output_size: Any) -> str:
    sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
    return "pool" if all(size == 1 for size in sizes) else "window"


def _over_space(node: fx.Node) -> bool:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return 1 not in dims if isinstance(dims, (tuple, list)) else isinstance(dims, int) and dims != 1
