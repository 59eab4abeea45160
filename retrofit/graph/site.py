"""What the search for norm and activation sites hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn


@dataclass(frozen=True)
class Call:
    """One call of an activation in a block's code, for `rewrite.replace_call`.

    Attributes:
        owner: Dotted name of the block, empty for the model itself.
        method: The block's method that makes the call; "forward" unless it has a method of its own that runs once.
        op: fx's word for the call: "call_module", "call_function" or "call_method".
        target: The called child's name within the block, the function, or the tensor method's name.
        given: The optional arguments that the model passes to the method.
        eval: Which of the method's calls of `target` this is, and how many there are, in eval mode; None if there the
            call is not made.
        train: The same in train mode.
    """

    owner: str
    method: str
    op: str
    target: Any
    given: tuple[str, ...] = ()
    eval: tuple[int, int] | None = None
    train: tuple[int, int] | None = None


@dataclass(frozen=True)
class Activation:
    """The activation that directly follows a norm.

    Attributes:
        kind: "fused": the norm's own `.act`; "module": a child that is called at this place only, so that the child
            may be replaced; "call": one of several calls of a module, or a functional call: the block's code has to
            be rewritten.
        name: Dotted name of the module; for calls followed by `()` and the number of the call.
        type: Class name of `module`.
        owner: Dotted name of the module whose forward makes the call.
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
        owner: Dotted name of the module whose forward makes the call.
        owner_type: Its class name.
        place: Which of the places that call the norm this is.
        places: How many places call the norm.
        feeder: Dotted name of the convolution or linear layer whose output goes to this norm only, so that an affine
            map of the norm's input folds into it; None if there is no such layer.
        feeder_reason: Why there is none.
        activation: The activation that directly follows, at most with dropouts in between, and is all that uses the
            norm's output; None if there is none.
        reason: Why there is none.
        norm_consumer: Dotted name of the convolution or linear layer that alone takes what the norm puts out, at most
            with dropouts in between, so that an affine map of it folds into that layer as far as padding allows; None
            if there is no such layer: where an activation follows, there never is.
        norm_consumer_reason: Why there is none.
        activation_consumer: The same for what the activation puts out.
        activation_consumer_reason: Why there is none.
        last_before_pool: Whether the activation (the norm, if none) is the last before the final mean pooling.
        in_squeeze_excite: Whether the norm works on pooled values that go on to multiply other features.
        modes: "both", or the only mode in which the call is made.
    """

    norm: str
    owner: str
    owner_type: str
    place: int
    places: int
    feeder: str | None
    feeder_reason: str
    activation: Activation | None
    reason: str
    norm_consumer: str | None = None
    norm_consumer_reason: str = ""
    activation_consumer: str | None = None
    activation_consumer_reason: str = ""
    last_before_pool: bool = False
    in_squeeze_excite: bool = False
    modes: Literal["both", "eval", "train"] = "both"


@dataclass(frozen=True)
class Left:
    """An activation that follows none of the norms asked for directly.

    Attributes:
        name: As `Activation.name`.
        type: As `Activation.type`.
        reason: Why it is left alone.
    """

    name: str
    type: str
    reason: str


@dataclass(frozen=True)
class Sites:
    """What `find_sites` found.

    Attributes:
        sites: One entry for each place that calls one of the norms asked for.
        left: The activations that follow none of them, with the reason.
        uncovered: Names of the norms asked for that no trace shows, with the reason.
        read: Names of the modules whose parameters or buffers other code reads, so that it would miss them.
    """

    sites: list[Site]
    left: list[Left]
    uncovered: dict[str, str]
    read: frozenset[str] = frozenset()
