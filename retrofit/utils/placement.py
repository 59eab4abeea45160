"""Where a network lies, and in which precision it runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from retrofit.errors import UsageError
from retrofit.utils.text import one_line


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's first tensor; the CPU for a network without any."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def placement_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype that a network's input should have: `batch.to(*placement_of(model))`."""
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return device_of(model), next(dtypes, torch.float32)


def device_named(name: str | None) -> torch.device:
    """Return a device to run on, by default a GPU if there is one; a UsageError says that there is no such device."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except Exception as error:  # torch raises RuntimeError, AssertionError, NotImplementedError, ...
        why = one_line(error).rstrip(".")
        raise UsageError(f"cannot use `device={name!r}` ({why}); leave it out or use cpu") from error


def mixed_precision(device: torch.device, amp: bool, amp_dtype: str | None) -> torch.dtype | None:
    """Return the data type of mixed precision, by default bfloat16 on a CPU and else float16; None for none.

    A data type without `amp` is a UsageError.
    """
    if amp_dtype is not None and not amp:
        raise UsageError("`amp_dtype` chooses the data type of mixed precision; give `amp` too")
    half = amp_dtype or ("bfloat16" if device.type == "cpu" else "float16")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[half] if amp else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Run what follows in mixed precision; as it is if `dtype` is None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
