"""Symbolic tracing that changes nothing, follows every branch, and goes on where the whole model cannot be traced."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from torch import fx, nn

from retrofit.graph import kinds
from retrofit.utils.evaluating import modes_of, restore_modes
from retrofit.utils.text import with_class

Mode = Literal["eval", "train"]
MODES: tuple[Mode, ...] = ("eval", "train")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_CONDITIONS = 6  # on one path
_PATHS = 16
_SIZES = (64, 63)  # stand for a value that the code under trace turns into a number
_MACHINERY = ("torch.fx.", "torch.overrides", "torch.nn.functional", "torch.nn.modules.module", "torch._", __name__)


class Place(NamedTuple):
    """A call's place in the code.

    Attributes:
        owner: The module whose method makes the call.
        target: The called module, function, or name of a tensor's method.
        code: The function that makes the call; None in an fx.GraphModule, whose code follows its graph.
        at: Where in it the call ends: (line, column); in an nn.Sequential the entry's name, in a graph the node's.
    """

    owner: nn.Module
    target: Any
    code: CodeType | None
    at: tuple[int, int] | str


@dataclass
class Scope:
    """One path through a module's forward.

    Attributes:
        name: Dotted name of the module in the model, empty for the model itself.
        module: The module.
        graph: Its graph; norms, activations, dropouts and what fx cannot enter are single nodes.
        places: The place of every call of a module or an activation.
        variables: The globals of the function that makes such a call, and its locals that are no values under trace.
        assumed: The nodes after which other arguments or values may lead to other paths: their function takes optional
            arguments, or one that is no value under trace; all of them if a value was turned into a number.
    """

    name: str
    module: nn.Module
    graph: fx.Graph
    places: dict[fx.Node, Place]
    variables: dict[fx.Node, tuple[dict[str, Any], dict[str, Any]]]
    assumed: set[fx.Node]

    @functools.cached_property
    def modules(self) -> dict[fx.Node, nn.Module]:
        """The module that each call_module node calls."""
        by_name = dict(self.module.named_modules(remove_duplicate=False))
        return {node: by_name[node.target] for node in self.graph.nodes if node.op == "call_module"}


@dataclass
class Coverage:
    """What tracing a model gave.

    Attributes:
        scopes: Every path of every traced module, in eval and in train mode; a call belongs to one module's scopes.
        failures: The modules that could not be traced, with the reason in one line.
        holding: The modules that hold one of the norms asked for; no other is traced by itself.
    """

    scopes: list[Scope] = field(default_factory=list)
    failures: dict[nn.Module, str] = field(default_factory=dict)
    holding: set[nn.Module] = field(default_factory=set)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore every module's attributes on leaving, whatever a trace set: training flags, caches, constants."""
    saved = [(module, dict(module.__dict__)) for module in model.modules()]
    modes = modes_of(model)
    try:
        yield
    finally:
        restore_modes(modes)  # through `train`, which may do more than set attributes
        for module, attributes in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)


class _Value(fx.Proxy):
    """A value under trace; as a number it is one of `_SIZES`, as a condition both true and false."""

    tracer: Any

    def __int__(self) -> int:
        return int(self.tracer.number())


class Tracer(fx.Tracer):
    """fx's tracer with timm's leaves, buffers as nodes, defaults for optional arguments, and no hooks run.

    Args:
        leaf: Whether a call of a module is one node.
        decisions: The outcomes of the first conditions on values that the code under trace meets.

    Attributes:
        places, variables, assumed: As `Scope`'s.
        others: The decisions that lead to the paths that branch off this one, behind `decisions`.
    """

    proxy_buffer_attributes = True

    def __init__(self, leaf: Callable[[nn.Module], bool], decisions: tuple[bool, ...] = ()) -> None:
        super().__init__(autowrap_functions=kinds.wrapped_functions())
        self.leaf = leaf
        self.places: dict[fx.Node, Place] = {}
        self.variables: dict[fx.Node, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.assumed: set[fx.Node] = set()
        self.others: list[tuple[bool, ...]] = []
        self.size: int | None = None  # what numbers are on this path
        self.decided: tuple[bool, ...] = ()
        self._given = decisions
        self._entries: list[Iterator[str]] = []  # of the sequences that are running

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace `root`, a module; see `fx.Tracer.trace`."""
        self._entries = [iter(root._modules)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # code under trace warns about proxies, not about the model
            return super().trace(root, concrete_args)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Wrap a node for the code under trace."""
        return _Value(node, self)

    def number(self) -> int:
        """What a value under trace is as a number."""
        if self.size is None:
            self.size = _SIZES[self.decide()]
        return self.size

    def decide(self) -> bool:
        """The outcome of the next condition on this path."""
        place = len(self.decided)
        if place >= _CONDITIONS:
            raise fx.proxy.TraceError(f"it branches on values more than {_CONDITIONS} times")
        outcome = self._given[place] if place < len(self._given) else False
        if place >= len(self._given):
            self.others.append((*self.decided, True))
        self.decided = (*self.decided, outcome)
        return outcome

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a condition on a value."""
        return self.decide()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of `m` is one node."""
        return self.leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record a leaf's call, or follow its forward without its hooks, which expect tensors."""
        name = self.path_of_module(m)
        entry = next(self._entries[-1], "")
        if self.is_leaf_module(m, name):
            node = self.create_proxy("call_module", name, args, kwargs)
            place = self.places[node.node]
            if type(place.owner).forward is nn.Sequential.forward:
                self.places[node.node] = place._replace(at=entry)
            return node
        self._entries.append(iter(m._modules))
        try:
            return m.forward(*args, **kwargs)
        finally:
            self._entries.pop()

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        """Create a node and note its place."""
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        if kind == "call_module" or kinds.function_module(node) is not None:
            self._note(node, self.root.get_submodule(target) if kind == "call_module" else target)
        return node

    def _note(self, node: fx.Node, target: Any) -> None:
        """Note a call's place: where the code under trace, not fx or torch, makes it."""
        caller = _outside_machinery(sys._getframe(2))
        frame = caller
        while not isinstance(owner := _first_argument(frame), nn.Module):
            frame = _outside_machinery(frame.f_back)
        code = caller.f_code
        if isinstance(owner, fx.GraphModule):
            after = (step for step in dis.get_instructions(code) if step.offset > caller.f_lasti)
            self.places[node] = Place(owner, target, None, next(s.argval for s in after if s.opname == "STORE_FAST"))
            self.assumed.add(node)
            return
        _, line, _, column = _positions(code)[caller.f_lasti // 2]
        self.places[node] = Place(owner, target, code, (line or 0, column or 0))
        variables = caller.f_locals
        self.variables[node] = (
            caller.f_globals,
            {name: value for name, value in variables.items() if not isinstance(value, fx.Proxy)},
        )
        others = (variables.get(name) for name in code.co_varnames[1 : code.co_argcount])
        if _has_options(code, owner) or not all(isinstance(value, fx.Proxy) for value in others):
            self.assumed.add(node)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Make placeholders of the required arguments; optional ones take their default and variadic ones are empty."""
        args: list[Any] = [self.root]
        named: dict[str, Any] = {}
        for parameter in list(inspect.signature(root_fn).parameters.values())[1:]:
            if parameter.kind in _VARIADIC or parameter.default is not parameter.empty:
                continue
            value = self.create_proxy("placeholder", parameter.name, (), {})
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                args.append(value)
        return (functools.partial(root_fn, **named) if named else root_fn), args


def _outside_machinery(frame: FrameType | None) -> FrameType:
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_MACHINERY):
        frame = frame.f_back
    assert frame is not None  # the code under trace
    return frame


def _first_argument(frame: FrameType) -> object:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


@functools.cache
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


def _has_options(code: CodeType, owner: nn.Module) -> bool:
    """Whether a function takes optional or variadic arguments."""
    method = inspect.getattr_static(type(owner), code.co_name, None)
    options = getattr(method, "__defaults__", None) or code.co_kwonlyargcount
    return bool(options or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))


def _paths(name: str, module: nn.Module, leaf: Callable[[nn.Module], bool]) -> list[Scope]:
    """Trace a module on every path that its conditions on values allow, but for those that end in a refusal."""
    scopes: list[Scope] = []
    refusal: Exception | None = None
    pending: list[tuple[bool, ...]] = [()]
    paths = 0
    while pending:
        paths += 1
        if paths > _PATHS:
            raise fx.proxy.TraceError(f"it branches on values into more than {_PATHS} paths")
        tracer = Tracer(leaf, pending.pop())
        try:
            graph = tracer.trace(module)
        except Exception as error:
            if not tracer.decided or not _is_refusal(error):
                raise
            refusal = error
        else:
            assumed = set(graph.nodes) if tracer.size is not None else tracer.assumed
            scopes.append(Scope(name, module, graph, tracer.places, tracer.variables, assumed))
        pending += tracer.others
    if refusal is not None and not scopes:
        raise refusal
    return scopes


def _is_refusal(error: Exception) -> bool:
    """Whether the code under trace raised an exception itself, with `raise` or `assert`."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or traceback.tb_frame.f_globals.get("__name__", "").startswith(_MACHINERY):
        return False
    return traceback.tb_frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def trace(
    model: nn.Module, is_norm: Callable[[nn.Module], bool] = kinds.is_norm, activations: Collection[nn.Module] = ()
) -> Coverage:
    """Trace `model` in eval and train mode, or, where it cannot be traced, the largest parts of it that can.

    Works on the meta device and without input; the model is left as it was. Only parts that hold a norm asked for are
    traced. Classes that fx cannot enter are single nodes of the scope that calls them, and scopes of their own where
    they hold norms.

    Args:
        model: Any module, in any mode.
        is_norm: The norms asked for.
        activations: The activations, which are single nodes too.

    Returns:
        The traced scopes, and the modules that could not be traced.
    """
    coverage = Coverage()
    names = {module: name for name, module in model.named_modules()}
    leaves = {module for module in names if is_norm(module) or module in activations or kinds.is_leaf(module)}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_norm(module):
            parts = name.split(".")
            coverage.holding.update(model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    done: set[tuple[nn.Module, Mode]] = set()

    def cover(module: nn.Module, mode: Mode) -> None:
        if (module, mode) in done or module not in coverage.holding or is_norm(module):
            return
        done.add((module, mode))
        try:
            module.train(mode == "train")
            scopes = _paths(names[module], module, leaves.__contains__)
        except Exception as error:  # anything may come out of a model's own code
            coverage.failures.setdefault(module, with_class(error).split(". ")[0])
            inner = list(module.children())
        else:
            coverage.scopes += scopes
            inner = [called for scope in scopes for called in scope.modules.values()]
        for part in inner:
            cover(part, mode)

    with untouched(model):
        for mode in MODES:
            cover(model, mode)
    return coverage
