"""Time and peak memory of networks, and the time of exported files in the runtimes that they are
for.

All are measured in turns, so that whatever else the machine does hits all of them alike.
"""

import copy
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from retrofit.errors import RetrofitError
from retrofit.evaluation import are_scores, layout_of
from retrofit.record import check_size
from retrofit.utils.forward_pass import autocast, memory_advice, standard_normal
from retrofit.utils.onnx_runtimes import Runtime, metadata, open_onnx

Mode = Literal["eval", "train"]
# Called as progress(turns done, in all, what is measured).
Progress = Callable[[int, int, str], None]
Step = Callable[[], object]

# Runs of a file that are not timed.
_WARM = 3
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """How networks are run."""

    batch_size: int = 16
    # Timed turns of each network in each mode, after two that are not timed.
    rounds: int = 15
    device: torch.device = _CPU
    # Data type of mixed precision; None for none.
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
        low, median, high = quantiles(figures, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Cost:
    """What one network or file costs in one mode."""

    # Its name.
    network: str
    # "eval": a forward pass without gradients; "train": forward, backward and a step of SGD with
    # momentum.
    mode: Mode
    # Time of one batch.
    seconds: Spread
    # Peak memory beyond parameters, images and the optimizer's state; of a file, its size.
    bytes: int
    # Over the time of the last network, the reference, in the same turn; None for the reference.
    time_ratio: Spread | None
    # Over the bytes of the reference; None for the reference.
    memory_ratio: float | None


def measure(
    networks: Mapping[str, tuple[nn.Module, tuple[int, int, int]]],
    setting: Setting,
    mode: str = "both",
    progress: Progress | None = None,
) -> list[Cost]:
    """Measure copies of networks against the last of them.

    Args:
        networks: By name, each with its input size (C, H, W).
        setting: How they are run.
        mode: What is measured: "eval", "train" or "both".
        progress: Called after every turn.

    Raises:
        RetrofitError: If a network gives no class scores, which training needs, or the batches do
            not fit into the memory.
    """
    costs: list[Cost] = []
    modes: list[Any] = ["eval", "train"] if mode == "both" else [mode]
    for one in modes:
        with memory_advice(setting.batch_size):
            steps = {
                name: _step(network, size, one, setting)
                for name, (network, size) in networks.items()
            }
            memory = {name: _peak_of(step, setting.device) for name, step in steps.items()}
            times = _in_turns(steps, setting.rounds, setting.device, progress, one)
        costs += _costs(one, times, memory)
    return costs


def _costs(mode: Mode, times: Mapping[str, list[float]], sizes: Mapping[str, int]) -> list[Cost]:
    """Return what each network costs, the last one being the reference, from its times in every
    turn and its bytes.
    """
    *_, reference = times
    costs = []
    for name, seconds in times.items():
        size = sizes[name]
        time_ratio = None
        memory_ratio = None
        if name != reference:
            ratios = map(operator.truediv, seconds, times[reference])
            time_ratio = Spread.of(list(ratios))
            memory_ratio = size / max(sizes[reference], 1)
        cost = Cost(
            network=name,
            mode=mode,
            seconds=Spread.of(seconds),
            bytes=size,
            time_ratio=time_ratio,
            memory_ratio=memory_ratio,
        )
        costs.append(cost)
    return costs


def _peak_of(step: Step, device: torch.device) -> int:
    # Not timed: the first run allocates what later ones use again.
    step()
    step()
    return peak_memory(step, device)


def measure_files(
    files: Mapping[str, Path],
    runtime: Runtime,
    *,
    batch_size: int = 16,
    rounds: int = 15,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Cost]:
    """Measure ONNX files, each on images of its own size, against the last of them, on the CPU.

    Args:
        files: By name.
        runtime: What runs them.
        batch_size: Images in a batch.
        rounds: Timed turns of each file.
        threads: None leaves the number to the runtime.
        progress: Called after every turn.

    Raises:
        UsageError: If the runtime is not installed.
        RetrofitError: If it does not take a file, a file does not say which images it takes, or
            the batches do not fit into the memory.
    """
    with memory_advice(batch_size):
        steps = {
            name: _file_step(path, runtime, batch_size, threads) for name, path in files.items()
        }
        for step in steps.values():
            for _ in range(_WARM):
                step()
        times = _in_turns(steps, rounds, _CPU, progress, runtime)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return _costs("eval", times, sizes)


def _file_step(path: Path, runtime: Runtime, batch_size: int, threads: int | None) -> Step:
    """Return what runs one batch of seeded images through a file."""
    size: Any = metadata(path).get("input_size")
    try:
        check_size(size)
    except (TypeError, ValueError):
        raise RetrofitError(
            f"{path} does not say which images it takes; write it by `retrofit export`"
        ) from None
    generator = np.random.default_rng(0)
    pixels = generator.standard_normal((batch_size, *size), dtype=np.float32)
    run = open_onnx(path, runtime, shape=pixels.shape, threads=threads, advice="export it again")
    return partial(run, pixels)


def _in_turns(
    steps: Mapping[str, Step],
    rounds: int,
    device: torch.device,
    progress: Progress | None,
    what: str,
) -> dict[str, list[float]]:
    """Return the seconds of each step in every turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(1, rounds + 1):
        for name, step in steps.items():
            start = _now(device)
            step()
            times[name].append(_now(device) - start)
        if progress is not None:
            progress(turn, rounds, what)
    return times


def _step(network: nn.Module, size: tuple[int, int, int], mode: Mode, setting: Setting) -> Step:
    """Return what runs one batch of seeded images through a copy of the network."""
    layout = layout_of(setting.channels_last)
    model = copy.deepcopy(network).to(setting.device).to(memory_format=layout)
    model.train(mode == "train")
    shape = (setting.batch_size, *size)
    generator = torch.Generator().manual_seed(0)
    pixels = standard_normal(shape, generator)
    pixels = pixels.to(setting.device).contiguous(memory_format=layout)
    run: Callable[[Tensor], Any] = model
    if setting.compile:
        run = torch.compile(model)
    if mode == "eval":
        return partial(_evaluate, run, pixels, setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    return partial(_train, run, pixels, setting, optimizer)


@torch.inference_mode()
def _evaluate(run: Callable[[Tensor], Any], pixels: Tensor, setting: Setting) -> Any:
    with autocast(setting.device, setting.amp):
        return run(pixels)


def _train(
    run: Callable[[Tensor], Any],
    pixels: Tensor,
    setting: Setting,
    optimizer: torch.optim.Optimizer,
) -> Any:
    with autocast(setting.device, setting.amp):
        answer = run(pixels)
    scores = answer
    # In training, some networks give scores of auxiliary heads too.
    if isinstance(answer, list | tuple):
        scores = answer[0]
    if not are_scores(scores):
        raise RetrofitError(
            "a network gives no class scores to train on; measure it with `mode='eval'`"
        )
    images, classes = scores.shape
    positions = torch.arange(images, device=scores.device)
    labels = positions % classes
    loss = F.cross_entropy(scores.float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return answer


def _now(device: torch.device) -> float:
    """Return the time in seconds, once a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
        most = torch.cuda.max_memory_allocated(device)
        return most - before
    # Above all levels of the profiler's native code, which logs to stderr when it begins and ends
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events: Any = recorded.profiler.kineto_results.events()
    in_order = sorted(events, key=lambda event: event.start_ns())
    alive = 0
    peak = 0
    for event in in_order:
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak
