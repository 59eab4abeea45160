"""The registry of targets: what `to=` may name, and the converter behind each name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrofit.errors import UsageError
from retrofit.layers.core import NoiseKind
from retrofit.layers.whitening import Whitening
from retrofit.surgery.census import Found
from retrofit.surgery.records import EditRow, LayerRow, Plan, Status

NORMALITY = ("noise", "noise_kind", "alpha", "newton_steps")
"""The options that mean something to normality normalization alone."""
DECORRELATED = ("group_size", "whitening")
"""The options that mean something to decorrelated normalization alone."""


@dataclass(frozen=True)
class Options:
    """What the caller asks of a conversion, beyond which layers it concerns; see `plan`. None: the target's default."""

    groups: int | Literal["auto"] | None = None
    noise: float | None = None
    noise_kind: NoiseKind | None = None
    alpha: float | None = None
    newton_steps: int | None = None
    group_size: int | None = None
    whitening: Whitening | None = None
    pn_params: bool | None = None
    pn_restore: bool | None = None
    ws: bool | None = None
    calibrate: Iterable[Tensor] | None = None

    def refuse(self, target: str, *names: str) -> None:
        """Raise `UsageError` for each of the named options that is set, since it means nothing to the target."""
        for name in names:
            if getattr(self, name) is not None:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} means nothing to this target ({target}); leave it out")


@dataclass(frozen=True)
class Decision:
    """What becomes of one layer, and why."""

    status: Status
    target: str | None = None
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Converter(ABC):
    """Takes normalization layers of some families to their counterparts under one or more targets.

    Attributes:
        sources: The families it converts when the caller names none.
        identity: Whether its layers have a strength, at 0 of which the network is its source's function in evaluation.
    """

    sources: frozenset[str]
    identity: bool = True

    def prepare(self, model: nn.Module, found: list[Found], options: Options) -> None:  # noqa: B027
        """Check the options and look at the whole model, before layers are decided one by one; may raise errors."""

    @abstractmethod
    def decide(self, found: Found, options: Options) -> Decision:
        """Decide the fate of one layer that the caller's rules let through. Changes nothing."""

    def edits(self, model: nn.Module, rows: list[LayerRow], options: Options) -> tuple[EditRow, ...]:
        """Decide, the layers being decided, what becomes of what lies around them. Changes nothing."""
        return ()

    def begin(self, model: nn.Module, plan: Plan) -> None:  # noqa: B027
        """Look at the model that `plan` is about to change."""

    @abstractmethod
    def build(self, module: nn.Module, row: LayerRow, device: torch.device) -> nn.Module:
        """Return the counterpart of `module`, holding its tensors (moved, not copied), as `row` says."""

    def finish(self, model: nn.Module, plan: Plan) -> tuple[str, ...]:
        """Edit what lies around the layers, which are converted by now; return notes for the report."""
        return ()


@dataclass(frozen=True)
class Target:
    """A name that `to=` takes."""

    name: str
    description: str
    converter: type[Converter]
    arguments: Mapping[str, Any] = field(default_factory=dict)


TARGETS: dict[str, Target] = {}


def register(name: str, description: str, converter: type[Converter], **arguments: Any) -> None:
    """Make `converter(**arguments)` the converter of target `name`."""
    TARGETS[name] = Target(name, description, converter, arguments)


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
    lacks stays as built.
    """
    for store in ("_parameters", "_buffers", "_modules"):
        getattr(new, store).update(getattr(old, store))
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set
    hooks = {key for key in vars(old) if "_hooks" in key}
    for key, value in vars(old).items():
        if key in hooks or key not in vars(new):
            vars(new)[key] = value
    new.training = old.training
    return new
