"""The calls of norms and activations in one mode's graphs, by their place in the code, and which follows which."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from retrofit.graph.flow import Flow
from retrofit.graph.trace import Origin, Scope

_FOLLOWERS = {
    "addition": "residual addition",
    "convolution": "feeds a convolution",
    "linear": "feeds a linear layer",
    "norm": "feeds another norm",
    "pool": "feeds a mean pooling",
    "window": "feeds a mean pooling",
    "concatenation": "feeds a concatenation",
    "product": "feeds a multiplication",
    "constant": "feeds arithmetic with a constant",
}


@dataclass(frozen=True)
class Place:
    """A call's place in the code: the `index`-th call of `target` in one run of the owner's method."""

    owner: nn.Module
    method: str
    target: Any
    index: int


@dataclass(frozen=True)
class TracedStep:
    """A call in a traced graph.

    Attributes:
        flow: The graph.
        node: The call.
        place: Its place in the code.
        total: How many calls of the same target the method makes.
        given: The optional arguments that the owner's method got.
    """

    flow: Flow
    node: fx.Node
    place: Place
    total: int = 1
    given: tuple[str, ...] = ()


class Calls:
    """What one mode's scopes call.

    Attributes:
        norms: Every call of a norm, wanted or not, by place.
        activations: Every call of an activation, by place.
        counts: How often each module is called.
        places: How many places call each norm and activation.
        read: The modules whose parameters or buffers are read by another module's code.
    """

    def __init__(self, scopes: list[Scope], wanted: Callable[[nn.Module], bool], names: dict[nn.Module, str]) -> None:
        self.norms: dict[Place, list[TracedStep]] = defaultdict(list)
        self.activations: dict[Place, list[TracedStep]] = defaultdict(list)
        self.counts: Counter[nn.Module] = Counter()
        self.read: set[nn.Module] = set()
        self._at: dict[fx.Node, Place] = {}
        for scope in scopes:
            flow = Flow(scope, wanted, names)
            self.counts.update(flow.modules.values())
            # Nodes without users come from those who look at a module while it is traced (`wanted` does).
            read = (str(node.target) for node in scope.graph.nodes if node.op == "get_attr" and node.users)
            self.read.update(scope.module.get_submodule(name.rpartition(".")[0]) for name in read)
            for found, steps in ((self.norms, _norm_steps(flow)), (self.activations, _activation_steps(flow))):
                for step in steps:
                    found[step.place].append(step)
                    self._at[step.node] = step.place
        self.places = Counter(place.target for place in (*self.norms, *self.activations))

    def follower(self, norm: Place) -> tuple[Place | None, str]:
        """The activation that directly follows a norm, on every call and after no other layer, or why there is none."""
        found = {self._follower(step) for step in self.norms[norm]}
        if len(found) > 1:
            return None, "followed by different layers on different calls"
        place, reason = found.pop()
        if place is not None and any(self.norm_before(step) != norm for step in self.activations[place]):
            return None, "the call of its activation follows other layers too"
        return place, reason

    def norm_before(self, activation: TracedStep) -> Place | None:
        """The place of the norm whose output an activation takes."""
        source = activation.flow.before(activation.node)
        place = None if source is None else self._at.get(source)
        return place if place in self.norms else None

    def _follower(self, step: TracedStep) -> tuple[Place | None, str]:
        flow = step.flow
        users = flow.after(step.node)
        if not users:
            return None, "output unused"
        if len(users) > 1:
            times = "twice" if len(users) == 2 else f"{len(users)} times"
            return None, f"output used {times}: {', '.join(flow.describe(user) for user in users)}"
        user = users[0]
        kind = flow.steps[user]
        if kind == "output":
            scope = flow.scope.name
            return None, f"output of {scope}, which is traced on its own" if scope else "model output"
        if kind == "activation" and flow.before(user) is step.node:
            return (None, f"feeds a gate: {flow.describe(user)}") if flow.is_gate(user) else (self._at[user], "")
        if kind == "shape":
            return None, f"{flow.describe(user)} in between"
        return None, _FOLLOWERS.get(kind, f"feeds {flow.describe(user)}")


def _norm_steps(flow: Flow) -> Iterator[TracedStep]:
    seen: Counter[tuple[int, nn.Module]] = Counter()
    for node in flow.scope.graph.nodes:
        if flow.steps[node] == "norm":
            origin, norm = flow.scope.origins[node], flow.modules[node]
            yield TracedStep(flow, node, Place(origin.owner, "forward", norm, seen[origin.visit, norm]))
            seen[origin.visit, norm] += 1


def _activation_steps(flow: Flow) -> Iterator[TracedStep]:
    visits: dict[int, list[tuple[fx.Node, Origin]]] = defaultdict(list)
    for node in flow.scope.graph.nodes:
        if flow.steps[node] == "activation":
            origin = flow.scope.origins[node]
            visits[origin.visit].append((node, origin))
    for calls in visits.values():
        runs = {run for _, origin in calls for run in origin.methods}
        for node, origin in calls:
            # a helper method that runs once in a forward is itself the place; otherwise the forward around it is
            run = origin.methods[0] if origin.methods else ("forward", -1)
            alone = sum(name == run[0] for name, _ in runs) == 1
            own = run[0] != "forward" and alone and hasattr(type(origin.owner), run[0])
            target = flow.modules.get(node, node.target)
            peers = [
                other
                for other, where in calls
                if flow.modules.get(other, other.target) is target and (not own or run in where.methods)
            ]
            place = Place(origin.owner, run[0] if own else "forward", target, peers.index(node))
            yield TracedStep(flow, node, place, len(peers), () if own else flow.scope.given[origin.visit])
