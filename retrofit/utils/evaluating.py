"""Evaluate a network and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

Modes = list[tuple[nn.Module, bool]]
"""Each module of a network, parents first, and whether it is in training mode."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode without gradients, and every module's mode back afterwards."""
    modes = modes_of(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        restore_modes(modes)


def modes_of(model: nn.Module) -> Modes:
    """Return the mode of every module, for `restore_modes`."""
    return [(module, module.training) for module in model.modules()]


def restore_modes(modes: Modes) -> None:
    """Put modules back in their modes, through `train`: it may do more than set a flag.

    torchvision's feature extractors, for one, have a graph for each mode, and change it there.
    """
    for module, training in modes:
        if module.training != training:
            module.train(training)
