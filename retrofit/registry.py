"""The registry of targets: what a conversion can make of normalization layers, and its options.

From here come the names that `--to` takes, its help and completion, the keywords and flags of the
options, and the converters. Importing this imports no torch, so that `--help` answers at once:
a registration may name its converter by a string, which is imported when it is first used.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from itertools import groupby
from typing import Any

from retrofit.errors import UsageError
from retrofit.utils.text import one_line

FAMILIES = {
    "bn": "BatchNorm",
    "ln": "LayerNorm",
    "gn": "GroupNorm",
    "in": "InstanceNorm",
    "frozen-bn": "frozen BatchNorm",
}
"""Families of normalization layers, and what people call them."""

ENTRY_POINTS = "retrofit.targets"
"""The group of entry points by which an installed package has its targets registered."""


@dataclass(frozen=True)
class Option:
    """What is known of an option of a conversion beside its name.

    Attributes:
        kind: int, float, bool, str, or "batches" (images; a folder on the command line).
        help: What it does; names its default.
        words: Taken instead of a number, or all that a str may be.
        low: The least number.
        high: The largest number.
        switch: Whether a bool can only be turned on.
    """

    kind: Any
    help: str
    words: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    switch: bool = False

    def problem(self, value: Any) -> str:
        """Return what a value must be; empty if it is."""
        if value in self.words or self.kind not in (int, float, str):
            return ""
        if self.kind is str:
            return f"one of {', '.join(self.words)}"
        is_number = isinstance(value, (int, self.kind)) and not isinstance(value, bool)
        if is_number and self.low <= value <= self.high and value < math.inf:
            return ""
        number = "a whole number" if self.kind is int else "a number"
        limits = f"of at least {self.low:g}"
        if self.high < math.inf:
            limits = f"from {self.low:g} to {self.high:g}"
        return " or ".join([f"{number} {limits}", *self.words])


@dataclass(frozen=True)
class Target:
    """A registered target; see `register_target`."""

    name: str
    families: tuple[str, ...]
    converter: Any
    layers: tuple[type | str, ...]
    options: Mapping[str, Option] = field(default_factory=dict)
    help: str = ""

    def load_converter(self) -> Any:
        """Return the converter, imported if it is named by a string."""
        return _loaded(self.converter)

    def load_layers(self) -> list[type]:
        """Return the classes of its layers, imported where they are named by strings."""
        return [_loaded(layer) for layer in self.layers]


def _loaded(reference: Any) -> Any:
    """Return what "package.module:NAME" names, and anything else as it is."""
    if not isinstance(reference, str):
        return reference
    file, _, name = reference.partition(":")
    return getattr(import_module(file), name)


TARGETS: dict[str, Target] = {}
"""Every target by name, in the order in which they are listed."""

OPTIONS: dict[str, Option] = {}
"""Every option of any target by name, in the order of the record."""


def register_target(
    name: str,
    *,
    families: Sequence[str],
    converter: Any,
    layers: Sequence[type | str] = (),
    options: Mapping[str, Option] | None = None,
    help: str = "",
) -> Target:
    """Add a target, which `plan`, `convert` and every command then take as they take the built-in
    ones.

    A package has its targets registered for the command line, and for `retrofit.load`, by an entry
    point of the group `retrofit.targets` that names the module whose import registers them.

    Args:
        name: What `to` and `--to` take, such as "ln-pn".
        families: Families of layers that it converts, keys of `FAMILIES`.
        converter: A `retrofit.surgery.Converter`; or "package.module:NAME" of one, imported when it
            is first used.
        layers: The classes of its layers, or "package.module:NAME" of each.
        options: Its options by name. Targets may share an option; it is then the same for all.
        help: A few words for the list of targets, such as "per-image statistics".

    Returns:
        The registered target.

    Raises:
        UsageError: If the name is taken, a family is unknown, or another target has another option
            of one of the names.
    """
    if name in TARGETS:
        raise UsageError(f"target {name!r} is registered already; choose another name")
    for family in families:
        if family not in FAMILIES:
            raise UsageError(f"{family!r} is no family; choose from {', '.join(FAMILIES)}")
    options = dict(options or {})
    for option, known in options.items():
        if OPTIONS.get(option, known) != known:
            raise UsageError(
                f"option {option!r} of target {name!r} differs from that of another target; choose "
                "another name for it"
            )
    target = Target(name, tuple(families), converter, tuple(layers), options, help)
    OPTIONS.update(options)
    TARGETS[name] = target
    return target


def targets_of(option: str) -> tuple[str, ...]:
    """Return the names of the targets that an option means something to."""
    return tuple(name for name, target in TARGETS.items() if option in target.options)


@cache
def load_plugins() -> None:
    """Import what installed packages name as entry points, once a process; warn of those that
    fail.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        # Another package's code may raise anything.
        except Exception as error:
            warnings.warn(
                f"no targets of {point.value}: {one_line(error)}; mend or uninstall that package",
                stacklevel=2,
            )


def target_named(name: str) -> Target:
    """Return a target.

    Raises:
        UsageError: If none of that name is registered, by an installed package either.
    """
    if name not in TARGETS:
        load_plugins()
    if name not in TARGETS:
        raise UsageError(
            f"unknown target {name!r}; choose one of {', '.join(TARGETS)}, or import the package "
            "that registers it"
        )
    return TARGETS[name]


def listed_targets() -> str:
    """Return the targets with their help, for people: "ln, gn (per-image statistics); ..."."""
    parts = []
    for help, targets in groupby(TARGETS.values(), key=lambda target: target.help):
        names = ", ".join(target.name for target in targets)
        parts.append(f"{names} ({help})" if help else names)
    return "; ".join(parts)


def layer_named(name: str) -> type | None:
    """Return the layer class of that name of any target; None if there is none."""
    for target in TARGETS.values():
        for layer in target.layers:
            known_as = layer.partition(":")[2] if isinstance(layer, str) else layer.__name__
            if known_as == name:
                cls: type = _loaded(layer)
                return cls
    return None
