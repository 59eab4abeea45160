"""The report of an exported file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrofit.comparison import Comparison
from retrofit.errors import UsageError
from retrofit.export.request import Precision
from retrofit.utils.files import ensure_writable

SCHEMA = 1


@dataclass(frozen=True)
class FoldedLayer:
    """What became of one layer; errors are shares of the standard deviation of its output.

    Its form is "folded" (nothing is left), "affine", "two branches", "polynomial", "normalization"
    (of its source's kind), "group", "group convolution" (of size 1, a whitening), "estimated" or
    "frozen"; "kept" where its forward is somebody's own.
    """

    # In the given network
    name: str
    form: str
    # Of the polynomial
    degree: int | None = None
    # Of the approximation, on the values fitted
    max_error: float | None = None
    rms_error: float | None = None

    @property
    def form_label(self) -> str:
        """Its form, with the degree of a polynomial."""
        if self.degree is None:
            return self.form
        return f"{self.form} of degree {self.degree}"


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it was checked."""

    # The network's name, if known
    model: str | None
    # What it was converted to last; None if it was not
    target: str | None
    # Of its converted layers; None where there are none, or they differ
    strength: float | None
    # Where they are from, if known
    weights: Mapping[str, Any] | None
    # "exact" or "poly"
    fold: str
    precision: Precision
    opset: int
    # The file
    output: str
    # Its size, external data included
    bytes: int
    # The file in ONNX Runtime, in the file's precision, against the given network in float32
    parity: Comparison
    # Samples of `parity`: "random inputs", "given inputs", "images" or "... and images"
    judged_on: str
    # Number of nodes of each operator
    nodes: dict[str, int]
    # How to make the network's input of an image, as the file's metadata say
    preprocess: Mapping[str, Any] | None
    # How many names of outputs the file's metadata hold; None if they are unknown
    labels: int | None
    # What became of each normalization layer
    layers: tuple[FoldedLayer, ...]

    @property
    def judged(self) -> str:
        """How many samples of what the file was compared on."""
        return f"{sum(self.parity.batches)} {self.judged_on}"

    @property
    def guessed(self) -> bool:
        """Whether something is approximated, and no image was there to judge it on."""
        is_approximate = any(layer.max_error is not None for layer in self.layers)
        return is_approximate and self.judged_on == "random inputs"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        layers = [asdict(layer) for layer in self.layers]
        return {"schema": SCHEMA, **vars(self), "parity": self.parity.to_dict(), "layers": layers}


def check_report(path: str | Path, output: str | Path, force: bool = False) -> None:
    """Check, before any long work, that a report of the file `output` may be written at `path`.

    Raises:
        UsageError: If it is no .json file, or the exported file itself.
        RetrofitError: If no file may be written there.
    """
    if Path(path).suffix != ".json":
        raise UsageError(
            f"a report is a .json file, not {path}; give `report` a name that ends in .json"
        )
    if ensure_writable(path, force) == ensure_writable(output, force):
        raise UsageError(f"{path} is the exported file itself; give `report` another name")
