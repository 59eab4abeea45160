"""What a conversion will do, before it does it: the records that report, dry run, JSON and manifest share."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from retrofit.graph.sites import Sites
from retrofit.surgery import report_table

if TYPE_CHECKING:
    from retrofit.compare import Comparison

Status = Literal["converted", "kept", "unsupported"]


@dataclass(frozen=True)
class LayerRow:
    """The fate of one normalization layer, under one of the names it goes by.

    Attributes:
        name: Dotted module name; empty for the root module.
        source: Class name of the layer as found.
        target: Class name of the layer that replaces it, None unless `status` is "converted".
        status: "converted", "kept" (by a rule) or "unsupported".
        reason: Why, in words for the user; empty for a plain conversion.
        options: Constructor options of the target that the plan has settled for this layer (JSON values).
    """

    name: str
    source: str
    target: str | None
    status: Status
    reason: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class EditRow:
    """The fate of an activation or a convolution beside a normalization layer.

    Attributes:
        name: Dotted module name; for one of several calls, or a functional one, followed by what tells it apart.
        source: Class name as found.
        kind: "activation" or "convolution".
        status: "converted" or "left".
        reason: Why it is left; empty for a plain conversion.
        norm: Name of the normalization layer it belongs to; empty if there is none.
        place: Which of the places that call that layer it belongs to.
        options: What the plan has settled for it (JSON values).
        target: Class name of the layer that it becomes part of; empty where its kind says what it becomes.
    """

    name: str
    source: str
    kind: Literal["activation", "convolution"]
    status: Literal["converted", "left"]
    reason: str = ""
    norm: str = ""
    place: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    target: str = ""


@dataclass(frozen=True, repr=False)
class Plan:
    """A list of decisions, one for each name of each normalization layer of a model; making one changes nothing.

    Attributes:
        to: The target, e.g. "bnn".
        layers: One row for each name of each normalization layer, in the model's order.
        options: The arguments that made the plan, for the record.
        edits: What becomes of the activations and convolutions around the layers, for the targets that touch them.
        sites: Where those are in the model that the plan was made for; None where that is not known.
    """

    to: str
    layers: tuple[LayerRow, ...]
    options: dict[str, Any] = field(default_factory=dict)
    edits: tuple[EditRow, ...] = ()
    sites: Sites | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not of the model that the plan was made for."""
        return {**vars(self), "sites": None}

    @property
    def counts(self) -> dict[str, int]:
        """How many rows are converted, kept and unsupported."""
        found = Counter(row.status for row in self.layers)
        return {status: found[status] for status in ("converted", "kept", "unsupported")}

    def __repr__(self) -> str:
        """A small table for people; the record is in the attributes."""
        return report_table.plan_text(self)

    def _repr_html_(self) -> str:
        return report_table.plan_html(self)

    @property
    def activations(self) -> str:
        """How many activations are converted, and why others are not, in a sentence; empty if none are concerned."""
        rows = [row for row in self.edits if row.kind == "activation"]
        left = Counter(row.reason for row in rows if row.status == "left")
        if not left:
            return ""
        why = "; ".join(f"{count}: {reason}" for reason, count in left.most_common())
        return f"{len(rows) - left.total()} of {len(rows)} activations are converted, {left.total()} are left ({why})"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; `from_dict` reads it back."""
        return {
            "to": self.to,
            "options": self.options,
            "layers": [row.to_dict() for row in self.layers],
            "edits": [asdict(row) for row in self.edits],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Rebuild a plan from `to_dict`'s values.

        Raises:
            KeyError, TypeError: If `values` did not come from `to_dict`.
        """
        layers = tuple(LayerRow(**row) for row in values["layers"])
        edits = tuple(EditRow(**row) for row in values["edits"])
        return cls(to=values["to"], layers=layers, options=values["options"], edits=edits)


@dataclass(frozen=True, repr=False)
class Report:
    """What a conversion did.

    Attributes:
        plan: The plan that was executed.
        params_before: Number of parameters of the source network.
        params_after: Number of parameters now.
        strength: Strength that the converted layers were seeded at; None on the meta device, and where they have none.
        notes: Further sentences for the user.
        check: How the network compares with its source; None where nothing was compared.
        identity: Whether it is meant to be its source's function.
        classifies: Whether the network answers with scores of classes alone; None where it was not run.
        change: How the network at its strength compares with its source, where that was checked.
        agreement: {"images", "same"}: on how many of the given images the class with the highest score stays the same,
            at strength 1 where there is a strength; None without images, or for a network that gives no scores.
    """

    plan: Plan
    params_before: int
    params_after: int
    strength: float | None
    notes: tuple[str, ...] = ()
    check: Comparison | None = None
    identity: bool = True
    classifies: bool | None = None
    change: Comparison | None = None
    agreement: dict[str, int] | None = None

    def __repr__(self) -> str:
        """A summary for people; the record is in the attributes."""
        return report_table.report_text(self)

    def _repr_html_(self) -> str:
        return report_table.report_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        edits = {
            f"{kind}s": [
                {"name": row.name, "source": row.source, "norm": row.norm, "status": row.status, "reason": row.reason}
                for row in self.plan.edits
                if row.kind == kind
            ]
            for kind in dict.fromkeys(row.kind for row in self.plan.edits)
        }
        check, change = self.check, self.change
        measured: dict[str, Any] = {} if self.agreement is None else {"agreement": self.agreement}
        if change is not None:
            measured["change"] = {"max_abs_diff": change.max_abs_diff, "scale": change.scale}
        names = ("max_abs_diff", "scale", "tolerance", "passed")
        figures = (
            None if check is None else {**{name: check.to_dict()[name] for name in names}, "identity": self.identity}
        )
        return {
            "to": self.plan.to,
            "layers": [
                {key: value for key, value in row.to_dict().items() if key != "options"} for row in self.plan.layers
            ],
            **edits,
            "counts": self.plan.counts,
            "params": {"before": self.params_before, "after": self.params_after},
            "strength": self.strength,
            "notes": list(self.notes),
            "check": figures,
            **measured,
        }
