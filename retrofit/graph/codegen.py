"""From a block's method to Python source in which some calls are replaced, right in both eval and train mode."""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx, nn

from retrofit.errors import RetrofitError
from retrofit.graph.site import Call
from retrofit.graph.trace import MODES, Mode, Tracer, reason_of, untouched

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, enum.Enum)

_REPLACED = "retrofit_replaced"  # notes on a node the call that it stands for

Edit = tuple[Call, str]


class RewriteError(RetrofitError):
    """A block's code cannot be rewritten; the message is the reason."""


def check_given(value: object, default: object, name: str, given: bool) -> None:
    """Refuse an optional argument that is given, or left out, unlike when the method was traced.

    Raises:
        RetrofitError: If whether `value` differs from `default` is not as `given` says.
    """
    if (value is not default and (isinstance(value, (torch.Tensor, fx.Proxy)) or value != default)) is not given:
        wanted = "pass it" if given else "leave it out"
        raise RetrofitError(f"this block was rewritten as the model calls it; argument {name}: {wanted}")


def fact(value: object) -> object:
    """What a trace may have built in from an attribute: a plain value, some of them, or that there is an object."""
    if isinstance(value, (tuple, list)):
        return type(value), tuple(fact(item) for item in value)
    return (type(value), value) if isinstance(value, _PLAIN) else ...


class _BlockTracer(Tracer):
    """Traces one method of a block, with every child as a leaf and the optional arguments that are `passed`."""

    def __init__(self, method: str, passed: Collection[str]) -> None:
        super().__init__(lambda module: True)
        self.traced_func_name = method
        self.passed = passed

    def optional(self, parameter: inspect.Parameter) -> Any:
        """Keep the argument in the signature, and check that it is passed or left out as here."""
        variadic: dict[Any, tuple[str, Any]] = {parameter.VAR_POSITIONAL: ("*", ()), parameter.VAR_KEYWORD: ("**", {})}
        stars, default = variadic.get(parameter.kind, ("", parameter.default))
        try:
            ast.literal_eval(repr(default))
        except (ValueError, SyntaxError):
            raise TypeError(f"the default of argument {parameter.name} is no literal") from None
        value = self.create_proxy("placeholder", stars + parameter.name, (), {})
        given = parameter.name in self.passed
        if given and stars:
            raise TypeError(f"{stars}{parameter.name} is passed")
        self.create_proxy("call_function", check_given, (value, default, parameter.name, given), {})
        return value if given else parameter.empty


def method_source(
    block: nn.Module, method: str, edits: Sequence[Edit]
) -> tuple[str, dict[str, Any], dict[str, object]]:
    """Write the source of a block's method with some of its calls replaced by calls of new children.

    The method of `type(block)` is traced with the block's attributes as they are, in eval and in train mode; where the
    two differ, the source branches on `self.training`.

    Args:
        block: The module whose method it is; not changed.
        method: The method's name.
        edits: Calls of the method, each with the name of the child to call instead.

    Returns:
        The source, the globals it needs, and the facts about the block's attributes that are built into it.

    Raises:
        RewriteError: If the method cannot be traced, does more than return a value, or does not make a call.
    """
    label = f"{type(block).__name__}.{method}"
    read: set[str] = set()
    given = {name for call, _ in edits for name in call.given}
    codes: dict[Mode, Any] = {}
    for mode in MODES:
        graph = _traced(block, method, given, mode, read)
        replace_calls(graph, edits, mode, label)
        codes[mode] = graph.python_code("self")
    body = _body(codes["eval"].src)
    known = dict(codes["eval"].globals)
    if codes["train"].src != codes["eval"].src:
        body = [ast.If(ast.parse("self.training", mode="eval").body, _body(codes["train"].src), []), *body]
        for name, value in codes["train"].globals.items():
            if known.setdefault(name, value) is not value:
                raise RewriteError(f"{label} means different things by {name} in eval and in train mode")
    header = ast.parse(f"def {method}{_bare(inspect.signature(getattr(type(block), method)))}: pass").body[0]
    assert isinstance(header, ast.FunctionDef)
    header.body = body
    used = {found.id for found in ast.walk(header) if isinstance(found, ast.Name)}
    names = {name: value for name, value in known.items() if name in used}
    facts = {name: fact(getattr(block, name, None)) for name in read - {"training"} if not name.startswith("__")}
    return ast.unparse(ast.fix_missing_locations(header)), names, facts


def _body(source: str) -> list[ast.stmt]:
    return next(stmt.body for stmt in ast.parse(source).body if isinstance(stmt, ast.FunctionDef))


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """A method's signature without annotations, its own object under the name that the generated code uses."""
    empty = inspect.Parameter.empty
    own, *others = (parameter.replace(annotation=empty) for parameter in signature.parameters.values())
    if own.kind is not own.POSITIONAL_OR_KEYWORD and own.kind is not own.POSITIONAL_ONLY:
        raise RewriteError(f"a method whose first argument is *{own.name}")
    if any(other.name == "self" for other in others):
        raise RewriteError("self is the name of an argument that is not the method's own object")
    return signature.replace(parameters=[own.replace(name="self"), *others], return_annotation=empty)


def _traced(block: nn.Module, method: str, given: Collection[str], mode: Mode, read: set[str]) -> fx.Graph:
    """Trace a method in one mode, noting in `read` which attributes of the block it looks at."""
    original = type(block)

    def spy(self: nn.Module, name: str) -> Any:
        read.add(name)
        return original.__getattribute__(self, name)

    with untouched(block) as before:
        block.train(mode == "train")
        ready = [(module, dict(module.__dict__)) for module, _ in before]
        metaclass: Any = type(original)
        block.__class__ = metaclass(original.__name__, (original,), {"__getattribute__": spy})
        try:
            graph = _BlockTracer(method, given).trace(block)
        except Exception as error:  # anything may come out of the block's own code
            raise RewriteError(f"{original.__name__}.{method} cannot be traced: {reason_of(error)}") from error
        finally:
            block.__class__ = original
        for module, attributes in ready:
            for name, value in module.__dict__.items():
                if name not in attributes or attributes[name] is not value:
                    raise RewriteError(f"{original.__name__}.{method} makes a constant or sets an attribute, {name}")
    return graph


def replace_calls(graph: fx.Graph, edits: Sequence[Edit], mode: Mode, label: str) -> None:
    """Replace calls in a graph. A call counts among all calls of its target, or among those not yet replaced.

    Raises:
        RewriteError: If the graph does not make such a call.
    """
    found: dict[Any, list[fx.Node]] = {}
    left: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        key = (node.op, node.target)
        found.setdefault(node.meta.get(_REPLACED, key), []).append(node)
        left.setdefault(key, []).append(node)
    for call, child in edits:
        run = getattr(call, mode)
        if run is None:
            continue
        index, total = run
        key = (call.op, call.target)
        nodes = next((n for n in (found.get(key, []), left.get(key, [])) if len(n) == total), [])
        if not nodes or nodes[index] not in left.get(key, []):
            raise RewriteError(f"{label} does not call {call.target} {total} times, or the call is replaced already")
        node = nodes[index]
        left[key].remove(node)
        value = node.args[0] if node.args else node.kwargs["input"]
        with graph.inserting_before(node):
            new = graph.call_module(child, (value,))
        new.meta[_REPLACED] = key
        node.replace_all_uses_with(new)
        graph.erase_node(node)
