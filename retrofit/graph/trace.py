"""Symbolic tracing that copies nothing, changes nothing, and goes on where the whole model cannot be traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

from torch import fx, nn

from retrofit.graph import kinds
from retrofit.graph.inplace import InplaceProxy
from retrofit.utils.evaluating import modes_of, restore_modes
from retrofit.utils.text import with_class

Mode = Literal["eval", "train"]
MODES: tuple[Mode, ...] = ("eval", "train")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Origin:
    """Where in the model's code a node's call stands.

    Attributes:
        owner: The module whose forward makes the call.
        visit: Number of that module's invocation, unique within the scope.
        methods: For activation calls only: the owner's methods that are running, innermost first, each with a number
            that is unique to its invocation.
    """

    owner: nn.Module
    visit: int
    methods: tuple[tuple[str, int], ...] = ()


@dataclass
class Scope:
    """One traced module.

    Attributes:
        name: Dotted name of the module in the model, empty for the model itself.
        module: The module.
        graph: Its graph; norms, activations, dropouts and what fx cannot enter are single nodes.
        origins: The origin of every node.
        given: For each visit of `origins`, the optional arguments that the call passes.
    """

    name: str
    module: nn.Module
    graph: fx.Graph
    origins: dict[fx.Node, Origin]
    given: dict[int, tuple[str, ...]]

    @functools.cached_property
    def modules(self) -> dict[fx.Node, nn.Module]:
        """The module that each call_module node calls."""
        by_name = dict(self.module.named_modules(remove_duplicate=False))
        return {node: by_name[node.target] for node in self.graph.nodes if node.op == "call_module"}


@dataclass
class Coverage:
    """What tracing a model gave.

    Attributes:
        scopes: Traced modules by mode, "eval" and "train"; no two hold the same call.
        failures: The modules that could not be traced, with the reason in one line.
        holding: The modules that hold one of the norms asked for; no other is traced by itself.
    """

    scopes: dict[Mode, list[Scope]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    failures: dict[nn.Module, str] = field(default_factory=dict)
    holding: set[nn.Module] = field(default_factory=set)


def reason_of(error: Exception) -> str:
    """The first sentence of an exception's message, with its class."""
    return with_class(error).split(". ")[0]


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[list[tuple[nn.Module, dict[str, Any]]]]:
    """Restore every module's attributes on leaving, whatever a trace set: training flags, caches, constants.

    Yields:
        Each module with its attributes as they were.
    """
    saved = [(module, dict(module.__dict__)) for module in model.modules()]
    modes = modes_of(model)
    try:
        yield saved
    finally:
        restore_modes(modes)  # through `train`, which may do more than set attributes
        for module, attributes in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)


class Tracer(fx.Tracer):
    """fx's tracer with timm's leaves, buffers as nodes, defaults for optional arguments, and no hooks run."""

    def __init__(self, leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__(autowrap_functions=kinds.wrapped_functions())
        self.leaf = leaf
        self.origins: dict[fx.Node, Origin] = {}
        self.given: dict[int, tuple[str, ...]] = {0: ()}
        self._stack: list[Origin] = []
        self._tensors: dict[int, str] = {}
        self._visits = 0
        self._frames: dict[FrameType, int] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace `root`, a module; see `fx.Tracer.trace`."""
        self._stack = [Origin(root, 0)]
        self._tensors = {id(t): name for name, t in (*root.named_parameters(), *root.named_buffers())}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # code under trace warns about proxies, not about the model
            return super().trace(root, concrete_args)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Wrap a node for the code under trace."""
        return InplaceProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Stand in a node for a parameter or buffer (fx's own search takes time proportional to their number)."""
        name = self._tensors.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of `m` is one node."""
        return self.leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record a leaf's call, or follow its forward without its hooks, which expect tensors."""
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return self.create_proxy("call_module", name, args, kwargs)
        self._visits += 1
        self._stack.append(Origin(m, self._visits))
        self.given[self._visits] = _given(m, args, kwargs)
        try:
            return m.forward(*args, **kwargs)
        finally:
            self._stack.pop()

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        """Create a node and note its origin."""
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        origin = self._stack[-1]
        if self._is_activation(node):
            origin = Origin(origin.owner, origin.visit, self._methods(origin.owner))
        self.origins[node] = origin
        return node

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Make placeholders of the required arguments; optional ones take their default and variadic ones are empty."""
        args: list[Any] = [self.root]
        named: dict[str, Any] = {}
        for parameter in list(inspect.signature(root_fn).parameters.values())[1:]:
            if parameter.kind in _VARIADIC or parameter.default is not parameter.empty:
                value = self.optional(parameter)
                if value is not parameter.empty:
                    named[parameter.name] = value
                continue
            value = self.create_proxy("placeholder", parameter.name, (), {})
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                args.append(value)
        return (functools.partial(root_fn, **named) if named else root_fn), args

    def optional(self, parameter: inspect.Parameter) -> Any:
        """The value to trace with for an optional or variadic argument; `parameter.empty` leaves it at its default."""
        return parameter.empty

    def _is_activation(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return kinds.is_activation(self.root.get_submodule(str(node.target)))
        return kinds.function_module(node) is not None

    def _methods(self, owner: nn.Module) -> tuple[tuple[str, int], ...]:
        found = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not Tracer.trace.__code__:
            code = frame.f_code
            if code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is owner:
                found.append((code.co_name, self._frames.setdefault(frame, len(self._frames))))
            if code is Tracer.call_module.__code__ and frame.f_locals.get("m") is owner:
                break
            frame = frame.f_back
        return tuple(found)


def trace(model: nn.Module, is_norm: Callable[[nn.Module], bool] = kinds.is_norm) -> Coverage:
    """Trace `model` in eval and train mode, or, where it cannot be traced, the largest parts of it that can.

    Works on the meta device and without input; the model is left as it was. Only parts that hold a norm asked for are
    traced. Classes that fx cannot enter are single nodes of the scope that calls them, and scopes of their own where
    they hold norms.

    Args:
        model: Any module, in any mode.
        is_norm: The norms asked for.

    Returns:
        The traced scopes, and the modules that could not be traced.
    """
    coverage = Coverage()
    names = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_norm(module):
            parts = name.split(".")
            coverage.holding.update(model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))

    def leaf(module: nn.Module) -> bool:
        return is_norm(module) or kinds.is_leaf(module)

    done: set[tuple[nn.Module, Mode]] = set()

    def cover(module: nn.Module, modes: Collection[Mode]) -> None:
        modes = [mode for mode in modes if (module, mode) not in done]
        if module not in coverage.holding or is_norm(module):
            return
        done.update((module, mode) for mode in modes)
        inner: dict[nn.Module, list[Mode]] = {}
        failed: list[Mode] = []
        for mode in modes:
            tracer = Tracer(leaf)
            try:
                module.train(mode == "train")
                graph = tracer.trace(module)
            except Exception as error:  # anything may come out of a model's own code
                coverage.failures.setdefault(module, reason_of(error))
                failed.append(mode)
                continue
            scope = Scope(names[module], module, graph, tracer.origins, tracer.given)
            coverage.scopes[mode].append(scope)
            for called in dict.fromkeys(scope.modules.values()):
                inner.setdefault(called, []).append(mode)
        for called, where in inner.items():
            cover(called, where)
        if failed:
            for child in module.children():
                cover(child, failed)

    with untouched(model):
        cover(model, MODES)
    return coverage


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The names of the optional arguments that a call of `module` gives another value than their default."""
    if not args[1:] and not kwargs:
        return ()
    signature = inspect.signature(module.forward)
    found = []
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        optional = parameter.kind in _VARIADIC or parameter.default is not parameter.empty
        if optional and (value is None or isinstance(value, (bool, int, float, str))):
            optional = value is not parameter.default and value != parameter.default
        if optional:
            found.append(name)
    return tuple(found)
