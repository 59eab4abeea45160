"""Where the norms are, at the level of calls: what feeds each, which activation follows, and what is left and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from torch import nn

from retrofit.graph import kinds
from retrofit.graph.calls import Calls, Place, TracedStep
from retrofit.graph.flow import call_name
from retrofit.graph.site import Activation, Call, Left, Site, Sites
from retrofit.graph.trace import MODES, Coverage, Mode, trace


def find_sites(
    model: nn.Module, norms: Collection[type[nn.Module]] | Callable[[nn.Module], bool] = kinds.is_norm
) -> Sites:
    """Find every call of the norms asked for, what feeds it and which activation follows.

    The model is traced in eval and in train mode; see `trace`.

    Args:
        model: Any module, on any device, in any mode; it is not changed.
        norms: The norms asked for: exact types, or a predicate on modules.

    Returns:
        The sites, the activations that belong to none, and the norms that no trace shows. Each norm asked for is in
        at least one site or in `uncovered`.
    """
    wanted = norms if callable(norms) else lambda module: type(module) in norms
    return _Search(model, wanted, trace(model, wanted)).found()


class _Search:
    """The search over both modes' graphs."""

    def __init__(self, model: nn.Module, wanted: Callable[[nn.Module], bool], coverage: Coverage) -> None:
        self.wanted = wanted
        self.failures = coverage.failures
        self.holding = coverage.holding
        self.names = {module: name for name, module in model.named_modules()}
        self.modes = {mode: Calls(coverage.scopes[mode], wanted, self.names) for mode in MODES}
        self.read = self.modes["eval"].read | self.modes["train"].read
        self.holders: dict[nn.Module, list[nn.Module]] = defaultdict(list)
        self.sharers: Counter[nn.Parameter] = Counter()
        for module in model.modules():
            self.sharers.update(p for p in module._parameters.values() if p is not None)
            for child in module.children():
                self.holders[child].append(module)

    def found(self) -> Sites:
        """Put both modes together."""
        sites: dict[Place, Site] = {}
        for mode, calls in self.modes.items():
            for place in calls.norms:
                if self.wanted(place.target):
                    site = self._site(mode, place)
                    sites[place] = _merge(sites[place], site) if place in sites else site
        order = {name: index for index, name in enumerate(self.names.values())}
        covered = {place.target for place in sites}
        return Sites(
            sites=sorted(sites.values(), key=lambda site: (order[site.norm], site.place)),
            left=[*self._left(sites), *self._unseen()],
            uncovered={n: self._why_unseen(m) for m, n in self.names.items() if self.wanted(m) and m not in covered},
            read=frozenset(name for module, name in self.names.items() if module in self.read),
        )

    def _site(self, mode: Mode, place: Place) -> Site:
        calls, norm = self.modes[mode], place.target
        activation, reason, ends = self._activation(mode, place)
        feeder, feeder_reason = self._feeder(norm)
        steps = calls.norms[place]
        norm_consumer, norm_reason = self._consumer(calls, norm, [] if _fused_activation(norm) else steps)
        activation_consumer, activation_reason = self._consumer(calls, norm, ends if activation else [])
        return Site(
            norm=self.names[norm],
            owner=self.names[place.owner],
            owner_type=type(place.owner).__name__,
            place=place.index,
            places=self._places(norm),
            feeder=feeder,
            feeder_reason=feeder_reason,
            activation=activation,
            reason=reason,
            norm_consumer=norm_consumer,
            norm_consumer_reason=norm_reason,
            activation_consumer=activation_consumer,
            activation_consumer_reason=activation_reason,
            last_before_pool=any(end.flow.reaches_final_pool(end.node) for end in ends),
            in_squeeze_excite=any(step.flow.in_squeeze_excite(step.node) for step in steps),
            modes=mode,
        )

    def _activation(self, mode: Mode, place: Place) -> tuple[Activation | None, str, list[TracedStep]]:
        """The activation of a norm's call, or why there is none, and the steps that end the site."""
        calls, norm = self.modes[mode], place.target
        fused = _fused_activation(norm)
        if fused is not None:
            if not kinds.is_activation(fused):
                return None, f"its own activation, {type(fused).__name__}, is not known to be elementwise", []
            owner = self.names[norm]
            name = f"{owner}.act" if owner else "act"
            found = Activation("fused", name, type(fused).__name__, owner, None, fused)
            return found, "", calls.norms[place]
        follower, reason = calls.follower(place)
        if follower is None:
            return None, reason, calls.norms[place]
        steps = calls.activations[follower]
        module, owner = _module_of(steps[0]), self.names[follower.owner]
        if isinstance(follower.target, nn.Module) and self._called_once(follower.target):
            return Activation("module", self.names[module], type(module).__name__, owner, None, module), "", steps
        target = follower.target
        if isinstance(target, nn.Module):
            target = {child: name for name, child in follower.owner.named_modules()}.get(target)
            if target is None:
                return None, f"{self.names[module]} is not a child of the block that calls it", []
        if any(step.given != steps[0].given for step in steps):
            return None, f"{owner} is called with different sets of arguments", []
        run = (follower.index, steps[0].total)
        call = Call(
            owner=owner,
            method=follower.method,
            op=steps[0].node.op,
            target=target,
            given=steps[0].given,
            eval=run if mode == "eval" else None,
            train=run if mode == "train" else None,
        )
        return Activation("call", self._name(steps[0]), type(module).__name__, owner, call, module), "", steps

    def _name(self, step: TracedStep) -> str:
        if isinstance(step.place.target, nn.Module):
            name = self.names[step.place.target]
            return name if self._called_once(step.place.target) else f"{name}#{step.place.index}"
        return f"{self.names[step.place.owner]}.{call_name(step.node)}#{step.place.index}".lstrip(".")

    def _places(self, target: nn.Module) -> int:
        return max(calls.places[target] for calls in self.modes.values())

    def _called_once(self, module: nn.Module) -> bool:
        return self._places(module) == 1 and not any(holder in self.failures for holder in self.holders[module])

    def _feeder(self, norm: nn.Module) -> tuple[str | None, str]:
        """The layer that an affine map of the norm's input folds into, or why there is none."""
        if not self._called_once(norm):
            return None, "the norm is called at several places, or in code that cannot be traced"
        feeders: set[nn.Module] = set()
        for calls in self.modes.values():
            for place, steps in calls.norms.items():
                for step in steps if place.target is norm else ():
                    feeder, reason = step.flow.feeder(step.node)
                    if feeder is None:
                        return None, reason
                    if calls.counts[feeder] != calls.counts[norm]:
                        return None, f"{self.names[feeder]} is called elsewhere too"
                    feeders.add(feeder)
        if len(feeders) > 1:
            return None, "fed by different layers on different calls"
        (feeder,) = feeders
        return self._unshared(feeder)

    def _consumer(self, calls: Calls, norm: nn.Module, ends: list[TracedStep]) -> tuple[str | None, str]:
        """The layer that an affine map of what some steps of a site put out folds into, or why there is none."""
        if not ends:
            return None, "the norm's own activation follows" if _fused_activation(norm) else "there is no activation"
        if not self._called_once(norm):
            return None, "the norm is called at several places, or in code that cannot be traced"
        found = [step.flow.consumer(step.node) for step in ends]
        for consumer, reason in found:
            if consumer is None:
                return None, reason
        (consumer, _), *others = found
        assert consumer is not None
        if any(other is not consumer for other, _ in others):
            return None, "consumed by different layers on different calls"
        if calls.counts[consumer] != len(ends):
            return None, f"{self.names[consumer]} is called elsewhere too"
        return self._unshared(consumer)

    def _unshared(self, layer: nn.Module) -> tuple[str | None, str]:
        """The layer's name if nothing else uses it or its parameters, or why it must not change."""
        if any(holder in self.failures for holder in self.holders[layer]):
            return None, f"{self.names[layer]} may be called in code that cannot be traced"
        if any(self.sharers[parameter] > 1 for parameter in layer.parameters()):
            return None, f"{self.names[layer]} shares its parameters with another layer"
        if layer in self.read:
            return None, f"the parameters of {self.names[layer]} are read elsewhere too"
        return self.names[layer], ""

    def _left(self, sites: dict[Place, Site]) -> Iterator[Left]:
        """The activations that traces show and no site claims."""
        seen: set[Place] = set()
        for calls in self.modes.values():
            owned = [place for place, site in sites.items() if site.activation and site.activation.kind != "fused"]
            claimed = {calls.follower(place)[0] for place in owned if place in calls.norms}
            for place, steps in calls.activations.items():
                if place not in claimed and place not in seen:
                    kind = type(_module_of(steps[0])).__name__
                    yield Left(self._name(steps[0]), kind, self._why_left(calls, steps[0], sites))
            seen.update(calls.activations)

    def _why_left(self, calls: Calls, step: TracedStep, sites: dict[Place, Site]) -> str:
        flow, source = step.flow, step.flow.before(step.node)
        if flow.in_squeeze_excite(step.node):
            return "inside a squeeze-excite"
        if source is None:
            return "no norm before it"
        norm = calls.norm_before(step)
        if norm is not None:
            name = self.names[norm.target]
            if norm not in sites:
                return f"its norm, {flow.describe(source)}, is not one of those asked for"
            return f"not directly after {name}: {sites[norm].reason or 'it has its own activation'}"
        if flow.steps[source] in ("addition", "concatenation", "product"):
            return {"addition": "after a residual addition"}.get(flow.steps[source], f"after a {flow.steps[source]}")
        return f"no norm before it: fed by {flow.describe(source)}"

    def _unseen(self) -> Iterator[Left]:
        """The activations inside norms that were not asked for, and those that no trace shows."""
        called = {module for calls in self.modes.values() for module in calls.counts}
        for module, name in self.names.items():
            fused = _fused_activation(module) if kinds.is_norm(module) and not self.wanted(module) else None
            if fused is not None:
                reason = f"its norm, {type(module).__name__}, is not one of those asked for"
                yield Left(f"{name}.act", type(fused).__name__, reason)
            inside = any(kinds.is_norm(holder) or kinds.is_activation(holder) for holder in self.holders[module])
            if kinds.is_activation(module) and module not in called and not inside:
                yield Left(name, type(module).__name__, self._why_unseen(module))

    def _why_unseen(self, module: nn.Module) -> str:
        """Why no trace shows a call of `module`."""
        above = self.holders[module]
        while above:
            holder = above[0]
            label = f"{type(holder).__name__} {self.names[holder]}".rstrip()
            if holder not in self.holding:
                return f"{label} holds none of the norms asked for"
            if holder in self.failures:
                return f"{label} cannot be traced: {self.failures[holder]}"
            if kinds.is_leaf(holder):
                return f"inside {label}, which is one step to the trace"
            above = self.holders[holder]
        return "never called by the model's forward" if self.holders[module] else "it is the whole model"


def _module_of(step: TracedStep) -> nn.Module:
    target = step.place.target
    module = target if isinstance(target, nn.Module) else kinds.function_module(step.node)
    assert module is not None  # the step is an activation
    return module


def _fused_activation(norm: nn.Module) -> nn.Module | None:
    """The activation inside a norm+activation layer; Identity counts as none."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, nn.Module) and not isinstance(act, nn.Identity) else None


def _merge(first: Site, second: Site) -> Site:
    """The site that holds in eval (`first`) and in train mode (`second`)."""
    one, two = first.activation, second.activation
    activation, reason = one, first.reason
    if one is not None and two is not None:
        if one.call is not None and two.call is not None:
            call = replace(one.call, train=two.call.train)
            activation = replace(one, call=call)
            if replace(call, eval=None) != two.call:
                activation = None
        elif one != two:
            activation = None
        reason = "" if activation else "followed by different activations in eval and in train mode"
    elif one is not None or two is not None:
        activation = None
        reason = f"in train mode: {second.reason}" if one else f"in eval mode: {first.reason}"
    differ = "consumed by different layers in eval and in train mode"
    norm_reason = first.norm_consumer_reason or second.norm_consumer_reason
    if first.norm_consumer != second.norm_consumer:
        norm_reason = norm_reason or differ
    activation_reason = first.activation_consumer_reason or second.activation_consumer_reason
    if first.activation_consumer != second.activation_consumer or activation is None:
        activation_reason = activation_reason or reason or differ
    return replace(
        first,
        activation=activation,
        reason=reason,
        norm_consumer=None if norm_reason else first.norm_consumer,
        norm_consumer_reason=norm_reason,
        activation_consumer=None if activation_reason else first.activation_consumer,
        activation_consumer_reason=activation_reason,
        last_before_pool=first.last_before_pool or second.last_before_pool,
        in_squeeze_excite=first.in_squeeze_excite or second.in_squeeze_excite,
        modes="both",
    )
