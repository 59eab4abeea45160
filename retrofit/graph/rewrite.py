"""Replace one call of an activation: a child that serves this call only, or the call in a block's
code.
"""

import ast
import copy
import functools
import inspect
import zlib
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

from torch import fx, nn

from retrofit.graph.norm_sites import Activation, Site
from retrofit.graph.source_code import RewriteError, code_in, file_tree, future_flags
from retrofit.graph.trace import Place


class _Edit(NamedTuple):
    """A call in a method's code and the child to call instead."""

    method: str
    # The function, the name of a tensor's method, or None for a module.
    target: Any
    # Where the call ends: the line, counted from the method's first, and the column.
    end: tuple[int, int]
    child: str
    # Checksum of the method's code.
    checksum: int
    # As `Activation.selector`.
    selector: tuple[str, str] | None


def replace_module(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put `module` in place of the child called `name`, under every name that the child goes by;
    return the network to use, another object only if `name` is empty, for the model itself.
    """
    if not name:
        return module
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for key in [key for key, child in parent._modules.items() if child is old]:
            setattr(parent, key, module)
    return model


def replace_activation(model: nn.Module, site: Site, module: nn.Module, suffix: str) -> None:
    """Put `module` in place of the activation of a site, at this site alone; after a `RewriteError`
    nothing is changed.

    A block whose code has to change keeps its identity, attributes, children and state-dict names,
    and gets `module` as a new child, whose name is the norm's and `suffix`. Its class becomes a
    subclass of the same name, in whose method this one expression is replaced: all else in the
    method stays the code that it was. deepcopy, pickle and torch.compile work as before. In an
    nn.Sequential the entry is replaced, in an fx.GraphModule the node.
    """
    act = site.activation
    assert act is not None
    kind = act.kind
    if kind == "module":
        replace_module(model, act.name, module)
    elif kind == "fused":
        model.set_submodule(act.name, module)
    else:
        owner = act.owner
        block: Any = model.get_submodule(owner)
        child = _child_name(site, owner, suffix)
        changes = _changes(block, act, child, module)
        for name, value in changes.items():
            setattr(block, name, value)


def _child_name(site: Site, owner: str, suffix: str) -> str:
    """The name of the child of a block that takes an activation's place."""
    norm_in_block = site.norm.removeprefix(f"{owner}.")
    name = norm_in_block.replace(".", "_")
    if site.call_count > 1:
        return f"{name}_{suffix}_{site.call_index}"
    return f"{name}_{suffix}"


def rewrite_problem(model: nn.Module, act: Activation | None) -> str:
    """Why `replace_activation` cannot replace an activation; empty if it can, or there is none.
    Changes nothing.
    """
    try:
        if act is not None and act.kind == "call":
            _changes(model.get_submodule(act.owner), act, "_retrofit_probe", nn.Identity())
    except RewriteError as error:
        return str(error)
    return ""


def _changes(block: nn.Module, act: Activation, child: str, module: nn.Module) -> dict[str, Any]:
    """The attributes to set in a block: an entry of a sequence, or a child and the class that
    calls it.
    """
    place: Any = act.place
    # The entry of a Sequential has a name, and code that calls it.
    is_named = isinstance(place.at, str)
    if is_named and place.code is not None:
        return {place.at: module}
    if hasattr(block, child):
        label = f"{type(block).__name__} {act.owner}".rstrip()
        raise RewriteError(f"{label} already has an attribute {child}")
    # The node of a graph has a name, and no code.
    if is_named:
        return {child: module, **_rewired(block, place.at, child)}
    return {child: module, "__class__": _edited_class(block, place, act.selector, child)}


def _edited_class(
    block: nn.Module, place: Place, selector: tuple[str, str] | None, child: str
) -> type[nn.Module]:
    """The class of a block in which one more call is replaced."""
    code: Any = place.code
    base: Any
    base, edits = getattr(type(block), "_retrofit_edits", (type(block), ()))
    _refuse_unwritable(block, base, code)
    current = _code_of(base, code.co_name) or code
    target = place.target
    if isinstance(target, nn.Module):
        target = None
    at: Any = place.at
    line, column = at
    checksum = zlib.crc32(current.co_code)
    edit = _Edit(
        method=code.co_name,
        target=target,
        end=(line - code.co_firstlineno, column),
        child=child,
        checksum=checksum,
        selector=selector,
    )
    return _rewritten_class(base, (*edits, edit))


def _refuse_unwritable(block: nn.Module, base: Any, code: CodeType) -> None:
    """Refuse a block whose method, or pickling, is not its class's, or whose call is elsewhere."""
    method = code.co_name
    codes = [_code_of(base, method), _code_of(type(block), method)]
    if method in vars(block) or code not in codes:
        raise RewriteError(
            f"the call stands in {code.co_qualname}, which is no method of {base.__name__}, "
            "decorated, or set on the instance"
        )
    if (base.__reduce_ex__, base.__reduce__) != (object.__reduce_ex__, object.__reduce__):
        raise RewriteError(f"{base.__name__} defines its own pickling")


def _code_of(cls: Any, method: str) -> CodeType | None:
    """The code of a class's method; None if it has no such method, or one that is no function."""
    function = inspect.getattr_static(cls, method, None)
    return getattr(function, "__code__", None)


def _rewired(block: Any, name: str, child: str) -> dict[str, fx.Graph]:
    """Return copies of a block's graphs in which the node `name` is a call of a child, each under
    the attribute that holds the graph.
    """
    # torchvision's feature extractors have a graph for each mode, and the current one once more.
    held = {key: value for key, value in vars(block).items() if isinstance(value, fx.Graph)}
    graphs = copy.deepcopy(held)
    nodes = {node for graph in graphs.values() for node in graph.nodes if node.name == name}
    if not nodes:
        raise RewriteError(
            f"the graph of {type(block).__name__} has no call {name}, or it is replaced already"
        )
    for node in nodes:
        _call_child(node, child)
    graphs["graph"] = graphs.pop("_graph")
    return graphs


def _call_child(node: fx.Node, child: str) -> None:
    """Put a call of a child, of the same input, in the place of a node."""
    value = node.args[0] if node.args else node.kwargs["input"]
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(node.graph.call_module(child, (value,)))
    node.graph.erase_node(node)


@functools.lru_cache(maxsize=512)
def _rewritten_class(base: Any, edits: tuple[_Edit, ...]) -> type[nn.Module]:
    """The subclass of `base` with some calls replaced. Equal blocks share it, so that torch.compile
    compiles them once.
    """
    namespace: dict[str, Any] = {
        **{name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")},
        "_retrofit_edits": (base, edits),
        # Whether a function that the block holds in an attribute is still the one that a child
        # replaces.
        "_retrofit_calls": lambda _, child, function: any(
            (e.child, e.target) == (child, function) for e in edits
        ),
        "__reduce_ex__": lambda self, _: (_rebuild, self._retrofit_edits, self.__getstate__()),
    }
    for method in {edit.method for edit in edits}:
        namespace[method] = _rewritten_method(
            base, method, [edit for edit in edits if edit.method == method]
        )
    return cast(type[nn.Module], type(base)(base.__name__, (base,), namespace))


def _rebuild(base: Any, edits: tuple[_Edit, ...]) -> nn.Module:
    cls = _rewritten_class(base, edits)
    return cls.__new__(cls)


def _rewritten_method(base: type[nn.Module], method: str, edits: list[_Edit]) -> FunctionType:
    function: FunctionType = inspect.getattr_static(base, method)
    code = function.__code__
    if any(edit.checksum != zlib.crc32(code.co_code) for edit in edits):
        raise RewriteError(f"{code.co_qualname} is not what it was when its network was converted")
    replacement = _Replacement(edits, code, function.__globals__)
    tree = ast.fix_missing_locations(replacement.visit(file_tree(code)))
    if replacement.pending:
        raise RewriteError(f"{replacement.label} is no expression of its own")
    file = compile(tree, code.co_filename, "exec", future_flags(code), dont_inherit=True)
    new = code_in(file, code)
    assert new is not None
    return _with_code(function, new)


def _with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """Return a function of other code, with the same globals, defaults and closure."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    changed = FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return cast(FunctionType, functools.update_wrapper(changed, function))


class _Replacement(ast.NodeTransformer):
    """Replaces calls in a method's code by calls of children with the same input.

    A replaced call's other arguments must be constants. Where only a run of the code shows whether
    a call is the one to replace, the new code tests that, and makes the original call otherwise.
    """

    def __init__(self, edits: list[_Edit], code: CodeType, names: dict[str, Any]) -> None:
        self.pending = edits
        self.names = names
        self.label = f"the call in {code.co_qualname}"
        self.self_name = code.co_varnames[0]
        self.first_line = code.co_firstlineno

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace a call if it is one of those to replace, on each edit's condition."""
        self.generic_visit(node)
        end = (node.end_lineno or 0) - self.first_line, node.end_col_offset
        new: ast.expr = node
        for edit in [edit for edit in self.pending if edit.end == end]:
            child_call = self._call(edit.child, self._input(edit, node))
            condition = self._condition(edit, node.func)
            replacement: ast.expr = child_call
            # One call may serve several norms: each edit tests for its own, and else does as before.
            if condition is not None:
                replacement = ast.IfExp(condition, child_call, new)
            new = ast.copy_location(replacement, node)
        self.pending = [edit for edit in self.pending if edit.end != end]
        return new

    def _call(self, attribute: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(
            ast.Attribute(ast.Name(self.self_name, ast.Load()), attribute, ast.Load()),
            [*arguments],
            [],
        )

    def _input(self, edit: _Edit, node: ast.Call) -> ast.expr:
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        values = [*node.args]
        if isinstance(edit.target, str) and isinstance(node.func, ast.Attribute):
            values.insert(0, node.func.value)
        value = values.pop(0) if values else named.pop("input", None)
        if value is None or isinstance(value, ast.Starred):
            raise RewriteError(f"{self.label} hides its input")
        # In place or not, a child computes the same.
        named.pop("inplace", None)
        try:
            for other in (*values, *named.values()):
                ast.literal_eval(other)
        except ValueError:
            raise RewriteError(f"{self.label} takes constants that may change") from None
        return copy.deepcopy(value)

    def _condition(self, edit: _Edit, function: ast.expr) -> ast.expr | None:
        """Return the test before a child's call: that the input is of its norm, or that the called
        function is still the one that was traced; None if nothing has to be tested.
        """
        if edit.selector:
            return self._is_of_norm(*edit.selector, function)
        target = edit.target
        if isinstance(target, str):
            return None
        expression = ast.unparse(function)
        root, *path = expression.split(".")
        is_dotted_name = all(name.isidentifier() for name in path)
        if is_dotted_name and root == self.self_name:
            if target is None:
                return None
            child = ast.Constant(edit.child)
            return self._call("_retrofit_calls", child, function)
        if is_dotted_name and target is not None:
            called = self.names.get(root)
            for name in path:
                called = getattr(called, name, None)
            if called is target:
                return None
        raise RewriteError(f"{self.label} does not name what it calls")

    def _is_of_norm(self, expression: str, norm: str, function: ast.expr) -> ast.expr:
        """Return the test that what an expression stands for is the norm of that name."""
        called_norm = ast.parse(expression, mode="eval").body
        for part in ast.walk(called_norm):
            ast.copy_location(part, function)
        wanted_norm = self._call("get_submodule", ast.Constant(norm))
        return ast.Compare(wanted_norm, [ast.Is()], [called_norm])
