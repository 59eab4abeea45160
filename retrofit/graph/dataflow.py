"""The data flow in a model's traced graphs: what step each node is, which node produces a value,
and which nodes consume it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from retrofit.graph import recognition
from retrofit.graph.trace import (
    BranchingPartsError,
    Tracer,
    call_name,
    takes_defaults,
    traced,
)
from retrofit.utils.forward_pass import random_states_kept
from retrofit.utils.snapshot import left_as_it_was
from retrofit.utils.text import with_class

# The names of the functions and methods whose calls are one step. Other steps are norm, activation,
# linear, convolution, module, call, constant (a parameter or buffer), rescaling (a sum, difference,
# product or quotient of one value and constants), input and output.
_NAMES_OF = {
    "metadata": " ".join(recognition.METADATA) + " assert",
    "same": "contiguous clone to type type_as half bfloat16 float double "
    "dropout dropout1d dropout2d dropout3d alpha_dropout",
    "shape": "view reshape reshape_as view_as flatten unflatten permute transpose movedim "
    "swapaxes swapdims squeeze unsqueeze",
    "concatenation": "cat concat concatenate stack",
    "spread": "getitem chunk split unbind expand expand_as sum softmax interpolate",
    "addition": "add iadd add_ sub isub sub_",
    "product": "mul imul mul_ multiply truediv div div_",
    "pool": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "window": "avg_pool1d avg_pool2d avg_pool3d",
}
_STEP_OF = {name: step for step, names in _NAMES_OF.items() for name in names.split()}
_STEP_OF_CLASS = {
    nn.Identity: "same",
    nn.Linear: "linear",
    nn.modules.conv._ConvNd: "convolution",
    nn.modules.pooling._AvgPoolNd: "window",
    nn.Flatten: "shape",
    nn.Unflatten: "shape",
}
# Steps that mix no channels, on the way from a value to its mean pooling.
_TO_POOL = {"same", "shape", "concatenation", "rescaling"}
# Steps of a squeeze-excite: from its pooling to a node inside it, and from there to its product.
_IN_GATE = {"same", "shape", "rescaling", "convolution", "linear", "norm", "activation", "addition"}
_OUT_OF_GATE = {*_IN_GATE, "spread", "module"}


class Flows:
    """All paths through a model, and the modules that they call and read.

    The model is traced in evaluation and in training. If it cannot be traced whole, its largest
    parts that can be are traced. Parts without a norm asked for are not.

    A part that fx cannot enter, or that branches often on values, is a single node in its caller's
    graph. If it holds norms, it has graphs of its own too. Tracing needs no input, works on the
    meta device, and leaves the model as it was.
    """

    def __init__(self, model: nn.Module, is_norm: Callable[[nn.Module], bool]) -> None:
        self.is_norm = is_norm
        self.names = {module: name for name, module in model.named_modules()}
        # What each module holds, and itself.
        self.inside = {module: set(module.modules()) for module in self.names}
        # What could not be traced, with the reason in one line.
        self.failures: dict[nn.Module, str] = {}
        # The traces by mode (True is training) and module.
        self._traces: dict[tuple[bool, nn.Module], list[Tracer]] = defaultdict(list)
        # Parts with so many branches that they are one node in their caller's graph.
        self._branching: set[nn.Module] = set()
        self._covered: set[nn.Module] = set()
        # Code that is traced writes to no parameter or buffer.
        tensors = chain(model.parameters(), model.buffers())
        with (
            left_as_it_was(model, unwritten=tensors) as self._snapshot,
            random_states_kept(torch.device("cpu")),
        ):
            self._trace_all(model)
        # The paths of evaluation come first.
        ordered = sorted(self._traces, key=lambda key: key[0])
        self.flows = [Flow(trace, self) for key in ordered for trace in self._traces[key]]
        # The calls of each module that is called.
        self.calls: dict[nn.Module, list[tuple[Flow, fx.Node]]] = defaultdict(list)
        for flow in self.flows:
            for node, module in flow.modules.items():
                self.calls[module].append((flow, node))
        # The modules whose parameters or buffers another module's code reads.
        self.read = {owner for flow in self.flows for owner in flow.read_modules()}

    def label(self, module: nn.Module) -> str:
        """A module's class and name."""
        return f"{type(module).__name__} {self.names[module]}".rstrip()

    def _trace_all(self, model: nn.Module) -> None:
        norms = set(filter(self.is_norm, self.names))
        self.activations = set(filter(recognition.is_activation, self.names))
        self._leaves = norms | self.activations | set(filter(recognition.is_leaf, self.names))
        holders = {module for module in self.names if self.inside[module] & norms}
        self.traceable = holders - norms
        self._cover(model)

    def _cover(self, module: nn.Module) -> None:
        """Trace a module, and what it calls; its children where it cannot be traced."""
        if module not in self.traceable or module in self._covered:
            return
        self._covered.add(module)
        self._trace(module)
        paths = [*self._traces[False, module], *self._traces[True, module]]
        for path in paths:
            self._drop_if_called_with_options(path)
        called: list[Any] = [place.target for path in paths for place in path.places.values()]
        if module in self.failures:
            called += module.children()
        for part in called:
            self._cover(part)

    def _drop_if_called_with_options(self, path: Tracer) -> None:
        """Drop the traces of a branching part that is called with optional arguments: they were
        made without, and say nothing of such a call.
        """
        for node, place in path.places.items():
            part = place.target
            if part in self._branching and not takes_defaults(part, node):
                self._covered.add(part)
                self._traces[False, part] = []
                self._traces[True, part] = []
                self.failures[part] = "it branches on values, and takes optional arguments"

    def _trace(self, module: nn.Module) -> None:
        """Trace a module in both modes, or say why it cannot be."""
        try:
            for training in (False, True):
                self._traces[training, module] = self._paths(module, training)
        # A model's own code may raise anything.
        except Exception as error:
            self.failures[module] = with_class(error).split(". ")[0]

    def _paths(self, module: nn.Module, training: bool) -> list[Tracer]:
        """Trace a module on all its paths; a part with too many branches becomes a single node."""
        try:
            return traced(module, training, self._leaves.__contains__, self._snapshot)
        except BranchingPartsError as error:
            self._branching |= error.parts
            self._leaves |= error.parts
            return self._paths(module, training)


class Flow:
    """One path through a module's forward, as a graph, and the step that each of its nodes is.

    Norms, activations, dropouts and what fx cannot enter are single nodes. `modules` has the module
    that each call_module node calls; `steps` has "norm", "activation" or another step for each
    node. `places`, `variables`, `returned` and `size` are those of the `Tracer`.
    """

    def __init__(self, trace: Tracer, flows: Flows) -> None:
        self.module = trace.root
        self.graph = trace.graph
        self.places = trace.places
        self.variables = trace.variables
        self.returned = trace.returned
        self.size = trace.size
        # Empty for the model itself.
        self.name = flows.names[self.module]
        self._flows = flows
        self.modules = {
            node: place.target for node, place in self.places.items() if node.op == "call_module"
        }
        self.steps = {node: self._step(node) for node in self.graph.nodes}

    def read_modules(self) -> Iterator[nn.Module]:
        """The modules whose parameters or buffers the code reads.

        A node without users is none of these: it comes from looking at a module during the trace,
        as `is_norm` does.
        """
        for node in self.graph.find_nodes(op="get_attr"):
            if node.users:
                owner, _, _ = str(node.target).rpartition(".")
                yield self.module.get_submodule(owner)

    def consumers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that use a node's value, not just its shape or type."""
        return [user for user in node.users if self.steps[user] != "metadata"]

    def producer(self, node: fx.Node) -> fx.Node | None:
        """The node that produces the input of a step with one input; None if no node does."""
        # A rescaling may have its input behind the constant, as in `2 * x`.
        return next(iter(_operands(node)), None)

    def before(self, node: fx.Node, through: Collection[str] = ("same",)) -> fx.Node | None:
        """The nearest node before `node` that is none of the steps in `through`, by default
        dropouts and identities.
        """
        producer = self.producer(node)
        while producer is not None and self.steps[producer] in through:
            producer = self.producer(producer)
        return producer

    def after(self, node: fx.Node) -> list[fx.Node]:
        """The nearest consumers of `node` that are no dropouts or identities."""
        after = []
        for user in self.consumers(node):
            after += self.after(user) if self.steps[user] == "same" else [user]
        return after

    def norm_before(self, node: fx.Node) -> fx.Node | None:
        """The call of the norm whose output an activation takes."""
        norm = self.before(node)
        if norm is not None and self.steps[norm] == "norm":
            return norm
        return None

    def describe(self, node: fx.Node) -> str:
        """Words for a node: a module's class and name, or a function's name."""
        if node.op == "call_module":
            return self._flows.label(self.modules[node])
        if node.op == "placeholder":
            return f"the input of {self.name or 'the model'}"
        if node.op.startswith("call"):
            return f"{call_name(node)}()"
        return str(node.target)

    def reaches_final_pool(self, node: fx.Node) -> bool:
        """Whether no layer but dropout, reshaping or squeeze-excite lies between `node` and the
        final mean pooling.
        """
        following = self._only_consumer(node)
        while following is not None and self.steps[following] in (*_TO_POOL, "product"):
            following = self._only_consumer(following)
        if following is None:
            return False
        step = self.steps[following]
        if step != "window":
            return step == "pool"
        # A mean over windows before another norm is not the final pooling.
        return all(self.steps[later] != "norm" for later in reached(following, self.consumers))

    def _only_consumer(self, node: fx.Node) -> fx.Node | None:
        """The only consumer of a value; None if there are several.

        A squeeze-excite consumes its input twice, to pool it and to scale it: there the product
        counts as the only consumer.
        """
        users = self.after(node)
        if len(users) == 1:
            return users[0]
        not_pooling = [user for user in users if self.steps[user] != "pool"]
        if len(not_pooling) == 1 and self.steps[not_pooling[0]] == "product":
            return not_pooling[0]
        return None

    def in_squeeze_excite(self, node: fx.Node) -> bool:
        """Whether `node` works on pooled values, one a channel, that go on to multiply other
        features.
        """
        return self.is_pooled(node) and self._multiplies(node, _OUT_OF_GATE)

    def is_pooled(self, node: fx.Node) -> bool:
        """Whether `node` works on pooled values, one a channel."""
        producer = self.before(node, _IN_GATE)
        return producer is not None and self.steps[producer] == "pool"

    def activation(self, node: fx.Node) -> nn.Module:
        """The activation module that a node calls, or a fresh one that does the same."""
        module = self.modules.get(node) or recognition.function_module(node)
        # Only asked of a step that is an activation.
        assert module is not None
        return module

    def is_gate(self, node: fx.Node) -> bool:
        """Whether an activation is of the sigmoid kind and its output multiplies other features."""
        act = self.activation(node)
        if [*act.parameters()] or not self._multiplies(node, {"same", "shape", "spread"}):
            return False
        values = act(torch.linspace(-20, 20, 101, device="cpu"))
        return bool(values.min() >= 0 and values.max() <= 1)

    def _multiplies(self, node: fx.Node, through: Collection[str]) -> bool:
        """Whether `node` reaches a product by way of steps in `through` alone."""

        def following(at: fx.Node) -> list[fx.Node]:
            if at is node or self.steps[at] in through:
                return self.consumers(at)
            return []

        return any(self.steps[later] == "product" for later in reached(node, following) - {node})

    def _step(self, node: fx.Node) -> str:
        if node.op in ("call_function", "call_method"):
            return _call_step(node)
        if node.op == "call_module":
            return self._step_of_module(self.modules[node])
        return {"output": "output", "placeholder": "input"}.get(node.op, "constant")

    def _step_of_module(self, module: nn.Module) -> str:
        """The step that a call of a module is."""
        if self._flows.is_norm(module) or recognition.is_norm(module):
            return "norm"
        if recognition.is_altered(module):
            return "module"
        if module in self._flows.activations:
            return "activation"
        if isinstance(module, nn.modules.pooling._AdaptiveAvgPoolNd):
            return _pool_step(module.output_size)
        if recognition.is_drop(module):
            return "same"
        return _step_by_class(module)


def _step_by_class(module: nn.Module) -> str:
    steps = (step for cls, step in _STEP_OF_CLASS.items() if isinstance(module, cls))
    return next(steps, "module")


def _call_step(node: fx.Node) -> str:
    """The step that a call of a function or of a tensor's method is."""
    name = call_name(node)
    step = _STEP_OF.get(name, "call")
    if step != "metadata" and recognition.function_module(node) is not None:
        return "activation"
    if step == "pool":
        return _pool_step(_second_argument(node, "output_size"))
    if name == "mean":
        return _mean_step(_second_argument(node, "dim"))
    if step in ("addition", "product"):
        if len(_operands(node)) > 1:
            return step
        return "rescaling"
    return step


def _operands(node: fx.Node) -> list[fx.Node]:
    """The values that a call takes, without numbers, parameters and buffers."""
    arguments = (*node.args, *node.kwargs.values())
    return [a for a in arguments if isinstance(a, fx.Node) and a.op != "get_attr"]


def _second_argument(node: fx.Node, name: str) -> Any:
    if len(node.args) > 1:
        return node.args[1]
    return node.kwargs.get(name)


def _listed(value: Any) -> Sequence[Any]:
    """Return an argument that is one number, or one for each dimension, as a sequence."""
    if isinstance(value, (tuple, list)):
        return value
    return (value,)


def _mean_step(dims: Any) -> str:
    """A mean over other dimensions than the channels' is a pooling."""
    kept = all(isinstance(dim, int) and dim != 1 for dim in _listed(dims))
    if kept:
        return "pool"
    return "call"


def _pool_step(output_size: Any) -> str:
    if all(size == 1 for size in _listed(output_size)):
        return "pool"
    return "window"


def reached(start: fx.Node, neighbors: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return a node and all nodes to which `neighbors` leads from it, step by step."""
    seen: set[fx.Node] = set()
    pending = [start]
    while pending:
        if (node := pending.pop()) not in seen:
            seen.add(node)
            pending += neighbors(node)
    return seen
