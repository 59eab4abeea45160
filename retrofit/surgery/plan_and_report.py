"""What a conversion will do, before it does it: the records that report, dry run, JSON and manifest
share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from retrofit.utils.text import ROOT, aligned, printable

if TYPE_CHECKING:
    from retrofit.comparison import Comparison

Status = Literal["converted", "kept", "unsupported", "left"]

# How many reasons a sentence lists.
_REASONS = 3
# The options of a plan that say which layers are meant; the others are the target's.
_SELECTION = ("only", "skip", "source")
_FATES = {
    "kept": "(kept)",
    "unsupported": "(not supported)",
    "left": "(left)",
    "activation": "proxy-normalized",
    "convolution": "weight-standardized",
}


@dataclass(frozen=True)
class LayerRow:
    """The fate of one normalization layer, under one of the names it goes by."""

    # Dotted; empty for the root module.
    name: str
    # Class name of the source layer.
    source: str
    # Class name of the layer that replaces it; None unless `status` is "converted".
    target: str | None
    # "converted", "kept" (by a rule, or as it is what it should be already) or "unsupported".
    status: Status
    # In words for the user; empty for a plain conversion.
    reason: str = ""
    # Arguments of the target's constructor, as settled by the plan (JSON values).
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def fate(self) -> str:
        """What the layer becomes, in a word or two."""
        return _FATES.get(self.status) or str(self.target)


@dataclass(frozen=True)
class EditRow(LayerRow):
    """The fate of an activation or a convolution beside a normalization layer: "converted" or
    "left".

    Its name is that of a module, and a suffix for one of several calls or a functional one. Its
    target is the layer that it becomes part of; empty where its kind says what it becomes.
    """

    # "activation" or "convolution".
    kind: str = "activation"
    # Name of the normalization layer it belongs to, if there is one.
    norm: str = ""
    # Which of the places that call this layer it belongs to, counted from 0.
    place: int = 0

    @property
    def fate(self) -> str:
        """What it becomes, in a word or two."""
        if self.target:
            return f"part of {self.target}"
        return _FATES.get(self.status) or _FATES[self.kind]


@dataclass(frozen=True, repr=False)
class Plan:
    """A list of decisions, one for each name of each normalization layer of a model; making one
    changes nothing.
    """

    # The target, e.g. "bnn".
    to: str
    # In the order of `named_modules`, which need not be that of the calls.
    layers: tuple[LayerRow, ...]
    # The arguments that made the plan, for the record.
    options: dict[str, Any] = field(default_factory=dict)
    # Edits of activations and convolutions around the layers, for targets that touch them.
    edits: tuple[EditRow, ...] = ()
    # The module that names start from; empty for the network itself.
    part: str = ""

    @property
    def converted(self) -> list[LayerRow]:
        """The rows of the layers that are converted."""
        return [row for row in self.layers if row.status == "converted"]

    @property
    def proxied(self) -> set[tuple[str, int]]:
        """`norm` and `place` of each activation that is converted."""
        return {
            (row.norm, row.place)
            for row in self.edits
            if (row.kind, row.status) == ("activation", "converted")
        }

    @property
    def counts(self) -> dict[str, int]:
        """How many rows are converted, kept and unsupported."""
        counted = Counter(row.status for row in self.layers)
        return {status: counted[status] for status in ("converted", "kept", "unsupported")}

    @property
    def note_on_activations(self) -> str:
        """How many activations are converted, and why others are not, in a sentence; empty if all
        are.
        """
        rows = [row for row in self.edits if row.kind == "activation"]
        left = Counter(row.reason for row in rows if row.status == "left")
        if not left:
            return ""
        reasons = left.most_common(_REASONS)
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons)
        if others := left.total() - sum(count for _, count in reasons):
            why += f"; {others}: other reasons"
        return (
            f"{len(rows) - left.total()} of {len(rows)} activations are converted, "
            f"{left.total()} are left ({why})"
        )

    def alike(self) -> dict[tuple[str, str, str], list[str]]:
        """Return the names of the layers, activations and convolutions of each class, fate and
        reason.
        """
        names: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for row in (*self.layers, *self.edits):
            names[row.source, row.fate, row.reason].append(row.name or ROOT)
        return names

    def __repr__(self) -> str:
        """A small table for people, however many layers; the record is in the attributes."""
        table = [("count", "found", "becomes", "first", "why")]
        for (source, fate, reason), names in self.alike().items():
            table.append(
                (str(len(names)), source, fate, printable(names[0], 40), printable(reason, 80))
            )
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        target = f"{self.to} ({self.settings})" if self.settings else self.to
        return "\n".join([f"to {target}: {counts}", *aligned(table)])

    @property
    def settings(self) -> str:
        """The options of the target that were given, which tell one arm of an experiment from
        another; empty if none was.
        """
        settings = [
            f"{name}={value}"
            for name, value in self.options.items()
            if name not in _SELECTION and value is not None
        ]
        return ", ".join(settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; `from_dict` reads it back."""
        rows = {
            "layers": [asdict(row) for row in self.layers],
            "edits": [asdict(row) for row in self.edits],
        }
        part = {"part": self.part} if self.part else {}
        return {"to": self.to, "options": self.options, **part, **rows}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Rebuild a plan from `to_dict`'s values; raise KeyError or TypeError for others."""
        layers = tuple(LayerRow(**row) for row in values["layers"])
        return cls(
            values["to"],
            layers,
            values["options"],
            tuple(EditRow(**row) for row in values["edits"]),
            str(values.get("part", "")),
        )


@dataclass(frozen=True, repr=False)
class Report:
    """What a conversion did."""

    plan: Plan
    params_before: int
    params_after: int
    # Strength of the converted layers; None on the meta device, and where they have none.
    strength: float | None
    # Further sentences for the user.
    notes: tuple[str, ...] = ()
    # The network at strength 0 beside its source; None where nothing was compared.
    check: Comparison | None = None
    # Whether it is meant to be its source's function.
    identity: bool = True
    # Whether it answers with scores of classes alone; None where it was not run.
    classifies: bool | None = None
    # The network at its strength beside its source, where that was checked.
    change: Comparison | None = None
    # {"images", "same"}: on how many of the given images the class with the highest score stays the
    # same, at strength 1 where there is a strength; None without images, or for a network that
    # gives no scores
    agreement: dict[str, int] | None = None

    def __repr__(self) -> str:
        """A summary for people: the plan's table and what came of it."""
        growth = self.params_after - self.params_before
        lines = [
            f"parameters: {self.params_before:,} before, {self.params_after:,} after ({growth:+,})"
        ]
        if self.strength is not None:
            lines.append(f"strength: {self.strength:g}")
        if self.check is not None:
            lines.append(f"check: {self.check}")
        return "\n".join(
            [repr(self.plan), *lines, *(f"note: {printable(note)}" for note in self.notes)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        rows: dict[str, list[dict[str, Any]]] = {"layers": []}
        for row in (*self.plan.layers, *self.plan.edits):
            section = "layers"
            relation = "target"
            if isinstance(row, EditRow):
                section = f"{row.kind}s"
                relation = "norm"
            names = ("name", "source", relation, "status", "reason")
            section_rows = rows.setdefault(section, [])
            values_of_row = {name: getattr(row, name) for name in names}
            section_rows.append(values_of_row)
        values: dict[str, Any] = {
            "to": self.plan.to,
            **rows,
            "counts": self.plan.counts,
            "params": {"before": self.params_before, "after": self.params_after},
            "strength": self.strength,
            "notes": list(self.notes),
            "check": None,
        }
        if self.check is not None:
            shown = ("max_abs_diff", "scale", "tolerance", "passed")
            figures = {name: getattr(self.check, name) for name in shown}
            values["check"] = {**figures, "identity": self.identity}
        if self.agreement is not None:
            values["agreement"] = self.agreement
        if self.change is not None:
            values["change"] = {
                "max_abs_diff": self.change.max_abs_diff,
                "scale": self.change.scale,
            }
        return values
