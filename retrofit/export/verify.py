"""Is the ONNX model the function that the given network is? ONNX Runtime against PyTorch, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.errors import RetrofitError
from retrofit.export.onnx_model import INPUT
from retrofit.modes import evaluating

BATCHES = (1, 3)


@dataclass(frozen=True)
class Parity:
    """How far the ONNX model is from the network.

    Attributes:
        batches: Sizes of the batches compared.
        max_abs_diff: Largest absolute difference of an output; inf where NaN or infinity is on one side only.
        scale: Largest absolute output of the network.
        top1_agreement: Share of the samples with the same highest output; None for outputs that are no scores.
        tolerance: Largest share of `scale` that passes.
    """

    batches: tuple[int, ...]
    max_abs_diff: float
    scale: float
    top1_agreement: float | None
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; outputs without a finite value but 0 prove nothing."""
        return self.scale > 0 and self.max_abs_diff <= self.tolerance * self.scale

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "batches": list(self.batches),
            "max_abs_diff": self.max_abs_diff,
            "scale": self.scale,
            "top1_agreement": self.top1_agreement,
            "tolerance": self.tolerance,
            "passed": self.passed,
        }


@dataclass(frozen=True)
class Check:
    """What a model has to answer: batches, the answers for each, and the largest share of their scale to be off by."""

    inputs: Sequence[Tensor]
    expected: Sequence[Sequence[Tensor]]
    tolerance: float


def sample_inputs(size: Sequence[int]) -> list[Tensor]:
    """Return seeded random batches of 1 and 3 samples."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, *size, generator=generator) for n in BATCHES]


def reference(model: nn.Module, inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors that a network gives for each input, in evaluation; the network is left as it was."""
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    with evaluating(model):
        answers = [model(batch.to(first.device, first.dtype)) for batch in inputs]
    return [[leaf.float().cpu() for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)] for answer in answers]


def check_model(model: onnx.ModelProto | Path) -> None:
    """Run ONNX's own checker, with shape inference.

    Raises:
        RetrofitError: If it complains.
    """
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RetrofitError(f"the exported model is not valid ONNX ({reason}); please report it") from error


def runner(model: bytes | Path) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that runs a model with ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    content = str(model) if isinstance(model, Path) else model
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda x: [torch.from_numpy(array) for array in session.run(None, {INPUT: x.float().numpy()})]


def compare(run: Callable[[Tensor], list[Tensor]], check: Check) -> Parity:
    """Compare a model's answers with those expected.

    Args:
        run: The model.
        check: The batches and the answers.

    Returns:
        The comparison over all outputs of all batches.
    """
    worst, scale = 0.0, 0.0
    same, scored = 0, 0
    for batch, ours in zip(check.inputs, check.expected, strict=True):
        theirs = run(batch)
        if [t.shape for t in theirs] != [t.shape for t in ours]:
            worst = float("inf")
            continue
        for a, b in zip(ours, theirs, strict=True):
            finite = a[a.isfinite()]
            scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
            gap = (a.double() - b.double())[(a != b) & ~(a.isnan() & b.isnan())].abs()
            worst = max(worst, float(gap.nan_to_num(float("inf")).max()) if gap.numel() else 0.0)
        if ours[0].ndim == 2:
            same += int((ours[0].argmax(1) == theirs[0].argmax(1)).sum())
            scored += len(batch)
    agreement = same / scored if scored else None
    return Parity(tuple(len(batch) for batch in check.inputs), worst, scale, agreement, check.tolerance)
