"""Replace one call of an activation: a child that serves this call only, or a call in a block's code."""

from __future__ import annotations

import copy
import importlib
import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from torch import fx, nn

from retrofit.graph.codegen import Edit, RewriteError, fact, method_source, replace_calls
from retrofit.graph.site import Call, Site
from retrofit.graph.trace import MODES

_classes: WeakValueDictionary[tuple[Any, ...], type[nn.Module]] = WeakValueDictionary()
_numbers = itertools.count()


def replace_module(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put `module` in place of the child called `name`, under every name that the child goes by.

    Returns:
        The network to use: another object only if `name` is empty, for the model itself.

    Raises:
        AttributeError: If the model has no child of that name.
    """
    if not name:
        return module
    old = model.get_submodule(name)
    for found in [found for found, child in model.named_modules(remove_duplicate=False) if child is old]:
        parent, _, last = found.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return model


def replace_activation(model: nn.Module, site: Site, module: nn.Module, suffix: str) -> str:
    """Put `module` in place of the activation of a site, which is no part of its norm, at this site alone.

    Args:
        model: The model that `find_sites` searched; changed in place.
        site: One with an activation.
        module: What to call instead.
        suffix: Ends the name of a new child, which begins as the norm's.

    Returns:
        The name that `module` has in the model.

    Raises:
        RewriteError: As `replace_call`.
    """
    act = site.activation
    assert act is not None
    if act.call is None:
        replace_module(model, act.name, module)
        return act.name
    child = f"{site.norm.removeprefix(f'{act.owner}.').replace('.', '_')}_{suffix}"
    if site.places > 1:
        child += f"_{site.place}"
    replace_call(model, act.call, module, child)
    return f"{act.owner}.{child}".lstrip(".")


def replace_call(model: nn.Module, call: Call, module: nn.Module, name: str) -> None:
    """Make one call of an activation call `module` instead, and leave every other call as it is.

    The block that makes the call keeps its identity, attributes, children and state-dict names, and gets `module` as
    a new child. Its class becomes a subclass, of the same name, whose method is generated from a trace of the block
    with its children as leaves: what the trace builds in from the block's attributes is traced again when one of them
    is set, and what differs between train and eval mode stays so. deepcopy, pickle and torch.compile work as before.
    An fx.GraphModule gets a new graph instead, one for each mode where it has two, as torchvision's feature extractors.

    Args:
        model: The model that `find_sites` searched; changed in place.
        call: Where; `Activation.call`. Of one block, several calls may be replaced, in any order.
        module: What to call instead, with the activation's input as its one argument.
        name: The new child's name in the block.

    Raises:
        RewriteError: If the block cannot be rewritten; nothing is changed then.
    """
    block = _owner(model, call, name)
    if isinstance(block, fx.GraphModule):
        graphs = _rewired(block, call, name)
        block.add_module(name, module)
        for attribute, graph in graphs.items():
            setattr(block, attribute, graph)
        block.graph = graphs.get("train_graph" if block.training else "eval_graph") or graphs["graph"]
        return
    recipe = _prepared(block, call, name)
    block.__class__ = recipe.make()
    block.add_module(name, module)


def check_call(model: nn.Module, call: Call) -> None:
    """Find out whether `replace_call` can replace a call; change nothing.

    Raises:
        RewriteError: If the block cannot be rewritten.
    """
    block = _owner(model, call, "_retrofit_probe")
    if isinstance(block, fx.GraphModule):
        _rewired(block, call, "_retrofit_probe")
    else:
        _prepared(block, call, "_retrofit_probe")


def _owner(model: nn.Module, call: Call, name: str) -> nn.Module:
    """The block that makes a call, which can get a child called `name`."""
    block = model.get_submodule(call.owner)
    if hasattr(block, name):
        raise RewriteError(f"{type(block).__name__} {call.owner} already has an attribute {name}".replace("  ", " "))
    if call.method in block.__dict__:
        raise RewriteError(f"{call.owner or 'the model'} has a {call.method} of its own, set on the instance")
    return block


def _rewired(block: fx.GraphModule, call: Call, name: str) -> dict[str, fx.Graph]:
    """Copies of a block's graphs that call its child `name` instead, by the attribute that holds them."""
    own = {mode: f"{mode}_graph" for mode in MODES if isinstance(getattr(block, f"{mode}_graph", None), fx.Graph)}
    graphs: dict[str, fx.Graph] = {}
    for mode in own or MODES[:1]:
        attribute = own.get(mode, "graph")
        graphs[attribute] = copy.deepcopy(getattr(block, attribute))
        replace_calls(graphs[attribute], [(call, name)], mode, type(block).__name__)
    return graphs


def _prepared(block: nn.Module, call: Call, name: str) -> RewriteRecipe:
    """The recipe of the class that calls its child `name` instead."""
    recipe: RewriteRecipe | None = getattr(type(block), "_retrofit_recipe", None)
    base, edits = (recipe.base, recipe.edits) if recipe else (type(block), ())
    return _recipe(block, base, (*edits, (replace(call, owner=""), name)))


@dataclass(frozen=True, eq=False)
class RewriteRecipe:
    """All that makes a rewritten class: pickled in place of the class, shared by copies.

    Attributes:
        base: The block's original class.
        edits: The calls that were replaced, in order, each with the child's name.
        sources: The generated methods' source, by method.
        names: The globals that the sources need.
        facts: What the sources took from the block's attributes.
    """

    base: type[nn.Module]
    edits: tuple[Edit, ...]
    sources: tuple[tuple[str, str], ...]
    names: dict[str, Any]
    facts: dict[str, object]

    def make(self) -> type[nn.Module]:
        """The rewritten class; equal recipes share one, so that torch.compile compiles equal blocks once."""
        key = (
            self.base, self.edits, self.sources,
            tuple(sorted((name, id(value)) for name, value in self.names.items())),
            tuple(sorted((name, repr(value)) for name, value in self.facts.items())),
        )  # fmt: skip
        cls = _classes.get(key)
        if cls is None:
            namespace = {
                "__module__": self.base.__module__,
                "__qualname__": self.base.__qualname__,
                "__doc__": self.base.__doc__,
                "__reduce_ex__": _reduce_ex,
                "__setattr__": _setattr,
                "_retrofit_recipe": self,
            }
            methods = {method: _compiled(self.base, method, source, self.names) for method, source in self.sources}
            metaclass: Any = type(self.base)
            cls = _classes[key] = metaclass(self.base.__name__, (self.base,), {**namespace, **methods})
        return cls

    def __deepcopy__(self, memo: dict[int, Any]) -> RewriteRecipe:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        modules = {name: value.__name__ for name, value in self.names.items() if isinstance(value, ModuleType)}
        others = {name: value for name, value in self.names.items() if name not in modules}
        return _load_recipe, (self.base, self.edits, self.sources, modules, others, self.facts)


def _load_recipe(
    base: Any, edits: Any, sources: Any, modules: dict[str, str], others: Any, facts: Any
) -> RewriteRecipe:
    names = {name: importlib.import_module(path) for name, path in modules.items()}
    return RewriteRecipe(base, edits, sources, {**names, **others}, facts)


def _recipe(block: nn.Module, base: type[nn.Module], edits: tuple[Edit, ...]) -> RewriteRecipe:
    """Trace a block as its original class and write the methods anew."""
    if base.__reduce_ex__ is not object.__reduce_ex__ or base.__reduce__ is not object.__reduce__:
        raise RewriteError(f"{base.__name__} defines its own pickling")
    sources: dict[str, str] = {}
    names: dict[str, Any] = {}
    facts: dict[str, object] = {}
    current = type(block)
    block.__class__ = base
    try:
        for method in dict.fromkeys(call.method for call, _ in edits):
            source, used, built_in = method_source(block, method, [e for e in edits if e[0].method == method])
            sources[method] = source
            facts |= built_in
            if any(names.get(name, value) is not value for name, value in used.items()):
                raise RewriteError(f"{base.__name__}'s methods mean different things by one name")
            names |= used
    finally:
        block.__class__ = current
    return RewriteRecipe(base, edits, tuple(sources.items()), names, facts)


def _compiled(base: type[nn.Module], method: str, source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Compile a method so that tracebacks and inspect find its source."""
    filename = f"<retrofit {next(_numbers)}: {base.__qualname__}.{method}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {**names, "__name__": base.__module__}
    exec(compile(source, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace[method]
    function.__qualname__ = f"{base.__qualname__}.{method}"
    return function


def _rebuild(recipe: RewriteRecipe) -> nn.Module:
    cls = recipe.make()
    return cls.__new__(cls)


def _reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    return _rebuild, (self._retrofit_recipe,), self.__getstate__()


def _setattr(self: nn.Module, name: str, value: Any) -> None:
    """Set an attribute; trace the block again if the attribute is built into its generated code and changes."""
    recipe: RewriteRecipe = self._retrofit_recipe  # type: ignore[assignment]
    old: Any = getattr(self, name, None)
    recipe.base.__setattr__(self, name, value)
    if name in recipe.facts and fact(value) != recipe.facts[name]:
        try:
            self.__class__ = _recipe(self, recipe.base, recipe.edits).make()
        except RewriteError:
            recipe.base.__setattr__(self, name, old)
            raise
