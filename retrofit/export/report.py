"""What export wrote and how it was checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrofit.compare import Comparison
from retrofit.errors import UsageError
from retrofit.export.request import Precision
from retrofit.utils.files import ensure_writable

SCHEMA = 1


@dataclass(frozen=True)
class FoldedLayer:
    """What became of one layer.

    Attributes:
        name: Its name in the given network.
        form: "folded" (nothing is left), "affine", "one branch", "two branches", "polynomial", "lines",
            "normalization" (of its source's kind), "group", "group convolution" (of size 1, a whitening), "estimated"
            or "frozen"; "kept" where its forward is somebody's own.
        degree: Of the polynomial, or the number of lines.
        max_error: Largest error of the approximation on the values fitted, as a share of the standard deviation of the
            layer's output.
        rms_error: Root mean square of the same.
    """

    name: str
    form: str
    degree: int | None = None
    max_error: float | None = None
    rms_error: float | None = None

    @property
    def kind(self) -> str:
        """Its form, with the degree of a polynomial or the number of lines."""
        degree = "" if self.degree is None else f" of degree {self.degree}"
        return f"{self.degree} lines" if self.form == "lines" else f"{self.form}{degree}"


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
        judged_on: What the samples of `parity` are: "random inputs", "given inputs", "images" or "... and images".
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
    parity: Comparison
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
        layers = [asdict(layer) for layer in self.layers]
        return {"schema": SCHEMA, **vars(self), "parity": self.parity.to_dict(), "layers": layers}


def check_report(path: str | Path, output: str | Path, force: bool = False) -> None:
    """Raise, before any long work, if a report of the file `output` may not be written at `path`."""
    if Path(path).suffix != ".json":
        raise UsageError(f"a report is a .json file, not {path}; give `report` a name that ends in .json")
    if ensure_writable(path, force) == ensure_writable(output, force):
        raise UsageError(f"{path} is the exported file itself; give `report` another name")
