"""Names of `retrofit.compare` and `retrofit.inputs` for those that still take them from here."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from retrofit.compare import Comparison as CheckResult
from retrofit.compare import Reference, largest_gap, scale_of
from retrofit.inputs import example_calls, input_shapes, is_detector, own_input_size
from retrofit.surgery.families import find_norms

__all__ = ["CheckResult", "input_shapes", "is_detector", "largest_gap", "own_input_size", "scale_of"]

BATCHES = (1, 2)


def IdentityCheck(model: nn.Module, input_size: Sequence[int] | None = None) -> Reference:  # noqa: N802
    """Run a network, to compare with it what becomes of it."""
    return Reference(model, example_calls(model, None, input_size), layers=[norm.name for norm in find_norms(model)])
