"""Where the norms are, at the level of calls: which activation follows each, and what is left and why."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch import fx, nn

from retrofit.graph import kinds
from retrofit.graph.flow import Flow, Flows, call_name
from retrofit.graph.site import Activation, Call, Site, Sites, UnmatchedActivation
from retrofit.graph.source import callee
from retrofit.graph.trace import Place

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


def find_sites(
    model: nn.Module, norms: Collection[type[nn.Module]] | Callable[[nn.Module], bool] = kinds.is_norm
) -> Sites:
    """Find every call of the norms asked for, and which activation follows.

    The model is traced in eval and in train mode, on every path through its code; see `trace`. What a site says holds
    on all of them.

    Args:
        model: Any module, on any device, in any mode; it is not changed.
        norms: The norms asked for: exact types, or a predicate on modules.

    Returns:
        The sites, the activations that belong to none, and the norms that no trace shows. Each norm asked for is in
        at least one site or in `uncovered`.
    """
    wanted = norms if callable(norms) else lambda module: type(module) in norms
    return _Search(model, wanted).sites()


@dataclass(frozen=True)
class _Step:
    """One call in one traced graph."""

    flow: Flow
    node: fx.Node
    place: Place


class _Search(Flows):
    """The search over the graphs of a model.

    Attributes:
        norms: The steps that call a norm, asked for or not, by place.
        activations: The steps that call an activation, by place.
        places: How many places call each norm and activation.
    """

    def __init__(self, model: nn.Module, wanted: Callable[[nn.Module], bool]) -> None:
        self.model, self.wanted, self.known = model, wanted, kinds.activations_of(model)
        super().__init__(model, wanted, self.known)
        self.norms: dict[Place, list[_Step]] = defaultdict(list)
        self.activations: dict[Place, list[_Step]] = defaultdict(list)
        self._at: dict[fx.Node, Place] = {}
        for flow in self.flows:
            for node, place in flow.scope.places.items():
                if flow.steps[node] in ("norm", "activation"):
                    self._at[node] = place
                    steps = self.norms if flow.steps[node] == "norm" else self.activations
                    steps[place].append(_Step(flow, node, place))
        self.places = Counter(place.target for place in (*self.norms, *self.activations))

    def sites(self) -> Sites:
        """All that there is to say."""
        sites = {place: self._site(place) for place in self.norms if self.wanted(place.target)}
        order = {name: index for index, name in enumerate(self.names.values())}
        covered = {place.target for place in sites}
        return Sites(
            sites=sorted(sites.values(), key=lambda site: (order[site.norm], site.place)),
            unmatched=[*self._unmatched(sites), *self._unseen()],
            uncovered={n: self._why_unseen(m) for m, n in self.names.items() if self.wanted(m) and m not in covered},
            read=frozenset(name for module, name in self.names.items() if module in self.read),
            model=weakref.ref(self.model),
        )

    def _site(self, place: Place) -> Site:
        norm, steps = place.target, self.norms[place]
        activation, reason, ends = self._activation(place)
        return Site(
            norm=self.names[norm],
            owner=self.names[place.owner],
            owner_type=type(place.owner).__name__,
            place=[other for other in self.norms if other.target is norm].index(place),
            places=self.places[norm],
            activation=activation,
            reason=reason,
            last_before_pool=any(end.flow.reaches_final_pool(end.node) for end in ends),
            in_squeeze_excite=any(step.flow.in_squeeze_excite(step.node) for step in steps),
        )

    def _activation(self, place: Place) -> tuple[Activation | None, str, list[_Step]]:
        """The activation of a norm's call, or why there is none, and the steps that end the site."""
        norm = place.target
        fused = _fused_activation(norm)
        if fused is not None:
            if fused not in self.known:
                return None, f"its own activation, {type(fused).__name__}, is not known to be elementwise", []
            owner = self.names[norm]
            name = f"{owner}.act" if owner else "act"
            return Activation("fused", name, type(fused).__name__, owner, None, fused), "", self.norms[place]
        follower, reason = self._follower(place)
        if follower is None:
            return None, reason, self.norms[place]
        steps = [step for step in self.activations[follower] if self._norm_before(step) == place]
        module, owner = _module_of(steps[0]), self.names[follower.owner]
        selector = None if len(steps) == len(self.activations[follower]) else self._selector(place, follower)
        alone = selector is None and isinstance(follower.target, nn.Module) and self._called_once(follower.target)
        call = None if alone else Call(owner, follower, selector)
        name = self._name(steps[0])
        return Activation("module" if alone else "call", name, type(module).__name__, owner, call, module), "", steps

    def _follower(self, norm: Place) -> tuple[Place | None, str]:
        """The activation that directly follows a norm on every call, or why there is none."""
        found = {self._follower_of(step) for step in self.norms[norm]}
        if len(found) > 1:
            return None, "followed by different layers on different calls"
        place, reason = found.pop()
        others = place is not None and any(self._norm_before(step) != norm for step in self.activations[place])
        if place is not None and others and self._selector(norm, place) is None:
            return None, "the call of its activation follows other layers too"
        return place, reason

    def _selector(self, norm: Place, activation: Place) -> tuple[str, str] | None:
        """What tells, where an activation of several norms is called, which it is: an expression; and the norm's name.

        The expression is the one that is called in the norm's place. None if it is not the norm before on every call.
        """
        name = {module: name for name, module in activation.owner.named_modules()}.get(norm.target)
        if name is None or norm.code != activation.code or norm.code is None or isinstance(norm.at, str):
            return None
        expression = callee(norm.code, norm.at)
        for step in self.activations[activation]:
            before = self._norm_before(step)
            try:
                there = eval(expression, *step.flow.scope.variables[step.node])
            except Exception:  # such as a name that is not bound there
                return None
            if before is None or there is not before.target:
                return None
        return expression, name

    def _follower_of(self, step: _Step) -> tuple[Place | None, str]:
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

    def _norm_before(self, activation: _Step) -> Place | None:
        """The place of the norm whose output an activation takes."""
        source = activation.flow.before(activation.node)
        place = None if source is None else self._at.get(source)
        return place if place in self.norms else None

    def _name(self, step: _Step) -> str:
        target, owner = step.place.target, step.place.owner
        if isinstance(target, nn.Module) and self._called_once(target):
            return self.names[target]
        others = [place for place in self.activations if (place.owner, place.target) == (owner, target)]
        name = f"{self.names[owner]}.{call_name(step.node)}".lstrip(".")
        return f"{self.names[target] if isinstance(target, nn.Module) else name}#{others.index(step.place)}"

    def _called_once(self, module: nn.Module) -> bool:
        return self.places[module] == 1 and not any(
            holder in self.coverage.failures for holder, _ in self.holders[module]
        )

    def _unmatched(self, sites: dict[Place, Site]) -> Iterator[UnmatchedActivation]:
        """The activations that traces show and no site claims."""
        claimed = {
            self._follower(place)[0]
            for place, site in sites.items()
            if site.activation is not None and site.activation.kind != "fused"
        }
        for place, steps in self.activations.items():
            if place not in claimed:
                kind = type(_module_of(steps[0])).__name__
                yield UnmatchedActivation(self._name(steps[0]), kind, self._why_unmatched(steps[0], sites))

    def _why_unmatched(self, step: _Step, sites: dict[Place, Site]) -> str:
        flow, source = step.flow, step.flow.before(step.node)
        if flow.in_squeeze_excite(step.node):
            return "inside a squeeze-excite"
        if source is None:
            return "no norm before it"
        norm = self._norm_before(step)
        if norm is not None:
            name = self.names[norm.target]
            if norm not in sites:
                return f"its norm, {flow.describe(source)}, is not one of those asked for"
            return f"not directly after {name}: {sites[norm].reason or 'it has its own activation'}"
        if flow.steps[source] in ("addition", "concatenation", "product"):
            return {"addition": "after a residual addition"}.get(flow.steps[source], f"after a {flow.steps[source]}")
        return f"no norm before it: fed by {flow.describe(source)}"

    def _unseen(self) -> Iterator[UnmatchedActivation]:
        """The activations inside norms that were not asked for, and those that no trace shows."""
        for module, name in self.names.items():
            fused = _fused_activation(module) if kinds.is_norm(module) and not self.wanted(module) else None
            if fused is not None:
                reason = f"its norm, {type(module).__name__}, is not one of those asked for"
                yield UnmatchedActivation(f"{name}.act", type(fused).__name__, reason)
            if module in self.counts or module not in self.known:
                continue
            if not any(kinds.is_norm(holder) or holder in self.known for holder, _ in self.holders[module]):
                yield UnmatchedActivation(name, type(module).__name__, self._why_unseen(module))

    def _why_unseen(self, module: nn.Module) -> str:
        """Why no trace shows a call of `module`."""
        above = self.holders[module]
        while above:
            holder, _ = above[0]
            label = f"{type(holder).__name__} {self.names[holder]}".rstrip()
            if holder not in self.coverage.holding:
                return f"{label} holds none of the norms asked for"
            if holder in self.coverage.failures:
                return f"{label} cannot be traced: {self.coverage.failures[holder]}"
            if kinds.is_leaf(holder):
                return f"inside {label}, which is one step to the trace"
            above = self.holders[holder]
        return "never called by the model's forward" if self.holders[module] else "it is the whole model"


def _module_of(step: _Step) -> nn.Module:
    target = step.place.target
    module = target if isinstance(target, nn.Module) else kinds.function_module(step.node)
    assert module is not None  # the step is an activation
    return module


def _fused_activation(norm: nn.Module) -> nn.Module | None:
    """The activation inside a norm+activation layer; Identity counts as none."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, nn.Module) and not isinstance(act, nn.Identity) else None
