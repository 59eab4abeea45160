"""Time and peak memory of networks, and the time of exported files in the runtimes that they are
for.

All are measured in turns, so that whatever else the machine does hits all of them alike.
"""

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from retrofit.errors import RetrofitError
from retrofit.record import check_size
from retrofit.utils.onnx_runtimes import Runtime, metadata, open_onnx
from retrofit.utils.running import autocast

Mode = Literal["eval", "train"]
MODES: tuple[Mode, ...] = ("eval", "train")
# called as progress(turns done, in all)
Progress = Callable[[int, int], None]

# runs of a file that are not timed
_WARM = 3


@dataclass(frozen=True)
class Setting:
    """How networks are run."""

    batch_size: int = 16
    # timed turns of each network in each mode, after two that are not timed
    rounds: int = 15
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # data type of mixed precision; None for none
    amp: torch.dtype | None = None
    channels_last: bool = False
    compile: bool = False


@dataclass(frozen=True)
class Spread:
    """The median of several figures, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        """Summarise at least two figures."""
        low, _, high = quantiles(figures, n=4, method="inclusive")
        return cls(median(figures), low, high)


@dataclass(frozen=True)
class Cost:
    """What one network costs in one mode."""

    # its name
    network: str
    # "eval": a forward pass without gradients; "train": forward, backward and a step of SGD with
    # momentum
    mode: Mode
    # of one batch
    seconds: Spread
    # peak memory beyond parameters, images and the optimizer's state
    bytes: int
    time_ratio: (
        Spread | None
    )  # to the last network, the reference, in the same turn; None for the reference
    # to the reference; None for the reference
    memory_ratio: float | None


@dataclass(frozen=True)
class FileCost:
    """What one file costs: time of a batch, size, and time over that of the reference in the same
    turn (else None).
    """

    file: str
    seconds: Spread
    bytes: int
    time_ratio: Spread | None


def measure(
    networks: Mapping[str, tuple[nn.Module, tuple[int, int, int]]],
    setting: Setting,
    modes: Sequence[Mode] = MODES,
    progress: Progress | None = None,
) -> list[Cost]:
    """Measure copies of networks, each given with its input size (C, H, W), against the last of
    them.

    A RetrofitError says which network gives no class scores, which training needs.
    """
    costs: list[Cost] = []
    *_, reference = networks
    for number, mode in enumerate(modes):
        steps = {
            name: _step(name, network, size, mode, setting)
            for name, (network, size) in networks.items()
        }
        memory = {}
        for name, step in steps.items():
            step()
            step()
            memory[name] = peak_memory(step, setting.device)
        turns = range(number * setting.rounds + 1, (number + 1) * setting.rounds + 1)
        for name, times in _in_turns(
            steps, turns, len(modes) * setting.rounds, setting.device, progress
        ).items():
            memory_ratio = None if name == reference else memory[name] / max(memory[reference], 1)
            costs.append(Cost(name, mode, times[0], memory[name], times[1], memory_ratio))
    return costs


def measure_files(
    files: Mapping[str, Path],
    runtime: Runtime,
    *,
    batch_size: int = 16,
    rounds: int = 15,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[FileCost]:
    """Measure ONNX files, each on images of its own size, against the last of them, on the CPU.

    `threads` None leaves the number to the runtime. A UsageError says that the runtime is not
    installed, a RetrofitError that it does not take a file, or that a file does not say which
    images it takes.
    """
    steps = {}
    for name, path in files.items():
        size: Any = metadata(path).get("input_size")
        try:
            check_size(size)
        except (TypeError, ValueError):
            raise RetrofitError(
                f"{path} does not say which images it takes; write it by `retrofit export`"
            ) from None
        pixels = np.random.default_rng(0).standard_normal((batch_size, *size), dtype=np.float32)
        run = open_onnx(
            path, runtime, shape=pixels.shape, threads=threads, advice="export it again"
        )
        steps[name] = partial(run, pixels)
        for _ in range(_WARM):
            steps[name]()
    times = _in_turns(steps, range(1, rounds + 1), rounds, torch.device("cpu"), progress)
    return [
        FileCost(name, own, files[name].stat().st_size, ratio)
        for name, (own, ratio) in times.items()
    ]


def _in_turns(
    steps: Mapping[str, Callable[[], object]],
    turns: range,
    total: int,
    device: torch.device,
    progress: Progress | None,
) -> dict[str, tuple[Spread, Spread | None]]:
    """Return the seconds of each step, and their ratio to those of the last one, the reference,
    which has none.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in turns:
        for name, step in steps.items():
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            times[name].append(time.perf_counter() - start)
        if progress is not None:
            progress(turn, total)
    *_, last = times.values()
    ratios = {
        name: [a / b for a, b in zip(own, last, strict=True)]
        for name, own in times.items()
        if own is not last
    }
    return {
        name: (Spread.of(own), Spread.of(ratios[name]) if name in ratios else None)
        for name, own in times.items()
    }


def _step(
    name: str, network: nn.Module, size: tuple[int, int, int], mode: Mode, setting: Setting
) -> Callable[[], object]:
    """Return what runs one batch of seeded images through a copy of the network."""
    layout: Any = torch.channels_last if setting.channels_last else torch.contiguous_format
    model = (
        copy.deepcopy(network).to(setting.device).to(memory_format=layout).train(mode == "train")
    )
    shape, generator = (setting.batch_size, *size), torch.Generator().manual_seed(0)
    pixels = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(
        setting.device
    )
    pixels = pixels.contiguous(memory_format=layout)
    with torch.inference_mode():
        scores = copy.deepcopy(model).eval()(pixels[:2])
    run: Callable[[Tensor], Any] = torch.compile(model) if setting.compile else model
    if mode == "train" and (not isinstance(scores, Tensor) or scores.ndim != 2):
        raise RetrofitError(
            f"{name} gives no class scores to train on; measure it with `modes=('eval',)`"
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> object:
        with torch.inference_mode(mode == "eval"), autocast(setting.device, setting.amp):
            out = run(pixels)
        if mode == "train":
            own = (out if isinstance(out, Tensor) else out[0]).float()
            F.cross_entropy(
                own, torch.arange(len(own), device=own.device) % own.shape[1]
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        return out

    return step


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(work: Callable[[], Any], device: torch.device) -> int:
    """Return how many bytes of tensors were alive at once during `work`, beyond those before it.

    On a GPU the caching allocator's own count; on a CPU every allocation and release as the
    profiler records them, so that the figure does not depend on what the process did before or on
    when memory goes back to the system.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events: Any = recorded.profiler.kineto_results.events()
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the profiler's native code from writing its log to stderr."""
    with open(os.devnull, "w") as nowhere, os.fdopen(os.dup(2), "w") as kept:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept.fileno(), 2)
