"""What a conversion will do, before it does it: the records that report, dry run, JSON and manifest share."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
class Plan:
    """A list of decisions, one for each name of each normalization layer of a model; making one changes nothing.

    Attributes:
        to: The target, e.g. "bnn".
        layers: One row for each name of each normalization layer, in the model's order.
        options: The arguments that made the plan (`only`, `skip`, `source`, `groups`, `noise`), for the record.
    """

    to: str
    layers: tuple[LayerRow, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many rows are converted, kept and unsupported."""
        found = Counter(row.status for row in self.layers)
        return {status: found[status] for status in ("converted", "kept", "unsupported")}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; `from_dict` reads it back."""
        return {"to": self.to, "options": self.options, "layers": [row.to_dict() for row in self.layers]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Rebuild a plan from `to_dict`'s values.

        Raises:
            KeyError, TypeError: If `values` did not come from `to_dict`.
        """
        rows = tuple(LayerRow(**row) for row in values["layers"])
        return cls(to=values["to"], layers=rows, options=values["options"])


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
        plan: The plan that was executed.
        params_before: Number of parameters of the source network.
        params_after: Number of parameters now.
        strength: Strength of the converted layers; None on the meta device.
        notes: Further sentences for the user.
    """

    plan: Plan
    params_before: int
    params_after: int
    strength: float | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "to": self.plan.to,
            "layers": [
                {key: value for key, value in row.to_dict().items() if key != "options"} for row in self.plan.layers
            ],
            "counts": self.plan.counts,
            "params": {"before": self.params_before, "after": self.params_after},
            "strength": self.strength,
            "notes": list(self.notes),
        }
