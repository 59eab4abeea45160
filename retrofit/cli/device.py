"""Where a command runs, and with which precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.errors import UsageError
from retrofit.utils.text import one_line

if TYPE_CHECKING:
    import torch


def chosen_device(name: str | None) -> torch.device:
    """Return the device to run on: by default a GPU if there is one.

    Raises:
        UsageError: If there is no such device.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # torch raises RuntimeError, AssertionError, NotImplementedError, ...
        raise UsageError(
            f"cannot use --device {name} ({one_line(error).rstrip('.')}); leave it out or use cpu"
        ) from error
    return device


def precision_of(device: torch.device, amp: bool, name: str | None) -> torch.dtype | None:
    """Return the data type of mixed precision; None for none.

    Raises:
        UsageError: If a data type is given without --amp.
    """
    import torch

    if name is not None and not amp:
        raise UsageError("--amp-dtype chooses the data type of mixed precision; give --amp too")
    if not amp:
        return None
    return (
        torch.bfloat16 if (name or ("bfloat16" if device.type == "cpu" else "float16")) == "bfloat16" else torch.float16
    )
