"""The registry of targets: what `to=` may name, and the converter behind each name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import UsageError
from retrofit.graph.sites import Site, Sites, find_sites
from retrofit.layers.base import StrengthMixin
from retrofit.layers.settings import move_settings
from retrofit.surgery.families import NormLayer, classify
from retrofit.surgery.plan_and_report import EditRow, LayerRow, Plan, Status


@dataclass(frozen=True)
class Decision:
    """What becomes of one layer, and why."""

    status: Status
    target: str | None = None
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decisions:
    """What a converter decides.

    Attributes:
        layers: By name, what becomes of each layer that it was asked about.
        edits: What becomes of the activations and convolutions around them.
        sites: Where those are, for `Plan.sites`.
    """

    layers: Mapping[str, Decision]
    edits: tuple[EditRow, ...] = ()
    sites: Sites | None = None


class Converter(ABC):
    """Takes normalization layers of some families to their counterparts under one or more targets.

    It holds no state: `plan` decides; then, maybe on another network of the same structure, `survey` looks at what is
    about to change, `build` makes the layers, and `finish` gets what `survey` has found.

    Attributes:
        sources: The families it converts when the caller names none.
        identity: Whether the converted network is its source's function in evaluation, at strength 0 if it has one.
        has_strength: Whether its layers have a strength.
        changes_sets: Whether its layers normalize each sample by itself, and their sources do not.
        takes_activations: Whether it also converts the activations behind the layers, and is pointless without.
    """

    sources: frozenset[str]
    identity: bool = True
    has_strength: bool = True
    changes_sets: bool = False
    takes_activations: bool = False

    @abstractmethod
    def plan(self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions) -> Decisions:
        """Decide the fate of the layers that the caller's rules let through. Changes nothing; may raise errors."""

    def survey(self, model: nn.Module, plan: Plan) -> Any:
        """Look at the model that `plan` is about to change; what is returned goes to `finish`."""
        return None

    @abstractmethod
    def build(self, module: nn.Module, row: LayerRow, device: torch.device) -> nn.Module:
        """Return the counterpart of `module`, holding its tensors (moved, not copied), as `row` says."""

    def finish(self, model: nn.Module, plan: Plan, surveyed: Any) -> tuple[str, ...]:
        """Edit what lies around the layers, which are converted by now; return notes for the report."""
        return ()


@dataclass(frozen=True)
class RegisteredTarget:
    """A name that `to=` takes."""

    name: str
    description: str
    converter: type[Converter]
    arguments: Mapping[str, Any] = field(default_factory=dict)


TARGETS: dict[str, RegisteredTarget] = {}


def register(name: str, description: str, converter: type[Converter], **arguments: Any) -> None:
    """Make `converter(**arguments)` the converter of target `name`."""
    TARGETS[name] = RegisteredTarget(name, description, converter, arguments)


def converter_for(to: str) -> Converter:
    """Return a new converter for target `to`.

    Raises:
        UsageError: If there is no such target.
    """
    if to not in TARGETS:
        raise UsageError(f"unknown target {to!r}; choose one of {', '.join(TARGETS)}")
    return TARGETS[to].converter(**TARGETS[to].arguments)


def adopt(new: nn.Module, old: nn.Module) -> nn.Module:
    """Move parameters, buffers, children, hooks, training flag and further attributes of `old` into `new`.

    The parameters are the same objects, so that an optimizer that holds them keeps working. What `new` has and `old`
    lacks stays as built; where `new` has a parameter and `old` a buffer, as frozen layers do, it becomes a parameter.
    """
    for store in ("_parameters", "_buffers", "_modules"):
        getattr(new, store).update(getattr(old, store))
    for name in new._parameters.keys() & new._buffers.keys():  # a frozen layer's constants
        value = new._buffers.pop(name)
        new._parameters[name] = None if value is None else nn.Parameter(value)
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set
    hooks = {key for key in vars(old) if "_hooks" in key}
    for key, value in vars(old).items():
        if key == "_compiled_call_impl":  # `old.compile()`: a call of the old layer
            continue
        if key in hooks or (key not in vars(new) and key not in new._buffers):
            vars(new)[key] = value
    new.training = old.training
    return new


def materialize_at_zero(new: nn.Module, device: torch.device) -> nn.Module:
    """Put the strength of a layer that was built on the meta device at 0, and its settings on `device`."""
    if isinstance(new, StrengthMixin):
        new._register_strength(0.0, device)
    move_settings(new, device)
    return new


def count_batches(new: nn.Module, device: torch.device) -> None:
    """Let a layer that was built on the meta device count batches from 0, if its source counted none."""
    count: Any = new.num_batches_tracked
    if count.is_meta:
        new.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))


def sites_of(model: nn.Module, families: frozenset[str]) -> Sites:
    """Find the places that call the normalization layers of some families, and the activations behind them."""
    return find_sites(model, lambda module: getattr(classify("", module), "family", None) in families)


def planned_sites(model: nn.Module, plan: Plan, families: frozenset[str]) -> dict[tuple[str, int], Site]:
    """Return the sites that a plan is about, by what an `EditRow` says of its own: the norm, and the place of its call.

    They are the plan's own, or found again in another model than it was made for.
    """
    sites = plan.sites
    if sites is None or not sites.describe(model):
        sites = sites_of(model, families)
    return {(site.norm, site.place): site for site in sites.sites}


def left_activations(sites: Sites, converted: set[str]) -> list[EditRow]:
    """Return the rows of the activations that stay: those behind no norm, and what follows norms unseen by a trace.

    The latter stand for functional calls: where the part that cannot be traced holds activations, those are its rows.
    """
    rows = [EditRow(act.name, act.type, "activation", "left", act.reason) for act in sites.unmatched]
    counted = {act.reason for act in sites.unmatched}
    rows += [
        EditRow(f"after {name}", "unknown", "activation", "left", f"what follows its norm is unknown: {why}", name)
        for name, why in sites.uncovered.items()
        if name in converted and why not in counted
    ]
    return rows
