"""Time of exported files in the runtimes that they are for, measured in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrofit.bench.cost import Progress, Spread, in_turns
from retrofit.errors import RetrofitError
from retrofit.record import check_size
from retrofit.utils.onnx_runtimes import Runtime, metadata, open_onnx

_WARM = 3  # runs that are not timed


@dataclass(frozen=True)
class FileCost:
    """What one file costs: time of a batch, size, and time over that of the reference in the same turn (else None)."""

    file: str
    seconds: Spread
    bytes: int
    time_ratio: Spread | None


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

    `threads` None leaves the number to the runtime; `progress` is called as progress(turns done, in all). A UsageError
    says that the runtime is not installed, a RetrofitError that it does not take a file.
    """
    steps = {name: _opened(path, runtime, batch_size, threads) for name, path in files.items()}
    times = in_turns(steps, range(1, rounds + 1), rounds, torch.device("cpu"), progress)
    return [FileCost(name, own, files[name].stat().st_size, ratio) for name, (own, ratio) in times.items()]


def _opened(path: Path, runtime: Runtime, batch_size: int, threads: int | None) -> Callable[[], object]:
    """Open a file; return what runs a batch of images through it, and has done so."""
    shape = (batch_size, *_input_size(path))
    pixels = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    run = open_onnx(path, runtime, shape=shape, threads=threads, advice="export it again")
    for _ in range(_WARM):
        run(pixels)
    return partial(run, pixels)


def _input_size(path: Path) -> list[int]:
    """Return the (C, H, W) of a file's images."""
    size: Any = metadata(path).get("input_size")
    try:
        check_size(size)
    except (TypeError, ValueError):
        raise RetrofitError(
            f"{path} does not say which images it takes; write it with `retrofit.export_onnx` or `retrofit export`"
        ) from None
    return list(size)
