"""Launching kernels: whether this Triton can, for how many processors, and with what options."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.torch_version import TorchVersion

from retrofit.layers.kernels.layout import Layout
from retrofit.layers.kernels.triton_plan import LaunchPlan, plan_of

# Of Triton: those before lose constants and numbers in tuples
OLDEST = "3.5"


def fault() -> str | None:
    """Say why this Triton cannot compile the kernels, or return None where it can."""
    if TorchVersion(triton.__version__) < OLDEST:
        return f"triton {triton.__version__} is older than {OLDEST}, which the kernels need"
    return None


@cache
def processors(device: torch.device) -> int:
    """Return how many programs at least keep a device busy."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_for(x: Tensor, layout: Layout) -> LaunchPlan:
    """Return how kernels go about a tensor that they can go about."""
    plan = plan_of(layout.shape, layout.dims, layout.affine, processors(x.device))
    assert plan is not None
    return plan


def launch_options(plan: LaunchPlan, registers: int | None = None) -> dict[str, int]:
    """Return what a kernel is compiled with: with at most some `registers` a thread, it gets twice
    the plan's warps.
    """
    if registers is None:
        return {"num_warps": plan.warps}
    return {"num_warps": min(8, 2 * plan.warps), "maxnreg": registers}


def launch(kernel: Any, plan: LaunchPlan, *arguments: Any, registers: int | None = None) -> None:
    """Launch a kernel over a tensor's elements; tests replace this."""
    kernel[plan.grid](*arguments, *plan.numbers, plan.tile, **launch_options(plan, registers))


def launch_on(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Launch a kernel that goes over no tensor of elements."""
    kernel[grid](*arguments)


def room(x: Tensor, *shape: int) -> Tensor:
    """Return room for numbers beside a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=x.device)
