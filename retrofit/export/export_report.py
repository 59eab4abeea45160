"""What export wrote, how it was checked, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from retrofit.export.folding.network import FoldedLayer
from retrofit.export.onnx.precision import Precision
from retrofit.export.parity import Parity

SCHEMA = 1


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it was checked.

    Attributes:
        model: The network's name, if known.
        target: What it was converted to last; None if it was not.
        strength: Of its converted layers; None where there are none, or they differ.
        weights: Where they are from, if known.
        fold: "exact" or "poly".
        precision: "float32", "float16" or "int8".
        opset: ONNX operator set.
        output: The file.
        bytes: Its size, external data included.
        parity: ONNX Runtime against the given network in PyTorch, in its own precision.
        judged_on: What the samples of `parity` are: "random inputs", "images" or "random inputs and images".
        nodes: Number of nodes of each operator.
        preprocess: How to make the network's input of an image, as in the file's metadata; None if unknown.
        labels: How many names of outputs the file's metadata hold; None if they are unknown.
        layers: What became of each normalization layer.
    """

    model: str | None
    target: str | None
    strength: float | None
    weights: Mapping[str, Any] | None
    fold: str
    precision: Precision
    opset: int
    output: str
    bytes: int
    parity: Parity
    judged_on: str
    nodes: dict[str, int]
    preprocess: Mapping[str, Any] | None
    labels: int | None
    layers: tuple[FoldedLayer, ...]

    @property
    def judged(self) -> str:
        """How many samples of what the file was compared on."""
        return f"{sum(self.parity.batches)} {self.judged_on}"

    @property
    def guessed(self) -> bool:
        """Whether something is approximated, and no picture was there to judge it on."""
        return self.judged_on == "random inputs" and any(layer.max_error is not None for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"schema": SCHEMA, **{name: _json_value(value) for name, value in vars(self).items()}}


def _json_value(value: Any) -> Any:
    if isinstance(value, Parity):
        return value.to_dict()
    return [asdict(layer) for layer in value] if isinstance(value, tuple) else value
