"""Where the norms are, at the level of calls: which activation follows each, and what is left and
why.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal, NamedTuple

from torch import fx, nn

from retrofit.graph import recognition
from retrofit.graph.dataflow import Flow, Flows
from retrofit.graph.source_code import callee
from retrofit.graph.trace import Place, call_name
from retrofit.utils.text import shortlist

# Why the activation behind a step has no norm of its own.
_WHY_AFTER = {
    "norm": "behind a norm, past steps that move or mix channels",
    "addition": "after a residual addition",
    "concatenation": "after a concatenation",
    "product": "after a product",
}


@dataclass(frozen=True)
class Activation:
    """The activation that directly follows a norm.

    Attributes:
        kind: "fused": the norm's own `.act`; "module": a child that is called at this place only,
            and may be replaced; "call": one of several calls of a module, or a functional call, for
            which the block's code has to be rewritten.
        name: Dotted name of the module; for calls followed by `#` and the number of the call.
        module: The module; for functional calls a fresh one, not in place.
        owner: Dotted name of the block that makes the call.
        place: Where the block makes it; None for "fused".
        selector: For one of several norms that the call follows, as in a loop: the expression that
            is the norm there, or a block that ends in it, and its name in the block.
    """

    kind: Literal["fused", "module", "call"]
    name: str
    module: nn.Module = field(compare=False, repr=False)
    owner: str = ""
    place: Place | None = field(default=None, repr=False)
    selector: tuple[str, str] | None = None

    @property
    def type(self) -> str:
        """Class name of `module`."""
        return type(self.module).__name__


@dataclass(frozen=True)
class Site:
    """One place in the model's code that calls a norm.

    Attributes:
        norm: Its dotted name.
        owner_type: Class name of the module whose code makes the call.
        call_index: Which of the places that call the norm it is, counted from 0.
        call_count: How many there are.
        activation: The one that directly follows on every call.
        reason: Why there is none.
        last_before_pool: Whether the activation is the last before the final mean pooling.
        in_squeeze_excite: Whether the norm works on pooled values that go on to multiply other
            features.
    """

    norm: str
    owner_type: str
    call_index: int
    call_count: int
    activation: Activation | None
    reason: str
    last_before_pool: bool
    in_squeeze_excite: bool


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
    # Names of the norms that no trace shows, with the reason.
    uncovered: dict[str, str]
    # Names of the modules that could not be traced, and the cause.
    untraced: dict[str, str] = field(default_factory=dict)

    @property
    def hindrance(self) -> str:
        """What kept the network from being traced whole, in a phrase; empty if nothing did."""
        if not self.untraced:
            return ""
        cause = next(iter(self.untraced.values()))
        return f"{shortlist([*self.untraced])} cannot be traced ({cause})"


class _NotActivatedError(Exception):
    """No activation follows a norm; the message is the reason."""


def find_sites(model: nn.Module, is_norm: Callable[[nn.Module], bool]) -> Sites:
    """Find every call of the norms that `is_norm` asks for, and the activation that follows each.

    The model is traced in evaluation and in training, on every path through its code, and is not
    changed. A site says what holds on all paths.
    """
    search = _Search(model, is_norm)
    sites = {}
    for place in search.norms:
        if is_norm(place.target):
            sites[place] = search.site(place)
    order = list(search.names.values())
    in_order = sorted(sites.values(), key=lambda site: (order.index(site.norm), site.call_index))
    unmatched = list(search.unmatched(sites))
    return Sites(
        sites=in_order,
        unmatched=unmatched,
        uncovered=search.uncovered(sites),
        untraced=search.untraced(),
    )


class _Search(Flows):
    """The places that call norms, asked for or not, and activations; for each place the nodes that
    make the call, each with its path.
    """

    def __init__(self, model: nn.Module, is_norm: Callable[[nn.Module], bool]) -> None:
        super().__init__(model, is_norm)
        self.norms = self._calls_by_place("norm")
        self.acts = self._calls_by_place("activation")
        # How many places call each norm and activation.
        self.call_counts = Counter(place.target for place in (*self.norms, *self.acts))

    def _calls_by_place(self, step: str) -> dict[Place, list[tuple[Flow, fx.Node]]]:
        calls: dict[Place, list[tuple[Flow, fx.Node]]] = defaultdict(list)
        for flow in self.flows:
            for node, place in flow.places.items():
                if flow.steps[node] == step:
                    calls[place].append((flow, node))
        return calls

    def site(self, place: Place) -> Site:
        """Describe a norm's call, and the activation that follows it."""
        norm = place.target
        activation = None
        reason = ""
        try:
            activation = self._activation_of(place)
        except _NotActivatedError as error:
            reason = str(error)
        calls = self.norms[place]
        last_before_pool = activation is not None and self._reaches_final_pool(place, activation)
        in_squeeze_excite = any(flow.in_squeeze_excite(node) for flow, node in calls)
        places = [each for each in self.norms if each.target is norm]
        return Site(
            norm=self.names[norm],
            owner_type=type(place.owner).__name__,
            call_index=places.index(place),
            call_count=len(places),
            activation=activation,
            reason=reason,
            last_before_pool=last_before_pool,
            in_squeeze_excite=in_squeeze_excite,
        )

    def _activation_of(self, place: Place) -> Activation:
        """The activation inside a norm or behind its call."""
        fused = _fused_activation(place.target)
        if fused is None:
            return self._activation_behind(place)
        if fused in self.activations:
            name = f"{self.names[place.target]}.act".lstrip(".")
            return Activation("fused", name, fused)
        raise _NotActivatedError(
            f"its own activation, {type(fused).__name__}, is not known to be elementwise"
        )

    def _reaches_final_pool(self, norm_place: Place, activation: Activation) -> bool:
        """Whether an activation, on a call behind its norm, is the last before the final pooling."""
        if activation.place is None:
            return any(flow.reaches_final_pool(node) for flow, node in self.norms[norm_place])
        return any(
            flow.reaches_final_pool(node)
            for flow, node in self.acts[activation.place]
            if _norm_place_before(flow, node) == norm_place
        )

    def _activation_behind(self, norm_place: Place) -> Activation:
        """The activation that directly follows a norm on every call."""
        answers = {_act_place_behind(*call) for call in self.norms[norm_place]}
        if len(answers) > 1:
            raise _NotActivatedError("followed by different layers on different calls")
        act_place = answers.pop()
        selector = None
        calls = self.acts[act_place]
        if any(_norm_place_before(*call) != norm_place for call in calls):
            selector = self._selector(norm_place, act_place)
        flow, node = calls[0]
        is_child = selector is None and self._is_own(act_place.target)
        return Activation(
            "module" if is_child else "call",
            self._name(act_place),
            flow.activation(node),
            self.names[act_place.owner],
            act_place,
            selector,
        )

    def _selector(self, norm_place: Place, act_place: Place) -> tuple[str, str]:
        """Return what tells the norm from others where one call of an activation follows several,
        as in `for norm in self.norms: x = F.relu(norm(x))`.

        Returns:
            The expression that stands for the norm in the activation's code, or for a block that
            returns the norm's output, and the name of that norm or block.
        """
        code: Any = act_place.code
        names = {module: name for name, module in act_place.owner.named_modules()}
        calls: set[Any] = {_call_in(code, *call) for call in self.norms[norm_place]}
        # It fails if there is no such call, or more than one; if no norm comes before the
        # activation; or if a name is not bound there.
        with suppress(Exception):
            (call,) = calls
            expression = callee(code, call.at)
            for flow, node in self.acts[act_place]:
                named = eval(expression, *flow.variables[node])
                norm_node: Any = flow.norm_before(node)
                called: Any = _call_in(code, flow, norm_node)
                if named is not called.target:
                    raise LookupError
            return expression, names[call.target]
        raise _NotActivatedError("the call of its activation follows other layers too")

    def _name(self, place: Place) -> str:
        target = place.target
        if self._is_own(target):
            return self.names[target]
        name = self.names.get(target)
        if name is None:
            _, node = self.acts[place][0]
            name = f"{self.names[place.owner]}.{call_name(node)}".lstrip(".")
        alike = [other for other in self.acts if other[:2] == place[:2]]
        return f"{name}#{alike.index(place)}"

    def _is_own(self, target: Any) -> bool:
        """Whether a target is a module, and called at one place only."""
        if not isinstance(target, nn.Module) or self.call_counts[target] > 1:
            return False
        return not any(target in failed._modules.values() for failed in self.failures)

    def unmatched(self, sites: dict[Place, Site]) -> Iterator[UnmatchedActivation]:
        """The activations that no site claims: on traces, inside norms that were not asked for, and
        never seen.
        """
        yield from self._unmatched_calls(sites)
        yield from self._unmatched_modules()

    def _unmatched_calls(self, sites: dict[Place, Site]) -> Iterator[UnmatchedActivation]:
        activations = [site.activation for site in sites.values()]
        claimed = {activation.place for activation in activations if activation is not None}
        for place, calls in self.acts.items():
            if place not in claimed:
                flow, node = calls[0]
                reason = self._why_unmatched(flow, node, sites)
                yield _unmatched(self._name(place), flow.activation(node), reason)

    def _unmatched_modules(self) -> Iterator[UnmatchedActivation]:
        norms = filter(recognition.is_norm, self.names)
        parts = {child for holder in (*norms, *self.activations) for child in holder.children()}
        # Called, or a part of a norm or of another activation.
        seen = parts | self.calls.keys()
        for module, name in self.names.items():
            fused = _fused_activation(module)
            is_other_norm = recognition.is_norm(module) and not self.is_norm(module)
            if is_other_norm and fused is not None:
                reason = f"its norm, {type(module).__name__}, is not one of those asked for"
                yield _unmatched(f"{name}.act", fused, reason)
            if module in self.activations and module not in seen:
                yield _unmatched(name, module, self.why_unseen(module))

    def uncovered(self, sites: dict[Place, Site]) -> dict[str, str]:
        """Why no site calls a norm asked for, by its name."""
        covered = {place.target for place in sites}
        norms = [norm for norm in self.names if self.is_norm(norm) and norm not in covered]
        return {self.names[norm]: self.why_unseen(norm) for norm in norms}

    def untraced(self) -> dict[str, str]:
        """Why a module could not be traced, by its class and name."""
        failures = self.failures.items()
        return {
            self.label(module): cause
            for module, cause in failures
            if recognition.has_forward(module)
        }

    def _why_unmatched(self, flow: Flow, node: fx.Node, sites: dict[Place, Site]) -> str:
        producer = flow.before(node, ("same", "shape"))
        norm_place = _norm_place_before(flow, node)
        if flow.in_squeeze_excite(node):
            return "inside a squeeze-excite"
        if producer is None:
            return "no norm before it"
        if norm_place is None:
            before = f"no norm before it: fed by {flow.describe(producer)}"
            step = flow.steps[producer]
            return _WHY_AFTER.get(step, before)
        site = sites.get(norm_place)
        if site is None:
            return f"its norm, {flow.describe(producer)}, is not one of those asked for"
        why = site.reason or "it has its own activation"
        return f"not directly after {site.norm}: {why}"

    def why_unseen(self, module: nn.Module) -> str:
        """Why no trace shows a module."""
        name = self.names[module]
        if not name:
            return "it is the whole model"
        modules = {name: module for module, name in self.names.items()}
        while name:
            name = name.rpartition(".")[0]
            holder = modules[name]
            label = self.label(holder)
            if holder not in self.traceable:
                return f"{label} holds none of the norms asked for"
            is_untraced = holder in self.failures and recognition.has_forward(holder)
            if is_untraced:
                return f"{label} cannot be traced: {self.failures[holder]}"
            if recognition.is_leaf(holder):
                return f"{label} is one step to the trace, with all that it holds"
        return "never called by the model's forward"


def _norm_place_before(flow: Flow, node: fx.Node) -> Place | None:
    """The place of the norm whose output an activation takes."""
    norm_node = flow.norm_before(node)
    if norm_node is None:
        return None
    return flow.places[norm_node]


def _why_not_activated(flow: Flow, norm_node: fx.Node, user: fx.Node) -> str:
    """Why the only user of a norm's output is no activation for it; empty if it is one."""
    step = flow.steps[user]
    words = flow.describe(user)
    if step == "output":
        if flow.name:
            return f"output of {flow.name}, which is traced on its own"
        return "model output"
    if step == "addition":
        return "residual addition"
    if step != "activation" or flow.norm_before(user) is not norm_node:
        return f"feeds {words}"
    if flow.is_gate(user):
        return f"feeds a gate: {words}"
    return ""


def _unmatched(name: str, activation: nn.Module, reason: str) -> UnmatchedActivation:
    return UnmatchedActivation(name, type(activation).__name__, reason)


def _act_place_behind(flow: Flow, norm_node: fx.Node) -> Place:
    """Return, on one path, the place of the activation that takes all of a norm's channels."""
    users = flow.after(norm_node)
    if len(users) != 1:
        takers = ", ".join(map(flow.describe, users))
        raise _NotActivatedError(f"output used {len(users)} times: {takers}".rstrip(": "))
    user = users[0]
    reason = _why_not_activated(flow, norm_node, user)
    if reason:
        raise _NotActivatedError(reason)
    return flow.places[user]


def _call_in(code: CodeType | None, flow: Flow, norm_node: fx.Node) -> Place | None:
    """The call that a function makes of a norm, or of a block that returns what the norm does."""
    calls = [flow.places[norm_node], *flow.returned.get(norm_node, [])]
    return next((call for call in calls if call.code == code), None)


def _fused_activation(norm: nn.Module) -> nn.Module | None:
    """The activation inside a norm+activation layer; Identity counts as none."""
    act = getattr(norm, "act", None)
    if isinstance(act, nn.Module) and not isinstance(act, nn.Identity):
        return act
    return None
