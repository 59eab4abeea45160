"""Limits on what a manifest may request: no more than its own tensors could fill.

A manifest names a network and its sizes in a few bytes; building a network of a million layers, to find that the file
holds sixty tensors, would take minutes and gigabytes. So the file's tensors bound the building.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from retrofit.errors import RetrofitError
from retrofit.utils.running import hooked

# Builders make a few tensors that they replace or drop, and modules without tensors.
_SLACK_TENSORS, _SLACK_ELEMENTS = 1_000, 10_000_000
_NUMBER = 10_000  # above any size of a network that its tensors' shapes do not show, an image's side say
_ITEMS = 100_000


class TooLargeError(RetrofitError):
    """A manifest requests a network larger than its tensors."""


def check_numbers(values: Any, tensors: Mapping[str, Tensor]) -> None:
    """Check JSON values that decide a network's size, a builder's arguments say, against the tensors of its file.

    A TooLargeError says that a number is beyond any size that these tensors show, or that there are too many values.
    """
    largest = max([_NUMBER, *(2 * size for tensor in tensors.values() for size in tensor.shape)])
    pending, seen = [values], 0
    while pending:
        value = pending.pop()
        seen += 1
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            pending += value
        if seen + len(pending) > _ITEMS or (isinstance(value, str) and len(value) > _ITEMS):
            raise TooLargeError("its manifest gives it more arguments than a network has")
        if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) > largest:
            raise TooLargeError(f"its manifest asks for {value:.6g} of something, far more than its tensors show")


@contextmanager
def bounded_by(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let builders raise TooLargeError, before they fill in values, for networks far larger than these tensors."""
    most = {"tensors": 4 * len(tensors) + _SLACK_TENSORS}
    most["modules"] = 4 * most["tensors"]
    most["elements"] = 4 * sum(tensor.numel() for tensor in tensors.values()) + _SLACK_ELEMENTS
    counts = dict.fromkeys(most, 0)

    def count(_parent: nn.Module, _name: str, child: nn.Module | Tensor | None) -> None:
        counts["tensors" if isinstance(child, Tensor) else "modules"] += 1
        counts["elements"] += child.numel() if isinstance(child, Tensor) else 0
        if any(counts[kind] > most[kind] for kind in most):
            raise TooLargeError(
                f"its manifest names a network far larger than the {len(tensors)} tensors that it holds"
            )

    with hooked(
        register(count)
        for register in (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
            hooks.register_module_module_registration_hook,
        )
    ):
        yield
