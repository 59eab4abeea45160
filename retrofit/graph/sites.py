"""Where the norms are, at the level of calls: which activation follows each, and what is left and
why.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import fx, nn

from retrofit.graph import kinds
from retrofit.graph.flow import Flow, Flows, call_name
from retrofit.graph.trace import Place, callee


@dataclass(frozen=True)
class Activation:
    """The activation that directly follows a norm."""

    # "fused": the norm's own `.act`; "module": a child that is called at this place only, and may
    # be replaced; "call": one of several calls of a module, or a functional call, for which the
    # block's code has to be rewritten
    kind: Literal["fused", "module", "call"]
    # dotted name of the module; for calls followed by `#` and the number of the call
    name: str
    module: nn.Module = field(
        compare=False, repr=False
    )  # for functional calls a fresh one, not in place
    # dotted name of the block that makes the call
    owner: str = ""
    place: Place | None = field(
        default=None, repr=False
    )  # where the block makes it; None for "fused"
    # For one of several norms that the call follows, as in a loop: the expression that is the norm
    # there, and its name in the block
    selector: tuple[str, str] | None = None

    @property
    def type(self) -> str:
        """Class name of `module`."""
        return type(self.module).__name__


@dataclass(frozen=True)
class Site:
    """One place in the model's code that calls a norm."""

    # its dotted name
    norm: str
    # class name of the module whose code makes the call
    owner_type: str
    # which of the places that call the norm it is
    place: int
    # how many there are
    places: int
    # the one that directly follows on every call
    activation: Activation | None
    # why there is none
    reason: str
    last_before_pool: (
        # whether the activation (the norm, if none) is the last before the final mean pooling
        bool
    )
    in_squeeze_excite: (
        # whether the norm works on pooled values that go on to multiply other features
        bool
    )


class UnmatchedActivation(NamedTuple):
    """An activation that directly follows none of the norms asked for, and why; `name` and `type`
    as `Activation`'s.
    """

    name: str
    type: str
    reason: str


@dataclass(frozen=True)
class Sites:
    """What `find_sites` found; each norm asked for is in at least one site, or in `uncovered`."""

    sites: list[Site]
    unmatched: list[UnmatchedActivation]
    # names of the norms that no trace shows, with the reason
    uncovered: dict[str, str]


def find_sites(model: nn.Module, is_norm: Callable[[nn.Module], bool] = kinds.is_norm) -> Sites:
    """Find every call of the norms asked for, and which activation follows. The model is traced in
    evaluation and in training, on every path through its code, and not changed; what a site says
    holds on all of them.
    """
    search = _Search(model, is_norm)
    sites = {place: search.site(place) for place in search.norms if is_norm(place.target)}
    order = list(search.names.values())
    covered = {place.target for place in sites}
    return Sites(
        sites=sorted(sites.values(), key=lambda site: (order.index(site.norm), site.place)),
        unmatched=list(search.unmatched(sites)),
        uncovered={
            n: search.why_unseen(m)
            for m, n in search.names.items()
            if is_norm(m) and m not in covered
        },
    )


class _Search(Flows):
    """The search: by place, the steps (each a path and a node) that call a norm, asked for or not,
    or an activation.
    """

    def __init__(self, model: nn.Module, is_norm: Callable[[nn.Module], bool]) -> None:
        super().__init__(model, is_norm)
        self.norms: dict[Place, list[tuple[Flow, fx.Node]]] = defaultdict(list)
        self.acts: dict[Place, list[tuple[Flow, fx.Node]]] = defaultdict(list)
        for flow in self.flows:
            for node, place in flow.places.items():
                if (kind := flow.steps[node]) in ("norm", "activation"):
                    (self.norms if kind == "norm" else self.acts)[place].append((flow, node))
        self.places = Counter(
            place.target for place in (*self.norms, *self.acts)
        )  # how many call each

    def site(self, place: Place) -> Site:
        """Describe a norm's call, and the activation that follows it."""
        norm, steps = place.target, self.norms[place]
        name, act, reason, ends = self.names[norm], None, "", steps
        if (fused := _fused_activation(norm)) is None:
            act, reason = self._following(place)
            if act is not None and act.place is not None:
                ends = [step for step in self.acts[act.place] if _norm_before(*step) == place]
        elif fused in self.activations:
            act = Activation("fused", f"{name}.act".lstrip("."), fused)
        else:
            reason, ends = (
                f"its own activation, {type(fused).__name__}, is not known to be elementwise",
                [],
            )
        return Site(
            norm=name,
            owner_type=type(place.owner).__name__,
            place=[other for other in self.norms if other.target is norm].index(place),
            places=self.places[norm],
            activation=act,
            reason=reason,
            last_before_pool=any(flow.reaches_final_pool(node) for flow, node in ends),
            in_squeeze_excite=any(flow.in_squeeze_excite(node) for flow, node in steps),
        )

    def _following(self, norm: Place) -> tuple[Activation | None, str]:
        """The activation that directly follows a norm on every call, or why there is none."""
        followers = {self._follower(*step) for step in self.norms[norm]}
        if len(followers) > 1:
            return None, "followed by different layers on different calls"
        place, reason = followers.pop()
        if place is None:
            return None, reason
        selector = None
        if any(_norm_before(*step) != norm for step in self.acts[place]):
            selector = self._selector(norm, place)
            if selector is None:
                return None, "the call of its activation follows other layers too"
        flow, node = self.acts[place][0]
        kind: Literal["module", "call"] = (
            "module" if selector is None and self._is_own(place.target) else "call"
        )
        return Activation(
            kind, self._name(place), flow.activation(node), self.names[place.owner], place, selector
        ), ""

    def _follower(self, flow: Flow, node: fx.Node) -> tuple[Place | None, str]:
        users = flow.after(node)
        if len(users) != 1:
            return (
                None,
                f"output used {len(users)} times: {', '.join(map(flow.describe, users))}".rstrip(
                    ": "
                ),
            )
        kind, said = flow.steps[users[0]], flow.describe(users[0])
        if kind == "output":
            return (
                None,
                f"output of {flow.name}, which is traced on its own"
                if flow.name
                else "model output",
            )
        if kind == "activation" and flow.before(users[0]) is node:
            return (
                (None, f"feeds a gate: {said}")
                if flow.is_gate(users[0])
                else (flow.places[users[0]], "")
            )
        return None, "residual addition" if kind == "addition" else f"feeds {said}"

    def _selector(self, norm: Place, activation: Place) -> tuple[str, str] | None:
        """What tells which norm it is where an activation of several norms is called: the
        expression that is called in the norm's place, and the norm's name. None if the expression
        is not the norm before on every call.
        """
        name = {module: name for name, module in activation.owner.named_modules()}.get(norm.target)
        if (
            name is None
            or norm.code is None
            or norm.code != activation.code
            or isinstance(norm.at, str)
        ):
            return None
        expression = callee(norm.code, norm.at)
        before: list[Any] = [_norm_before(*step) for step in self.acts[activation]]
        # such as no norm before, or a name that is not bound there
        with suppress(Exception):
            called = [
                eval(expression, *flow.variables[node]) for flow, node in self.acts[activation]
            ]
            if all(one is place.target for one, place in zip(called, before, strict=True)):
                return expression, name
        return None

    def _name(self, place: Place) -> str:
        target, owner = place.target, place.owner
        if self._is_own(target):
            return self.names[target]
        name = f"{self.names[owner]}.{call_name(self.acts[place][0][1])}".lstrip(".")
        others = [other for other in self.acts if (other.owner, other.target) == (owner, target)]
        return (
            f"{self.names[target] if isinstance(target, nn.Module) else name}#{others.index(place)}"
        )

    def _is_own(self, target: Any) -> bool:
        """Whether a target is a module, and called at one place only."""
        if not isinstance(target, nn.Module) or self.places[target] > 1:
            return False
        return not any(target in failed._modules.values() for failed in self.failures)

    def unmatched(self, sites: dict[Place, Site]) -> Iterator[UnmatchedActivation]:
        """The activations that no site claims: on traces, inside norms that were not asked for, and
        never seen.
        """
        claimed = {site.activation.place for site in sites.values() if site.activation is not None}
        for place, steps in self.acts.items():
            if place not in claimed:
                flow, node = steps[0]
                kind = type(flow.activation(node)).__name__
                yield UnmatchedActivation(
                    self._name(place), kind, self._why_unmatched(flow, node, sites)
                )
        norms = set(filter(kinds.is_norm, self.names))
        parts = {child for module in norms | self.activations for child in module.children()}
        for module, name in self.names.items():
            fused = (
                _fused_activation(module) if module in norms and not self.is_norm(module) else None
            )
            if fused is not None:
                reason = f"its norm, {type(module).__name__}, is not one of those asked for"
                yield UnmatchedActivation(f"{name}.act", type(fused).__name__, reason)
            if module in self.activations and module not in self.calls and module not in parts:
                yield UnmatchedActivation(name, type(module).__name__, self.why_unseen(module))

    def _why_unmatched(self, flow: Flow, node: fx.Node, sites: dict[Place, Site]) -> str:
        source, norm = flow.before(node), _norm_before(flow, node)
        if flow.in_squeeze_excite(node):
            return "inside a squeeze-excite"
        if source is None:
            return "no norm before it"
        if norm is not None and norm not in sites:
            return f"its norm, {flow.describe(source)}, is not one of those asked for"
        if norm is not None:
            return f"not directly after {sites[norm].norm}: {sites[norm].reason or 'it has its own activation'}"
        if (kind := flow.steps[source]) in ("addition", "concatenation", "product"):
            return f"after a {'residual ' * (kind == 'addition')}{kind}"
        return f"no norm before it: fed by {flow.describe(source)}"

    def why_unseen(self, module: nn.Module) -> str:
        if not (name := self.names[module]):
            return "it is the whole model"
        modules = {name: module for module, name in self.names.items()}
        while name:
            name = name.rpartition(".")[0]
            holder, label = modules[name], f"{type(modules[name]).__name__} {name}".rstrip()
            if holder not in self.traceable:
                return f"{label} holds none of the norms asked for"
            if holder in self.failures:
                return f"{label} cannot be traced: {self.failures[holder]}"
            if kinds.is_leaf(holder):
                return f"inside {label}, which is one step to the trace"
        return "never called by the model's forward"


def _norm_before(flow: Flow, node: fx.Node) -> Place | None:
    """The place of the norm whose output an activation takes."""
    source = flow.before(node)
    return flow.places[source] if source is not None and flow.steps[source] == "norm" else None


def _fused_activation(norm: nn.Module) -> nn.Module | None:
    """The activation inside a norm+activation layer; Identity counts as none."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, nn.Module) and not isinstance(act, nn.Identity) else None
