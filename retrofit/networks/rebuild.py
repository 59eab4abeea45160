"""Build the network that a manifest names, and no more than its file can hold.

A manifest names a network and its sizes in a few bytes. Building a network of a million layers, to
find that the file holds sixty tensors, would take minutes and gigabytes. So the file's tensors bound
what is built.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrofit.errors import RetrofitError
from retrofit.networks import model_sources
from retrofit.record import ModelSource
from retrofit.surgery import Plan, replay
from retrofit.utils.forward_pass import hooked

# Builders make a few tensors that they replace or drop, and modules without tensors.
_SLACK_TENSORS = 1_000
_SLACK_ELEMENTS = 10_000_000
# Above any size of a network that its tensors' shapes do not show, an image's side say.
_NUMBER = 10_000


class TooLargeError(RetrofitError):
    """A manifest requests a network larger than its tensors."""


def skeleton(source: ModelSource, plans: Iterable[Plan] = ()) -> nn.Module:
    """Build a network, converted, for its structure: without memory for its tensors, where it can
    be built so.
    """
    try:
        with torch.device("meta"):
            return replay(model_sources.build(source), plans)
    except TooLargeError:
        raise
    # Some builders compute with values; then the real ones are needed.
    except Exception:
        return rebuilt(source, plans)


def rebuilt(source: ModelSource, plans: Iterable[Plan] = ()) -> nn.Module:
    """Build a network, converted, whose tensors are about to be loaded: random values are zeros."""
    with torch.random.fork_rng(devices=[]), _NoRandomValues():
        return replay(model_sources.build(source), plans)


class _NoRandomValues(TorchDispatchMode):
    """Leaves out what fills tensors with random numbers: a fifth of a second for resnet50, seconds
    for large ones.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


@contextmanager
def bounded_by(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let builders raise TooLargeError, before they fill in values, for networks far larger than
    these tensors.
    """
    most = {"tensors": 4 * len(tensors) + _SLACK_TENSORS}
    most["modules"] = 4 * most["tensors"]
    most["elements"] = 4 * sum(tensor.numel() for tensor in tensors.values()) + _SLACK_ELEMENTS
    counts = dict.fromkeys(most, 0)

    def count(_parent: nn.Module, _name: str, child: nn.Module | Tensor | None) -> None:
        """Count what a builder registers; raise TooLargeError beyond the most."""
        if isinstance(child, Tensor):
            counts["tensors"] += 1
            counts["elements"] += child.numel()
        else:
            counts["modules"] += 1
        if any(counts[kind] > most[kind] for kind in most):
            raise TooLargeError(
                f"its manifest names a network far larger than the {len(tensors)} tensors in the "
                "file"
            )

    registrations = (
        hooks.register_module_parameter_registration_hook,
        hooks.register_module_buffer_registration_hook,
        hooks.register_module_module_registration_hook,
    )
    with hooked(register(count) for register in registrations):
        yield


def check_numbers(values: Any, tensors: Mapping[str, Tensor]) -> None:
    """Check JSON values that decide a network's size, a builder's arguments say, against the
    tensors of its file.

    Raises:
        TooLargeError: If a number is beyond any size that these tensors show.
    """
    sizes = [size for tensor in tensors.values() for size in tensor.shape]
    largest = max(_NUMBER, 2 * max(sizes, default=0))
    for leaf in tree_leaves(values):
        if isinstance(leaf, int | float) and largest < abs(leaf) < math.inf:
            raise TooLargeError(
                f"its manifest asks for {leaf:.6g} of something, far more than its tensors show"
            )
