"""Symbolic tracing of one module: the place of every call, on every path."""

import dis
import inspect
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import fx, nn

from retrofit.graph import recognition
from retrofit.graph.source_code import raising_outcomes
from retrofit.utils.snapshot import Snapshot

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# The most conditions on values on one path, so that a block has 64 paths at most; and the most of
# these that may stand in the code of its parts.
_CONDITIONS = 6
_CONDITIONS_OF_PARTS = 2
# What a value becomes where traced code makes it a number: an even and an odd size, for padding.
_SIZES = (64, 63)
_MACHINERY = (
    "torch.fx.",
    "torch.overrides",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch._",
    __name__,
)


def call_name(node: fx.Node) -> str:
    """The bare name of the function or method that a node calls, e.g. "add" for `operator.add`, or of
    the attribute that it takes, e.g. "shape".
    """
    name = getattr(node.target, "__name__", str(node.target))
    if name == "getattr":
        return str(node.args[1])
    return name.strip("_") + ("_" if name.endswith("_") and not name.startswith("_") else "")


class Place(NamedTuple):
    """A call's place in the code.

    Attributes:
        owner: The module whose method makes the call.
        target: The called module or function, or the name of a tensor's method.
        code: The function that makes the call; None in an fx.GraphModule, whose code follows its
            graph.
        at: Where in it the call ends, line and column; or the name of a Sequential's entry, or of a
            graph's node.
    """

    owner: nn.Module
    target: Any
    code: CodeType | None
    at: tuple[int, int] | str


def traced(
    module: nn.Module, training: bool, is_leaf: Callable[[nn.Module], bool], snapshot: Snapshot
) -> "list[Tracer]":
    """Trace a module in one mode, on every path that its conditions on values allow.

    Args:
        module: The module, which is left as it was.
        training: Whether it is traced in training mode.
        is_leaf: Whether a module's call is one node.
        snapshot: Of the module, or of the network that holds it.

    Returns:
        A trace for each path that can be taken: one that ends in an error of the code's own
        (`raise`, `assert`), or in a name or value that the path leaves unset, cannot.

    Raises:
        Exception: What the code raises under trace, unless it ends only some of the paths by an
            error of its own.
    """
    paths: list[Tracer] = []
    refusals: list[Exception] = []
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        tracer = Tracer(is_leaf, pending.pop())
        snapshot.empty_caches()
        try:
            # Code under trace warns about proxies, not about the model.
            with warnings.catch_warnings(action="ignore"):
                module.train(training)
                tracer.trace(module)
        except Exception as error:
            if not tracer.conditions or not _ends_a_path(error):
                raise
            refusals.append(error)
        else:
            paths.append(tracer)
        finally:
            # No path meets the values of another.
            snapshot.restore()
        pending += tracer.others
    if not paths:
        raise refusals[0]
    return paths


def _ends_a_path(error: Exception) -> bool:
    """Whether the code under trace would raise an exception for real values too."""
    # No branch has set the variable, or returned a value: neither is a value under trace.
    if isinstance(error, UnboundLocalError):
        return True
    if isinstance(error, AttributeError) and error.name is not None and error.obj is None:
        return True
    return _is_raised_by_code(error)


def _is_raised_by_code(error: Exception) -> bool:
    """Whether the code under trace raised an exception itself, with `raise` or `assert`."""
    last: Any = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    is_of_the_code = not last.tb_frame.f_globals.get("__name__", "").startswith(_MACHINERY)
    return (
        is_of_the_code and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    )


class _Value(fx.Proxy):
    """A value under trace. Turned into a number, it is one of `_SIZES`; as a condition, it is true
    on one path and false on another.
    """

    tracer: Any

    def __int__(self) -> int:
        if self.tracer.size is None:
            self.tracer.size = _SIZES[self.tracer.to_bool(self)]
        return int(self.tracer.size)


class BranchingPartsError(fx.proxy.TraceError):
    """Parts of a module branch on values too often to follow every path; `parts` has them."""

    def __init__(self, parts: set[nn.Module]) -> None:
        super().__init__(f"{len(parts)} of its parts branch on values")
        self.parts = parts


class Tracer(fx.Tracer):
    """fx's tracer with timm's leaves, buffers as nodes, defaults for optional arguments, and no
    hooks run.

    Args:
        is_leaf: Whether a module's call is one node.
        decisions: Outcomes of the first conditions on values that the code under trace meets.
    """

    proxy_buffer_attributes = True

    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], decisions: tuple[bool, ...] = ()
    ) -> None:
        super().__init__(autowrap_functions=recognition.wrapped_functions())
        self.is_leaf = is_leaf
        self.decisions = decisions
        # Where each call of a module or an activation is made.
        self.places: dict[fx.Node, Place] = {}
        # Where the modules are called that return a node's value, the innermost first; the node's
        # own module is not among them.
        self.returned: dict[fx.Node, list[Place]] = defaultdict(list)
        # The globals of the function that makes a call, and those of its locals that are no values
        # under trace.
        self.variables: dict[fx.Node, tuple[dict[str, Any], dict[str, Any]]] = {}
        # How many conditions on values were met so far.
        self.conditions = 0
        # The parts whose code met them, for each of their conditions.
        self.branching: list[nn.Module] = []
        # The answers, by question, to conditions that ask for sizes and types alone.
        self.answers: dict[str, bool] = {}
        # The decisions that lead to the paths that branch off this one.
        self.others: list[tuple[bool, ...]] = []
        # The number that values are turned into; None if the code turns none into a number.
        self.size: int | None = None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a branch on a value; the other decision is left for a further trace.

        A condition that asks for sizes and types alone has one answer on a path, wherever it stands.
        One whose other outcome leads to an error is no branch.
        """
        question = _question(obj.node)
        if question is None:
            return self._outcome()
        if question not in self.answers:
            self.answers[question] = self._outcome()
        return self.answers[question]

    def _outcome(self) -> bool:
        """Return the outcome of a new condition, and note the path of the other one."""
        callers = _callers()
        allowed = _only_allowed(callers)
        if allowed is not None:
            return allowed
        owner = _owner(callers)
        if owner is not self.root:
            self.branching.append(owner)
        if self.conditions == len(self.decisions):
            self._branch_off()
        self.conditions += 1
        return self.decisions[self.conditions - 1]

    def _branch_off(self) -> None:
        """Decide that the condition is false here, and leave the path on which it is true.

        Raises:
            TraceError: If the code branches on values too often.
        """
        # Once a part branches, the trace goes on past the limit: `trace` names all parts that do.
        if self.conditions >= _CONDITIONS and not self.branching:
            raise fx.proxy.TraceError(f"it branches on values more than {_CONDITIONS} times")
        self.others.append((*self.decisions, True))
        self.decisions += (False,)

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        """Trace a module on one path.

        Raises:
            BranchingPartsError: If the parts that it calls branch too often.
        """
        graph = super().trace(root, concrete_args)
        is_too_much = self.conditions > _CONDITIONS or len(self.branching) > _CONDITIONS_OF_PARTS
        if self.branching and is_too_much:
            raise BranchingPartsError(set(self.branching))
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        # `m.forward` runs no hooks, which expect tensors.
        value = super().call_module(m, m.forward, args, kwargs)
        if isinstance(value, fx.Proxy) and value.node.target != self.path_of_module(m):
            self.returned[value.node].append(self._place(m, _callers()))
        return value

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any
    ) -> fx.Node:
        """Create a node, and note where the code calls the module or activation."""
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        if kind == "call_module":
            target = self.root.get_submodule(target)
        elif recognition.function_module(node) is None:
            return node
        callers = _callers()
        self.places[node] = self._place(target, callers)
        variables = callers[0].f_locals.items()
        constants = {name: value for name, value in variables if not isinstance(value, fx.Proxy)}
        self.variables[node] = callers[0].f_globals, constants
        return node

    def _place(self, target: Any, callers: list[FrameType]) -> Place:
        """Return the place of the call that the innermost of some functions makes now."""
        caller = callers[0]
        code = caller.f_code
        owner = _owner(callers)
        if isinstance(owner, fx.GraphModule):
            return Place(owner, target, None, _assigned_name(caller))
        forward = nn.Sequential.forward
        if code is forward.__code__ and type(owner).forward is forward:
            return Place(owner, target, code, self._entry(owner, target))
        return Place(owner, target, code, _end_of_call(caller))

    def _entry(self, sequence: nn.Module, module: nn.Module) -> str:
        """Return the name of a Sequential's entry that is called; it may hold a module twice."""
        entries = [name for name, entry in sequence._modules.items() if entry is module]
        places = self.places.values()
        calls = sum((place.owner, place.target) == (sequence, module) for place in places)
        return entries[calls % len(entries)]

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Return a method and what it is called with: placeholders for its required arguments.

        Optional arguments take their default and variadic ones are empty; a method that takes
        nothing else than `*inputs` gets one.
        """
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        names = _required(parameters)
        if not names and parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
            names = [parameters[0].name]
        values = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return root_fn, [self.root, *values]


def _required(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.default is p.empty and p.kind not in VARIADIC]


def takes_defaults(module: nn.Module, node: fx.Node) -> bool:
    """Whether a call gives values for a module's required arguments, by position, and no others, as
    a trace of the module alone does.
    """
    required = _required(inspect.signature(module.forward).parameters.values())
    is_values = all(isinstance(argument, fx.Node) for argument in node.args)
    return is_values and len(node.args) == len(required) and not node.kwargs


def _question(node: fx.Node) -> str | None:
    """Return a condition on sizes and types as text, equal for conditions with the same outcome.

    None says that it asks for something else, or that code changes a tensor's shape in place.
    """
    name = call_name(node)
    if name in recognition.METADATA:
        return _question_of_metadata(name, node)
    if getattr(node.target, "__module__", "") != "_operator":
        return None
    parts = []
    for argument in node.args:
        if not isinstance(argument, fx.Node):
            parts.append(repr(argument))
            continue
        part = _question(argument)
        if part is None:
            return None
        parts.append(part)
    return f"{name} {parts}"


def _question_of_metadata(attribute: str, node: fx.Node) -> str | None:
    tensor, *arguments = node.args or (None,)
    if not isinstance(tensor, fx.Node):
        return None
    if any(call_name(user).endswith("_") for user in tensor.users):
        return None
    return f"{attribute} of {tensor} {arguments}"


def _callers() -> list[FrameType]:
    """Return the functions under trace, the innermost first, but for those of fx and torch."""
    every = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    frames = takewhile(lambda frame: frame.f_code is not traced.__code__, every)
    return [f for f in frames if not f.f_globals.get("__name__", "").startswith(_MACHINERY)]


def _only_allowed(callers: list[FrameType]) -> bool | None:
    """Return the outcome of the current condition that does not lead straight to an error.

    None says that either outcome, or none, may do so: that no `raise` or `assert` follows, or that
    one of the functions may catch it.
    """
    if any(caller.f_code.co_exceptiontable for caller in callers):
        return None
    raising = raising_outcomes(callers[0].f_code, callers[0].f_lasti)
    if len(raising) != 1:
        return None
    return not raising.pop()


def _owner(callers: list[FrameType]) -> nn.Module:
    """Return the module whose method, or a function that the method calls, is the innermost."""
    methods = (frame for frame in callers if frame.f_code.co_argcount)
    firsts = (frame.f_locals.get(frame.f_code.co_varnames[0]) for frame in methods)
    return next(first for first in firsts if isinstance(first, nn.Module))


def _end_of_call(caller: FrameType) -> tuple[int, int]:
    """Return the line and column where the call ends that a function makes now."""
    # An instruction has two bytes.
    instruction = caller.f_lasti // 2
    _, line, _, column = next(islice(caller.f_code.co_positions(), instruction, None))
    return line or 0, column or 0


def _assigned_name(caller: FrameType) -> str:
    """Return the name that a graph's code gives to what the current call returns: its node's."""
    steps = dis.get_instructions(caller.f_code)
    after = (step for step in steps if step.offset > caller.f_lasti)
    return str(next(step.argval for step in after if step.opname == "STORE_FAST"))
