"""Where a network lies, and in which precision it runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's first tensor; the CPU for a network without any."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def placement_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype that a network's input should have: `batch.to(*placement_of(model))`."""
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return device_of(model), next(dtypes, torch.float32)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Run what follows in mixed precision; as it is if `dtype` is None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
