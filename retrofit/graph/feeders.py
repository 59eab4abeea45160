"""Which convolution gives what it puts out to one norm and nothing else, whoever calls it."""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType

from torch import fx, nn

from retrofit.graph import kinds
from retrofit.graph.flow import Flow, Flows
from retrofit.graph.trace import Place

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SETTING_UP = ("init", "reset_parameters", "extra_repr")  # in the names of methods that compute nothing
_ALL_CHILDREN = {"children", "named_children", "_modules", "get_submodule"}


def sole_feeders(
    model: nn.Module, is_norm: Callable[[nn.Module], bool]
) -> tuple[dict[nn.Module, nn.Module], set[nn.Module]]:
    """Find the convolutions of norms, as far as that is proved.

    A convolution is one norm's if all code above both was traced, on every path; one method calls both, which takes no
    optional arguments and, in all traces, no constants; nothing else takes what the convolution puts out, reads or
    shares its parameters; no norm of the same block goes uncalled; and no other method of what holds them mentions it.

    Args:
        model: Any module.
        is_norm: The norms asked for.

    Returns:
        The convolution by norm, and the norms whose tensors other code reads.
    """
    search = _Feeders(model, is_norm)
    found = ((norm, search.feeder(norm)) for norm in search.steps if is_norm(norm))
    return {norm: conv for norm, conv in found if conv is not None}, {norm for norm in search.read if is_norm(norm)}


class _Feeders(Flows):
    """The search: what feeds each call of a norm, whether its arguments leave no other path, and where calls stand."""

    def __init__(self, model: nn.Module, is_norm: Callable[[nn.Module], bool]) -> None:
        super().__init__(model, is_norm)
        self.steps: dict[nn.Module, list[tuple[nn.Module | None, bool]]] = defaultdict(list)
        self.places: dict[nn.Module, set[Place]] = defaultdict(set)
        for flow in self.flows:
            for node, module in flow.modules.items():
                self.places[module].add(flow.scope.places[node])
                feeder = _feeder(flow, node) if is_norm(module) else None
                source = None if feeder is None else flow.modules[feeder]
                self.steps[module].append((source, not {node, feeder} & flow.scope.assumed))
        self.uncalled = [module for module in self.names if is_norm(module) and module not in self.counts]

    def feeder(self, norm: nn.Module) -> nn.Module | None:
        """The convolution that is the norm's alone; None if there is none, or it is not proved."""
        feeders = {feeder for feeder, _ in self.steps[norm]}
        conv = feeders.pop() if len(feeders) == 1 else None
        if conv is None or not all(proved for _, proved in self.steps[norm]):
            return None
        places = [*self.places[norm], *self.places[conv]]
        if len(places) != 2 or places[0][::2] != places[1][::2] or places[0].code is None:
            return None  # not one method of one owner
        owner, above = places[0].owner, self.above(norm) | self.above(conv)
        if self.counts[conv] != self.counts[norm] or conv in self.read or not above.isdisjoint(self.coverage.failures):
            return None
        if self.is_shared(conv) or any(uncalled in owner.modules() for uncalled in self.uncalled):
            return None
        return None if self._mentioned(conv, places[0].code, above) else conv

    def _mentioned(self, conv: nn.Module, method: CodeType, above: set[nn.Module]) -> bool:
        """Whether a method besides `method` mentions a convolution by name, or its container but for a call of it."""
        attributes: list[tuple[nn.Module, bool]] = [(conv, False)]
        for module, _ in attributes:
            for holder, _ in self.holders[module]:
                if type(holder) in _CONTAINERS:
                    attributes.append((holder, True))
        return any(
            code != method and _uses(code, name, other, module, inside)
            for module, inside in attributes
            for holder, name in self.holders[module]
            if type(holder) not in _CONTAINERS
            for other in above
            for code in _methods(type(other))
        )


def _feeder(flow: Flow, norm: fx.Node) -> fx.Node | None:
    """The convolution's call, at most with identities behind it, that gives all that it puts out to a norm's."""
    node = flow.source(norm)
    while node is not None and len(flow.consumers(node)) == 1:
        module = flow.modules.get(node)
        if not isinstance(module, nn.Identity):
            conv = isinstance(module, nn.modules.conv._ConvNd) and kinds.is_plain_affine(module)
            return node if conv else None
        node = flow.source(node)
    return None


def _methods(cls: type) -> Iterator[CodeType]:
    """The code of a class's own methods, and its parents', but torch's and those that only set it up."""
    for parent in cls.__mro__:
        if not parent.__module__.startswith("torch."):
            for name, value in vars(parent).items():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, FunctionType) and not any(word in name for word in _SETTING_UP):
                    yield function.__code__


def _uses(code: CodeType, name: str, owner: nn.Module, module: nn.Module, calls: bool) -> bool:
    """Whether a method's code mentions `module` by a name, or all children.

    Args:
        code: The method's code.
        name: The module's name in what holds it.
        owner: The method's object, of which `self.name` may be another module.
        module: The module.
        calls: Whether to let calls of it pass.
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
