"""Profiles of steps: which kernels the device runs, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpu_report import Sizes
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Steps in a profile, and steps before it
STEPS = 5
WARM_UP = 3


@dataclass(frozen=True)
class Kernel:
    """What a step spends on a kernel; in a dry run, on an operation of the CPU.

    Attributes:
        name: Its name, shortened.
        launches: How often a step launches it.
        milliseconds: Of the device, in a step.
    """

    name: str
    launches: float
    milliseconds: float


def profiled(run: Callable[[], object], sizes: Sizes) -> profile:
    """Profile some steps, once everything is compiled and allocated for."""
    for _ in range(min(WARM_UP, sizes.rounds)):
        run()
    activities = [ProfilerActivity.CPU]
    if sizes.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            run()
    return profiler


def kernel_times(profiler: profile, sizes: Sizes) -> list[Kernel]:
    """Return the kernels of a step, the slowest first."""
    on_gpu = sizes.device == "cuda"
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = []
    for event in profiler.key_averages():
        if event.device_type != device:
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.append(Kernel(_short(event.key), event.count / STEPS, microseconds / 1e3 / STEPS))
    return sorted(kernels, key=lambda kernel: kernel.milliseconds, reverse=True)


def busy_milliseconds(kernels: list[Kernel]) -> float:
    """Return how long the device works in a step."""
    return sum(kernel.milliseconds for kernel in kernels)


def _short(name: str) -> str:
    """Return a name that fits a table: without C++'s parameters and templates."""
    return name.replace("|", "/").removeprefix("void ").partition("<")[0].partition("(")[0][:60]
