"""`retrofit.fold` and `retrofit.export_onnx`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export.folding import FoldedLayer, fold_network
from retrofit.export.onnx_model import check_opset, node_counts, to_onnx
from retrofit.export.save import write
from retrofit.export.verify import Parity, reference, sample_inputs
from retrofit.files import ensure_writable
from retrofit.library import Preprocess
from retrofit.surgery.check import own_input_size
from retrofit.surgery.execute import strength_of

SCHEMA = 1
EXACT_TOLERANCE = 1e-4
Fold = Literal["exact", "poly"]


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it was checked.

    Attributes:
        model: The network's name, if known.
        fold: "exact" or "poly".
        opset: ONNX operator set.
        output: The file.
        bytes: Its size, external data included.
        parity: ONNX Runtime against the given network in PyTorch.
        nodes: Number of nodes of each operator.
        layers: What became of each normalization layer.
    """

    model: str | None
    fold: str
    opset: int
    output: str | None
    bytes: int
    parity: Parity
    nodes: dict[str, int]
    layers: tuple[FoldedLayer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "fold": self.fold,
            "opset": self.opset,
            "output": self.output,
            "bytes": self.bytes,
            "parity": self.parity.to_dict(),
            "nodes": self.nodes,
            "layers": [asdict(layer) for layer in self.layers],
        }


def fold(model: nn.Module, fold: Fold = "exact", *, input_size: Sequence[int] | None = None) -> nn.Module:
    """Return a copy of a network for inference, its normalization layers folded: the network that is exported.

    Args:
        model: Any network, converted or not; it is not changed.
        fold: "exact", the same function to rounding.
        input_size: Shape of one sample, (C, H, W); the model's own if None.

    Returns:
        The copy, in evaluation mode and float32: for torch.compile or AOTInductor.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network does not take an input of that size.
    """
    _check_fold(fold)
    return fold_network(model, None if input_size is None else tuple(input_size)).model


def export_onnx(
    model: nn.Module,
    path: str | Path,
    fold: Fold = "exact",
    input_size: Sequence[int] | None = None,
    opset: int = 18,
    *,
    tolerance: float | None = None,
    calibrate: Sequence[Tensor] | None = None,
    dynamic_size: bool = False,
    force: bool = False,
) -> ExportReport:
    """Write a network as ONNX, folded, and checked against PyTorch; a model that fails the check is not written.

    Args:
        model: Any network of one image input, converted or not; it is not changed.
        path: The file.
        fold: "exact", the same function to rounding.
        input_size: Shape of one sample, (C, H, W); the model's own if None.
        opset: ONNX operator set, 18 to 22.
        tolerance: Largest difference of an output that passes, as a share of the largest output; 1e-4 if None.
        calibrate: Batches of preprocessed images to check on, besides seeded random input.
        dynamic_size: Whether height and width may vary, besides the batch.
        force: Whether an existing file may be replaced.

    Returns:
        The report.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network cannot be exported, the check fails, or the file cannot be written.
    """
    _check_fold(fold)
    check_opset(opset)
    tolerance = EXACT_TOLERANCE if tolerance is None else tolerance
    if not tolerance > 0:
        raise UsageError(f"tolerance must be more than 0, not {tolerance}; {EXACT_TOLERANCE:g} is usual")
    target = ensure_writable(path, force)
    size = tuple(input_size or _known(model, "preprocess", "input_size") or own_input_size(model))
    folded = fold_network(model, size)
    proto = to_onnx(folded.model, size, opset, dynamic_size, _metadata(model, fold, size))
    inputs = sample_inputs(size, calibrate)
    expected = reference(model, inputs)
    parity, length = write(proto, target, force, inputs, expected, tolerance)
    source = _known(model, "source")
    return ExportReport(
        None if source is None else source.name,
        fold,
        opset,
        str(path),
        length,
        parity,
        node_counts(proto),
        tuple(folded.layers),
    )


def _check_fold(fold: str) -> None:
    if fold not in ("exact", "poly"):
        raise UsageError(f"there is no fold {fold!r}; use exact or poly")


def _known(model: nn.Module, name: str, attribute: str | None = None) -> Any:
    """Return what the command line or `retrofit.load` noted about a network; None if nothing."""
    found = getattr(model, f"_retrofit_{name}", None)
    return found if attribute is None or found is None else getattr(found, attribute)


def _metadata(model: nn.Module, fold: str, size: Sequence[int]) -> Mapping[str, str]:
    """Return what a user of the file may need to know, each value a string or JSON."""
    plans = getattr(model, "_retrofit_plans", [])
    source, labels = _known(model, "source"), _known(model, "labels")
    preprocess: Preprocess | None = _known(model, "preprocess")
    try:
        strength = strength_of(model)
    except RetrofitError:  # the layers differ
        strength = None
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "retrofit": retrofit.__version__,
        "model": type(model).__name__ if source is None else str(source),
        "target": plans[-1].to if plans else None,
        "strength": strength,
        "fold": fold,
        "input_size": list(size),
        "labels": labels,
    }
    if preprocess is not None:
        found |= {**preprocess.to_dict(), "input_size": list(size)}
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items() if value is not None
    }
