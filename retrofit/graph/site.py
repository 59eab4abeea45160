"""The records that the search for norm and activation sites hands back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from retrofit.graph.trace import Place


@dataclass(frozen=True)
class Call:
    """One call of an activation in a block's code, for `rewrite.replace_call`.

    Attributes:
        owner: Dotted name of the block, empty for the model itself.
        place: Where it stands.
        norm: For one of several norms that the call follows, as in a loop: the expression that is the norm there, and
            the norm's name in the block.
    """

    owner: str
    place: Place = field(repr=False)
    norm: tuple[str, str] | None = None


@dataclass(frozen=True)
class Activation:
    """The activation that directly follows a norm.

    Attributes:
        kind: "fused": the norm's own `.act`; "module": a child that is called at this place only, so that the child
            may be replaced; "call": one of several calls of a module, or a functional call: the block's code has to
            be rewritten.
        name: Dotted name of the module; for calls followed by `()` and the number of the call.
        type: Class name of `module`.
        owner: Dotted name of the module whose code makes the call.
        call: What `replace_call` needs, for kind "call".
        module: The activation itself; for functional calls a fresh module that does the same, not in place.
    """

    kind: Literal["fused", "module", "call"]
    name: str
    type: str
    owner: str
    call: Call | None = None
    module: nn.Module = field(default_factory=nn.Identity, compare=False, repr=False)


@dataclass(frozen=True)
class Site:
    """One place in the model's code that calls a norm.

    Attributes:
        norm: Dotted name of the norm.
        owner: Dotted name of the module whose code makes the call.
        owner_type: Its class name.
        place: Which of the places that call the norm this is.
        places: How many places call the norm.
        activation: The activation that directly follows, at most with dropouts in between, and is all that uses the
            norm's output; None if there is none.
        reason: Why there is none.
        last_before_pool: Whether the activation (the norm, if none) is the last before the final mean pooling.
        in_squeeze_excite: Whether the norm works on pooled values that go on to multiply other features.
    """

    norm: str
    owner: str
    owner_type: str
    place: int
    places: int
    activation: Activation | None
    reason: str
    last_before_pool: bool = False
    in_squeeze_excite: bool = False


@dataclass(frozen=True)
class UnmatchedActivation:
    """An activation that directly follows none of the norms asked for, and why; `name` and `type` as `Activation`'s."""

    name: str
    type: str
    reason: str


@dataclass(frozen=True)
class Sites:
    """What `find_sites` found.

    Attributes:
        sites: One entry for each place that calls one of the norms asked for.
        unmatched: The activations that follow none of them, with the reason.
        uncovered: Names of the norms asked for that no trace shows, with the reason.
        read: Names of the modules whose parameters or buffers other code reads, so that it would miss them.
        model: The model that was searched.
    """

    sites: list[Site]
    unmatched: list[UnmatchedActivation]
    uncovered: dict[str, str]
    read: frozenset[str] = frozenset()
    model: weakref.ref[nn.Module] | None = field(default=None, compare=False, repr=False)

    def describe(self, model: nn.Module) -> bool:
        """Whether `model` is the one that was searched, with the activations that it had."""
        if self.model is None or self.model() is not model:
            return False
        acts = (site.activation for site in self.sites)
        return all(act is None or act.kind == "call" or model.get_submodule(act.name) is act.module for act in acts)
