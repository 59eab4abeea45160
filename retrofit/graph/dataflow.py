"""The traced graphs of a model: what kind of step a node is, who consumes a value, where values
come from and go.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from retrofit.graph import recognition
from retrofit.graph.channel_moves import RESHAPINGS, listed, moved_channels
from retrofit.graph.trace import BranchingPartsError, Tracer, call_name, reads_of_mode, traced
from retrofit.utils.forward_pass import random_states_kept
from retrofit.utils.snapshot import Snapshot
from retrofit.utils.text import with_class

# Names of the functions and methods, by the kind of step that they are. Other kinds are norm,
# activation, linear, convolution, module, call, input and output; a constant is also a sum or a
# product with constants.
_CALLS = {
    "metadata": " ".join(recognition.METADATA) + " assert",
    "same": "contiguous clone to type type_as half bfloat16 float double "
    "dropout dropout1d dropout2d dropout3d alpha_dropout",
    # All that `moved_channels` knows is among these.
    "shape": "view reshape reshape_as view_as flatten unflatten permute transpose movedim "
    "swapaxes swapdims squeeze unsqueeze",
    "concatenation": "cat concat concatenate stack",
    "spread": "getitem chunk split unbind expand expand_as sum softmax interpolate",
    "addition": "add iadd add_ sub isub sub_",
    "product": "mul imul mul_ multiply truediv div div_",
    "pool": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "window": "avg_pool1d avg_pool2d avg_pool3d",
}
_KIND_OF = {name: kind for kind, names in _CALLS.items() for name in names.split()}
_MODULES = {
    nn.Identity: "same",
    nn.Linear: "linear",
    nn.modules.conv._ConvNd: "convolution",
    nn.modules.pooling._AvgPoolNd: "window",
    nn.Flatten: "shape",
    nn.Unflatten: "shape",
}
# Steps that leave a value's channels to themselves, on the way to a mean pooling.
_TO_POOL = {"same", "shape", "concatenation", "constant"}
# Steps inside a squeeze-excite, before and after the activation in question.
_IN_GATE = {"same", "shape", "constant", "convolution", "linear", "norm", "activation", "addition"}
_OUT_OF_GATE = {*_IN_GATE, "spread", "module"}


def reached(start: fx.Node, ahead: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """A node and all that is reached from it, in one direction."""
    seen: set[fx.Node] = set()
    left = [start]
    while left:
        if (node := left.pop()) not in seen:
            seen.add(node)
            left += ahead(node)
    return seen


class Flow:
    """One path through a module's forward, and the kind of each step on it.

    In its graph norms, activations, dropouts and what fx cannot enter are single nodes. `modules`
    has the module that each call_module node calls, `steps` the kind of each node; `places`,
    `variables`, `returned` and `size` are as `Tracer`'s.
    """

    def __init__(self, trace: Tracer, flows: "Flows") -> None:
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

        Nodes without users come from those who look at a module while it is traced (`is_norm`
        does).
        """
        for node in self.graph.find_nodes(op="get_attr"):
            if node.users:
                owner, _, _ = str(node.target).rpartition(".")
                yield self.module.get_submodule(owner)

    def consumers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that use a node's value, not just its shape or type."""
        return [user for user in node.users if self.steps[user] != "metadata"]

    def source(self, node: fx.Node) -> fx.Node | None:
        """The node whose value a one-input step works on."""
        source = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(source, fx.Node):
            return source
        return None

    def before(self, node: fx.Node, through: Collection[str] = ("same",)) -> fx.Node | None:
        """The source of `node`, past dropouts and identities, or other steps."""
        source = self.source(node)
        while source is not None and self.steps[source] in through:
            source = self.source(source)
        return source

    def after(self, node: fx.Node) -> list[fx.Node]:
        """The consumers of `node`, past dropouts and identities."""
        after = []
        for user in self.consumers(node):
            after += self.after(user) if self.steps[user] == "same" else [user]
        return after

    def channels_after(
        self, node: fx.Node, dim: int = 1, is_of_its_rank: bool = True
    ) -> Iterator[tuple[fx.Node, int]]:
        """The consumers of `node`, past dropouts, identities and steps that move whole channels.

        Args:
            node: A node whose value has its channels in dimension `dim`.
            dim: The dimension, from the front or from the end.
            is_of_its_rank: Whether the value has the rank of the first node's. Of another rank, only
                the second and the last dimension are told.

        Yields:
            Each consumer, and the dimension of the channels of what it takes.
        """
        for user in self.consumers(node):
            moved: int | None = dim
            keeps_rank = is_of_its_rank
            if self.steps[user] != "same":
                moved = moved_channels(user, dim)
                keeps_rank = is_of_its_rank and call_name(user) not in RESHAPINGS
            if moved is None or not (keeps_rank or moved in (1, -1)):
                yield user, dim
            else:
                yield from self.channels_after(user, moved, keeps_rank)

    def norm_before(self, node: fx.Node) -> fx.Node | None:
        """The call of a norm whose whole channels an activation takes."""
        source = self.before(node, ("same", "shape"))
        if source is None or self.steps[source] != "norm":
            return None
        takes_channels = any(user is node for user, _ in self.channels_after(source))
        if takes_channels:
            return source
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
        following = self._only_follower(node)
        while following is not None and self.steps[following] in (*_TO_POOL, "product"):
            following = self._only_follower(following)
        if following is None:
            return False
        step = self.steps[following]
        return step == "pool" or (step == "window" and not self._reaches_norm(following))

    def _reaches_norm(self, node: fx.Node) -> bool:
        """Whether a norm comes behind a window, which then is not the final pooling."""
        return any(self.steps[later] == "norm" for later in reached(node, self.consumers))

    def _only_follower(self, node: fx.Node) -> fx.Node | None:
        """The one consumer of a value, or the product of a squeeze-excite, which scales channels by
        their own means; None where others use it too.
        """
        users = self.after(node)
        if len(users) == 1:
            return users[0]
        gated = [user for user in users if self.steps[user] == "product"]
        are_pooled = all(self.steps[user] in ("product", "pool") for user in users)
        if len(gated) == 1 and are_pooled:
            return gated[0]
        return None

    def in_squeeze_excite(self, node: fx.Node) -> bool:
        """Whether `node` works on pooled values, one a channel, that go on to multiply other
        features.
        """
        return self.is_pooled(node) and self._multiplies(node, _OUT_OF_GATE)

    def is_pooled(self, node: fx.Node) -> bool:
        """Whether `node` works on pooled values, one a channel."""
        source = self.before(node, _IN_GATE)
        return source is not None and self.steps[source] == "pool"

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
        """Whether a product takes what follows `node`, not going on past steps other than
        `through`.
        """
        seen = reached(
            node, lambda at: self.consumers(at) if at is node or self.steps[at] in through else []
        )
        return any(self.steps[later] == "product" for later in seen - {node})

    def _step(self, node: fx.Node) -> str:
        if node.op in ("call_function", "call_method"):
            return _call_step(node)
        if node.op == "call_module":
            return self._module_step(self.modules[node])
        return {"output": "output", "placeholder": "input"}.get(node.op, "constant")

    def _module_step(self, module: nn.Module) -> str:
        """The kind of step that a call of a module is."""
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
        return _kind_of_module(module)


def _kind_of_module(module: nn.Module) -> str:
    return next((kind for cls, kind in _MODULES.items() if isinstance(module, cls)), "module")


def _call_step(node: fx.Node) -> str:
    """The kind of step that a call of a function or of a tensor's method is."""
    name = call_name(node)
    kind = _KIND_OF.get(name, "call")
    if name == "getattr":
        is_metadata = _KIND_OF.get(str(node.args[1])) == "metadata"
        if is_metadata:
            return "metadata"
        return "call"
    if kind != "metadata" and recognition.function_module(node) is not None:
        return "activation"
    if kind == "pool":
        return _pool_step(_second_argument(node, "output_size"))
    if name == "mean":
        return _mean_step(_second_argument(node, "dim"))
    if kind in ("addition", "product"):
        values = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
        if len(values) > 1:
            return kind
        return "constant"
    return kind


def _second_argument(node: fx.Node, name: str) -> Any:
    if len(node.args) > 1:
        return node.args[1]
    return node.kwargs.get(name)


def _mean_step(dims: Any) -> str:
    """A mean is a pooling where it leaves the channels."""
    kept = all(isinstance(dim, int) and dim != 1 for dim in listed(dims))
    if kept:
        return "pool"
    return "call"


def _pool_step(output_size: Any) -> str:
    if all(size == 1 for size in listed(output_size)):
        return "pool"
    return "window"


class Flows:
    """All paths through a model, and what is called, held, shared and read on them.

    The model is traced in evaluation, and in training where that may differ; where it cannot be,
    the largest parts of it that can. Only parts that hold a norm asked for are traced. What fx
    cannot enter, and a part that branches often on values, is a single node of the graph that calls
    it, and has graphs of its own where it holds norms. It works on the meta device and without
    input; the model is left as it was.
    """

    def __init__(
        self, model: nn.Module, is_norm: Callable[[nn.Module], bool] = recognition.is_norm
    ) -> None:
        self.is_norm = is_norm
        self.names = {module: name for name, module in model.named_modules()}
        # What each module holds, and itself.
        self.inside = {module: set(module.modules()) for module in self.names}
        # What could not be traced, with the reason in one line.
        self.failures: dict[nn.Module, str] = {}
        # By whether in training, and the module.
        self._traces: dict[tuple[bool, nn.Module], list[Tracer]] = defaultdict(list)
        # Parts that are one step in what calls them, for the number of their branches.
        self._branching: set[nn.Module] = set()
        self._covered: set[nn.Module] = set()
        # Code that is traced writes to no parameter or buffer.
        tensors = chain(model.parameters(), model.buffers())
        self._snapshot = Snapshot(model, unwritten=tensors)
        self._snapshot.empty_caches()
        try:
            with random_states_kept(torch.device("cpu")), reads_of_mode() as self._readers:
                self._trace_all(model)
        finally:
            self._snapshot.restore()
        # Those of evaluation come first.
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
        self._trace(module, training=False)
        if module not in self.failures and self._modes_differ(module):
            self._trace(module, training=True)
        paths = [*self._traces[False, module], *self._traces[True, module]]
        for path in paths:
            self._give_up_called_otherwise(path)
        called: list[Any] = [place.target for path in paths for place in path.places.values()]
        if module in self.failures:
            called += module.children()
        for part in called:
            self._cover(part)

    def _give_up_called_otherwise(self, path: Tracer) -> None:
        """Claim nothing of a branching part that gets other arguments than where it is traced."""
        for node, place in path.places.items():
            part = place.target
            if part in self._branching and not _takes_defaults(part, node):
                self._covered.add(part)
                self._traces[False, part] = []
                self._traces[True, part] = []
                self.failures[part] = "it branches on values, and takes optional arguments"

    def _trace(self, module: nn.Module, training: bool) -> None:
        """Trace a module in one mode, or say why it cannot be."""
        if not recognition.has_forward(module):
            self.failures[module] = "it has no forward"
            return
        try:
            self._traces[training, module] = self._paths(module, training)
        # A model's own code may raise anything.
        except Exception as error:
            self.failures[module] = with_class(error).split(". ")[0]

    def _paths(self, module: nn.Module, training: bool) -> list[Tracer]:
        """Trace a module; where its parts have many branches, each of them is one step."""
        self._readers.clear()
        try:
            return traced(module, training, self._leaves.__contains__, self._snapshot)
        except BranchingPartsError as error:
            self._branching |= error.parts
            self._leaves |= error.parts
            return self._paths(module, training)

    def _modes_differ(self, module: nn.Module) -> bool:
        """Whether the code of a module, which was traced in evaluation, may do something else in
        training: it reads its mode, or a method of its own sets it.
        """
        if self._readers:
            return True
        return any(
            getattr(type(part), name) is not getattr(nn.Module, name)
            for part in self.inside[module]
            for name in ("train", "eval", "training")
        )


def _takes_defaults(module: nn.Module, node: fx.Node) -> bool:
    """Whether a call gives values for a module's required arguments, and no others."""
    signature = inspect.signature(module.forward)
    arguments = signature.bind(*node.args, **node.kwargs).arguments
    return all(_is_default(signature.parameters[name], value) for name, value in arguments.items())


def _is_default(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether an argument is what a trace of its module alone passes."""
    if parameter.default is inspect.Parameter.empty:
        return isinstance(value, fx.Node)
    return value is parameter.default
