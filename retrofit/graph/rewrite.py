"""Replace one call of an activation: a child that serves this call only, or the call in a block's code."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import zlib
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

from torch import fx, nn

from retrofit.graph import kinds
from retrofit.graph.site import Call, Site
from retrofit.graph.source import RewriteError, code_in, file_tree

_GRAPHS = ("train_graph", "eval_graph")  # of torchvision's feature extractors


class _Edit(NamedTuple):
    """A call in a method's code and the child to call instead.

    Attributes:
        method: The method's name.
        target: The function, the name of a tensor's method, or None for a module.
        end: The line, counted from the method's first, and the column at which the call ends.
        child: The child's name.
        checksum: Of the method's code.
        norm: As `Call.norm`.
    """

    method: str
    target: Any
    end: tuple[int, int]
    child: str
    checksum: int
    norm: tuple[str, str] | None


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
    return f"{act.owner}.{replace_call(model, act.call, module, child)}".lstrip(".")


def replace_call(model: nn.Module, call: Call, module: nn.Module, name: str) -> str:
    """Make one call of an activation call `module` instead, and leave every other call as it is.

    The block that makes the call keeps its identity, attributes, children and state-dict names, and gets `module` as
    a new child. Its class becomes a subclass of the same name, in whose method this one expression is replaced: all
    else in the method stays the code that it was. deepcopy, pickle and torch.compile work as before. In an
    nn.Sequential the entry is replaced, in an fx.GraphModule the node.

    Args:
        model: The model that `find_sites` searched; changed in place.
        call: Where; `Activation.call`. Of one block, several calls may be replaced, in any order.
        module: What to call instead, with the activation's input as its one argument.
        name: The new child's name in the block.

    Returns:
        The child's name: `name`, or the entry's.

    Raises:
        RewriteError: If the block cannot be rewritten; nothing is changed then.
    """
    block: Any = model.get_submodule(call.owner)
    place = _prepared(block, call, name)
    if isinstance(place, str):
        setattr(block, place, module)
        return place
    block.add_module(name, module)
    if isinstance(place, dict):
        for attribute, graph in place.items():
            setattr(block, attribute, graph)
        if "graph" not in place:
            block.graph = place.get("train_graph" if block.training else "eval_graph", block.graph)
    else:
        block.__class__ = place
    return name


def check_call(model: nn.Module, call: Call) -> None:
    """Find out whether `replace_call` can replace a call; change nothing.

    Raises:
        RewriteError: If the block cannot be rewritten.
    """
    _prepared(model.get_submodule(call.owner), call, "_retrofit_probe")


def _prepared(block: nn.Module, call: Call, name: str) -> str | dict[str, fx.Graph] | type[nn.Module]:
    """The entry to replace in a sequence, the graphs of a GraphModule that call a new child, or the class that does."""
    at = call.place.at
    if isinstance(at, str) and not isinstance(block, fx.GraphModule):
        return at
    if hasattr(block, name):
        raise RewriteError(f"{type(block).__name__} {call.owner} already has an attribute {name}".replace("  ", " "))
    if isinstance(at, str):
        return _rewired(block, at, name)
    code = call.place.code
    assert code is not None
    method = code.co_name
    if method in block.__dict__:
        raise RewriteError(f"{call.owner or 'the model'} has a {method} of its own, set on the instance")
    base: Any
    base, edits = getattr(type(block), "_retrofit_edits", (type(block), ()))
    functions = [inspect.getattr_static(cls, method, None) for cls in (base, type(block))]
    if code not in [getattr(function, "__code__", None) for function in functions]:
        raise RewriteError(
            f"the call stands in {code.co_qualname}, which is no method of {base.__name__}, or decorated"
        )
    if base.__reduce_ex__ is not object.__reduce_ex__ or base.__reduce__ is not object.__reduce__:
        raise RewriteError(f"{base.__name__} defines its own pickling")
    target = None if isinstance(call.place.target, nn.Module) else call.place.target
    end = (at[0] - code.co_firstlineno, at[1])
    if any((edit.method, edit.end, edit.norm) == (method, end, call.norm) for edit in edits):
        raise RewriteError(f"the call in {code.co_qualname} is replaced already")
    edit = _Edit(method, target, end, name, zlib.crc32(functions[0].__code__.co_code), call.norm)
    return _rewritten(base, (*edits, edit))


def _rewired(block: Any, node: str, name: str) -> dict[str, fx.Graph]:
    """Copies of a block's graphs in which a node calls the child `name` instead, by the attribute that holds them."""
    own = [attribute for attribute in _GRAPHS if isinstance(getattr(block, attribute, None), fx.Graph)]
    graphs = {attribute: copy.deepcopy(getattr(block, attribute)) for attribute in own or ["graph"]}
    found = False
    for graph in graphs.values():
        for old in [old for old in graph.nodes if old.name == node]:
            found = True
            value = old.args[0] if old.args else old.kwargs["input"]
            with graph.inserting_before(old):
                new = graph.call_module(name, (value,))
            old.replace_all_uses_with(new)
            graph.erase_node(old)
    if not found:
        raise RewriteError(f"the graph of {type(block).__name__} has no call {node}, or it is replaced already")
    return graphs


@functools.lru_cache(maxsize=512)
def _rewritten(base: Any, edits: tuple[_Edit, ...]) -> type[nn.Module]:
    """The subclass of `base` with some calls replaced; there is one, so that torch.compile compiles equal blocks once.

    Raises:
        RewriteError: If a method's source is not at hand, or a call is not written so that it can be replaced.
    """
    namespace: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {"__reduce_ex__": _reduce_ex, "_retrofit_edits": (base, edits), "_retrofit_calls": _calls}
    for method in dict.fromkeys(edit.method for edit in edits):
        namespace[method] = _edited(base, method, [edit for edit in edits if edit.method == method])
    cls: type[nn.Module] = type(base)(base.__name__, (base,), namespace)
    return cls


def _reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
    return _rebuild, self._retrofit_edits, self.__getstate__()


def _rebuild(base: Any, edits: tuple[_Edit, ...]) -> nn.Module:
    cls = _rewritten(base, edits)
    return cls.__new__(cls)


def _calls(self: Any, child: str, function: Any) -> bool:
    """Whether a function that the block holds in an attribute is still the one that a child was put in place of."""
    return any(edit.child == child and edit.target is function for edit in self._retrofit_edits[1])


def _edited(base: type[nn.Module], method: str, edits: Iterable[_Edit]) -> FunctionType:
    """A class's method with the calls of `edits` replaced, and nothing else."""
    function: FunctionType = inspect.getattr_static(base, method)
    code = function.__code__
    tree = file_tree(code)
    for edit in edits:
        if edit.checksum != zlib.crc32(code.co_code):
            raise RewriteError(f"{code.co_qualname} is not what it was when its network was converted")
        replacement = _Replacement(edit, code, function.__globals__)
        tree = ast.fix_missing_locations(replacement.visit(tree))
        if not replacement.made:
            raise RewriteError(f"the call in {code.co_qualname} is no expression of its own")
    new = code_in(compile(tree, code.co_filename, "exec", dont_inherit=True), code)
    assert new is not None
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in new.co_freevars)
    edited = FunctionType(new, function.__globals__, function.__name__, function.__defaults__, closure)
    edited.__kwdefaults__ = function.__kwdefaults__
    return cast(FunctionType, functools.update_wrapper(edited, function))


class _Call(ast.Call):
    """A call that is put into the code."""


class _Replacement(ast.NodeTransformer):
    """Makes a call in the code a call of a child, with the same input.

    Beside its input the call may only take constants, so that nothing that may change is ignored. Where it is a matter
    of what the code does when it runs, the child is called on a condition, and the call stays for else.

    Attributes:
        made: Whether the call was found.
    """

    def __init__(self, edit: _Edit, code: CodeType, names: dict[str, Any]) -> None:
        self.edit = edit
        self.names = names
        self.label = f"the call in {code.co_qualname}"
        self.own = code.co_varnames[0]
        self.end = (edit.end[0] + code.co_firstlineno, edit.end[1])
        self.made = False

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace a call if it is the one."""
        self.generic_visit(node)
        if (node.end_lineno, node.end_col_offset) != self.end:
            return node
        self.made = True
        child = self._call(self.edit.child, [self._input(node)])
        condition = self._condition(node.func)
        return ast.copy_location(child if condition is None else ast.IfExp(condition, child, node), node)

    def _call(self, attribute: str, arguments: list[ast.expr]) -> _Call:
        return _Call(ast.Attribute(ast.Name(self.own, ast.Load()), attribute, ast.Load()), arguments, [])

    def _input(self, node: ast.Call) -> ast.expr:
        target = self.edit.target
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        values = [*node.args]
        if isinstance(target, str) and isinstance(node.func, ast.Attribute):
            values.insert(0, node.func.value)
        value = values.pop(0) if values else named.pop("input", None)
        if value is None or isinstance(value, ast.Starred):
            raise RewriteError(f"{self.label} hides its input")
        if kinds.takes_constants(target) and not all(_is_literal(other) for other in (*values, *named.values())):
            raise RewriteError(f"{self.label} takes constants that may change")
        return copy.deepcopy(value)

    def _condition(self, function: ast.expr) -> ast.expr | None:
        """What must hold for the child to be called: that the input is of its norm, or the function the one it was."""
        target = self.edit.target
        if self.edit.norm:
            selector, name = self.edit.norm
            there = ast.parse(selector, mode="eval").body
            for part in ast.walk(there):
                ast.copy_location(part, function)
            return ast.Compare(self._call("get_submodule", [ast.Constant(name)]), [ast.Is()], [there])
        root, path = _dotted(function)
        if isinstance(target, str) or (target is None and root == self.own):
            return None
        if root == self.own:
            return self._call("_retrofit_calls", [ast.Constant(self.edit.child), function])
        if (
            target is None
            or functools.reduce(lambda o, n: getattr(o, n, None), path, self.names.get(root)) is not target
        ):
            raise RewriteError(f"{self.label} does not name what it calls")
        return None


def _dotted(expression: ast.expr) -> tuple[str, list[str]]:
    """The name and the attributes of `name.attribute...`; no name for any other expression."""
    path: list[str] = []
    while isinstance(expression, ast.Attribute):
        path.insert(0, expression.attr)
        expression = expression.value
    return (expression.id, path) if isinstance(expression, ast.Name) else ("", path)


def _is_literal(expression: ast.expr) -> bool:
    try:
        ast.literal_eval(expression)
    except ValueError:
        return False
    return True
