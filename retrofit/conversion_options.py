"""The targets of a conversion and its options, each in one place: its name, values, range, help,
and whose it is.

From here come the keywords of `retrofit.plan` and `retrofit.convert`, the flags of the command line
and the record in a plan. Importing this imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from retrofit.errors import UsageError

if TYPE_CHECKING:
    from retrofit.layers.normality_norm import NoiseKind

Function = TypeVar("Function", bound=Callable[..., Any])

_NORMALITY = ("bnn", "lnn", "gnn", "inn", "normal", "dbnn")
_MIGRATED = ("ln", "gn", "ln-pn", "gn-pn")

FAMILIES = {
    "bn": "BatchNorm",
    "ln": "LayerNorm",
    "gn": "GroupNorm",
    "in": "InstanceNorm",
    "frozen-bn": "frozen BatchNorm",
}

CONVERTERS = {
    "frozen": "frozen",
    **dict.fromkeys(_MIGRATED, "batch_independent"),
    **dict.fromkeys((*_NORMALITY, "dbn"), "normality"),
    **dict.fromkeys(("evonorm-s0", "frn-tlu"), "baselines"),
}
"""Every target, in the order in which they are listed, and the file of its converter in
`retrofit/surgery/targets/`.
"""


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its name and type."""

    # int, float, bool, str, or "batches" (images; a folder on the command line)
    kind: Any
    # those that it means something to
    targets: tuple[str, ...]
    # what it does; names its default
    help: str
    # taken instead of a number, or all that a str may be
    words: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    # of a bool: it can only be turned on
    switch: bool = False

    def problem(self, value: Any) -> str:
        """Return what is wrong with a value, after "NAME must be"; empty if nothing is."""
        if isinstance(value, str) or self.kind is str:
            taken = (
                f"one of {', '.join(self.words)}"
                if self.kind is str
                else " or ".join(("a number", *self.words))
            )
            return "" if value in self.words else taken
        if self.kind not in (int, float):
            return ""
        if isinstance(value, bool) or not isinstance(value, (int, self.kind)):
            return "a whole number" if self.kind is int else "a number"
        if self.low <= value <= self.high and value < math.inf:
            return ""
        return (
            f"at least {self.low:g}"
            if self.high == math.inf
            else f"from {self.low:g} to {self.high:g}"
        )


def known_as(kind: Any, targets: tuple[str, ...], help: str, **rest: Any) -> Any:
    """Return a field of `ConversionOptions`, None by default; see `Option`."""
    return field(default=None, metadata={"option": Option(kind, targets, help, **rest)})


@dataclass(frozen=True)
class ConversionOptions:
    """What the caller asks of a conversion, beyond which layers it concerns. None: the target's
    default.
    """

    groups: int | Literal["auto"] | None = known_as(
        int,
        ("gn", "gn-pn", "evonorm-s0"),
        "Groups per layer: the largest divisor of its channels up to N (default: 8; evonorm-s0: 32). "
        "auto: the most that leave a layer's output nearly unchanged, measured on the `calibrate` images.",
        words=("auto",),
        low=1,
    )
    group_channels: int | None = known_as(
        int,
        ("gn", "gn-pn", "evonorm-s0"),
        "Channels per group, instead of a number of groups; must divide the channels of every layer.",
        low=1,
    )
    noise: float | Literal["paper"] | None = known_as(
        float,
        _NORMALITY,
        "Noise factor xi in training (default: 0, none; paper: 0.4, LayerNorm 1.0, for training from scratch).",
        words=("paper",),
    )
    noise_kind: NoiseKind | None = known_as(
        str,
        _NORMALITY,
        "Kind of noise (default: scaled, as in the paper).",
        words=("scaled", "unscaled", "gaussian-dropout"),
    )
    alpha: float | None = known_as(
        float,
        _NORMALITY,
        "Degree of gaussianization (default: 1, as in the paper; 0: no transform).",
        high=1,
    )
    group_size: int | None = known_as(
        int,
        ("dbn", "dbnn"),
        "Channels whitened together: the largest divisor of a layer's channels up to N (default: 16).",
        low=1,
    )
    pn_params: bool | None = known_as(
        bool,
        ("gn-pn", "ln-pn"),
        "Learn ProxyNorm's own parameters, proxy_bias and proxy_scale (default: yes, as in the paper).",
    )
    pn_restore: bool | None = known_as(
        bool,
        _MIGRATED,
        "With ProxyNorm or `ws`, keep each channel at the mean and scale that the next layer was trained for "
        "(default: yes; from scratch: no, as in the paper).",
    )
    ws: bool | None = known_as(
        bool,
        _MIGRATED,
        "Also standardize the weights of all convolutions except those in squeeze-excites and classifiers.",
        switch=True,
    )
    calibrate: Iterable[Any] | None = known_as(
        "batches",
        (*_MIGRATED, "evonorm-s0", "frn-tlu"),
        "Images to measure on for `groups` auto; convert also counts those whose predicted class is unchanged.",
    )

    def check(self, to: str) -> None:
        """Raise `UsageError` for an option that is set and means nothing to the target, or is out
        of range.
        """
        for name, known in OPTIONS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if to not in known.targets:
                own = (
                    ", ".join(f"`{other}`" for other in OPTIONS if to in OPTIONS[other].targets)
                    or "no options"
                )
                raise UsageError(
                    f"`{name}` means nothing to this target ({to}), which takes {own}; leave it out"
                )
            if problem := known.problem(value):
                raise UsageError(
                    f"`{name}` must be {problem}, not {value!r}; leave it out for the default"
                )
        if self.groups is not None and self.group_channels is not None:
            raise UsageError(
                "`groups` and `group_channels` both say how many groups a layer gets; leave one out"
            )

    def record(self) -> dict[str, Any]:
        """Return what the plan keeps of the options, as JSON values."""
        return {
            name: getattr(self, name) for name, known in OPTIONS.items() if known.kind != "batches"
        }


OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(ConversionOptions)}
"""Every option by name, in the order of the record."""


def takes_options(function: Function) -> Function:
    """Show every option in the signature and the docstring of a function that takes them as
    `**options`.
    """
    own = inspect.signature(function)
    kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    shown = [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=one.type
        )
        for one in fields(ConversionOptions)
    ]
    function.__signature__ = own.replace(parameters=[*kept, *shown])  # type: ignore[attr-defined]
    lines = [
        f"    {name} ({', '.join(known.targets)}): {known.help}" for name, known in OPTIONS.items()
    ]
    function.__doc__ = "\n".join(
        [inspect.cleandoc(function.__doc__ or ""), "", "Options, by target:", *lines]
    )
    return function
