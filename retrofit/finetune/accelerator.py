"""The processes and the device of a run, through accelerate."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from retrofit.errors import UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.utils.text import one_line


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Set up the run that `torchrun` or `accelerate launch` started.

    Raises:
        UsageError: If a device or tracker is missing, the device has no such mixed precision, or
            the process has had another.
    """
    _refuse_missing_trackers(recipe.log_with)
    on_cpu = _runs_on_cpu(recipe.device)
    precision = _mixed_precision(recipe, on_cpu)
    try:
        return Accelerator(
            cpu=on_cpu,
            mixed_precision=precision,
            gradient_accumulation_steps=recipe.grad_accum_steps,
            log_with=recipe.log_with or None,
            project_dir=str(folder),
        )
    # accelerate holds these for all of a process.
    except ValueError as error:
        raise UsageError(
            "an earlier run in this process had another device or mixed precision "
            f"({one_line(error)}); start a new process"
        ) from error


def _runs_on_cpu(device: str | None) -> bool:
    """Tell whether a run with this `device` setting runs on a CPU."""
    if device == "cpu":
        return True
    present = None
    if torch.accelerator.is_available():
        present = torch.accelerator.current_accelerator()
    if device is None:
        return present is None
    if present is None or device != present.type:
        raise UsageError(
            f"cannot use `device={device!r}`, which is not here; leave it out or use cpu"
        )
    return False


def _mixed_precision(recipe: Recipe, on_cpu: bool) -> str:
    """Return accelerate's word for the data type of mixed precision."""
    if not recipe.amp:
        return "no"
    if on_cpu and recipe.amp_dtype == "float16":
        raise UsageError("mixed precision on a CPU is bfloat16's; drop `amp_dtype='float16'`")
    if recipe.amp_dtype == "bfloat16" or on_cpu:
        return "bf16"
    return "fp16"


def _refuse_missing_trackers(names: list[str]) -> None:
    present = [str(name) for name in get_available_trackers()]
    installed = ", ".join(present) or "none"
    for name in names:
        if name not in present:
            raise UsageError(
                f"`log_with={name!r}` is no tracker of accelerate here "
                f"(installed here: {installed}); install it"
            )


def summed(figures: list[float], accelerator: Accelerator) -> list[float]:
    """Return the sums of figures over all processes."""
    device = "cpu"
    if accelerator.device.type == "cuda":
        device = accelerator.device
    ours = torch.tensor(figures, dtype=torch.float64, device=device)
    return accelerator.reduce(ours).tolist()
