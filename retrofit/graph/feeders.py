"""Which convolution gives what it puts out to one norm and nothing else, whoever calls it."""

from __future__ import annotations

import dis
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType

from torch import fx, nn

from retrofit.graph import kinds
from retrofit.graph.flow import Flow, Flows
from retrofit.graph.trace import VARIADIC, Place

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SETTING_UP = ("init", "reset_parameters", "extra_repr")  # in the names of methods that compute nothing
_ALL_CHILDREN = {"children", "named_children", "_modules", "get_submodule"}


def sole_feeders(
    model: nn.Module, is_norm: Callable[[nn.Module], bool]
) -> tuple[dict[nn.Module, nn.Module], set[nn.Module]]:
    """Return the convolution of each norm for which that is proved, and the norms whose tensors other code reads.

    A convolution is one norm's if all code above both was traced, on every path; one method calls both, which takes no
    optional arguments and, in all traces, no constants; nothing else takes what the convolution puts out, reads or
    shares its parameters; no norm of the same block goes uncalled; and no other method of what holds them mentions it.
    """
    flows = Flows(model, is_norm)
    feeders: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
    places: dict[nn.Module, set[Place]] = defaultdict(set)
    for flow in flows.flows:
        for node, module in flow.modules.items():
            places[module].add(flow.places[node])
            if is_norm(module):
                feeders[module].add(_feeder(flow, node))
    holders_of = Counter(parameter for module in model.modules() for parameter in set(module._parameters.values()))
    uncalled = {module for module in flows.names if is_norm(module) and module not in flows.counts}
    found = {}
    for norm, (conv, *others) in feeders.items():
        if conv is None or others or flows.counts[conv] != flows.counts[norm] or conv in flows.read:
            continue
        calls = places[norm] | places[conv]
        methods = {(place.owner, place.code) for place in calls}
        owner, code = methods.pop()
        above = {module for module, inside in flows.inside.items() if inside & {norm, conv}} - {norm, conv}
        shared = any(holders_of[parameter] > 1 for parameter in conv.parameters())
        if (
            len(calls) > 2
            or methods
            or shared
            or above & flows.failures.keys()
            or uncalled.intersection(owner.modules())
        ):
            continue
        if code is not None and not _mentioned(conv, code, above):
            found[norm] = conv
    return found, {norm for norm in flows.read if is_norm(norm)}


def _feeder(flow: Flow, norm: fx.Node) -> nn.Module | None:
    """The convolution that gives all that it puts out to a norm's call, at most past identities, on every path."""
    node = flow.source(norm)
    while node is not None and len(flow.consumers(node)) == 1:
        module = flow.modules.get(node)
        if not isinstance(module, nn.Identity):
            conv = isinstance(module, nn.modules.conv._ConvNd) and kinds.is_plain_affine(module)
            return module if conv and not any(_has_other_paths(flow, call) for call in (norm, node)) else None
        node = flow.source(node)
    return None


def _has_other_paths(flow: Flow, node: fx.Node) -> bool:
    """Whether the method that makes a call may take another path: it, or an override that calls it, takes optional
    arguments or one that is no value under trace, or a value was turned into a number.
    """
    place, (_, constants) = flow.places[node], flow.variables[node]
    name, arguments = place.code.co_name if place.code else "", list[inspect.Parameter]()
    for method in [vars(cls)[name] for cls in type(place.owner).__mro__ if name in vars(cls)]:
        if not inspect.isfunction(function := inspect.unwrap(method)):
            break
        arguments += list(inspect.signature(method).parameters.values())[1:]
        if function.__code__ is place.code:
            options = (*VARIADIC, inspect.Parameter.KEYWORD_ONLY)
            other = any(a.default is not a.empty or a.kind in options or a.name in constants for a in arguments)
            return other or flow.size is not None
    return True


def _mentioned(conv: nn.Module, method: CodeType, above: set[nn.Module]) -> bool:
    """Whether a method besides `method` mentions a convolution by name, or its container but for a call of it."""
    mentions = [conv]
    for module in mentions:
        mentions += [holder for holder in above if type(holder) in _CONTAINERS and module in holder.children()]
    return any(
        code != method and _uses(code, name, other, module, calls=module is not conv)
        for holder in above
        if type(holder) not in _CONTAINERS
        for name, module in holder._modules.items()
        if module in mentions
        for other in above
        for code in _methods(type(other))
    )


def _methods(cls: type) -> Iterator[CodeType]:
    """The code of a class's own methods, and its parents', but torch's and those that only set it up."""
    for parent in cls.__mro__:
        if not parent.__module__.startswith("torch."):
            for name, value in vars(parent).items():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, FunctionType) and not any(word in name for word in _SETTING_UP):
                    yield function.__code__


def _uses(code: CodeType, name: str, owner: nn.Module, module: nn.Module, calls: bool) -> bool:
    """Whether the code of a method of `owner` mentions a module by its name in what holds it, or all children. Not
    where `self.name` is another module, or the code only asks for it or its shape (or calls it, with `calls`).
    """
    steps = list(dis.get_instructions(code))
    for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
        if isinstance(step.argval, CodeType) and _uses(step.argval, name, owner, module, calls):
            return True
        if step.opname == "LOAD_CONST" and step.argval == name:
            return True
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or step.argval not in (name, *_ALL_CHILDREN):
            continue
        loaded = before.argval if before is not None and before.opname.startswith("LOAD_FAST") else ""
        of_self = (loaded[-1] if isinstance(loaded, tuple) else loaded) == "self"  # Python 3.13 loads two at once
        other = of_self and step.argval == name and getattr(owner, name, None) is not module
        called = calls and step.argval == name and (step.opname == "LOAD_METHOD" or "NULL" in step.argrepr)
        asked = after is not None and ("JUMP" in after.opname or after.opname == "TO_BOOL" or after.argrepr == "None")
        shape = after is not None and after.argval in nn.Conv1d.__constants__
        if not (other or called or asked or shape):
            return True
    return False
