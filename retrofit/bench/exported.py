"""Time of exported files in the runtimes that they are for, measured in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from retrofit.bench.cost import Progress, Spread
from retrofit.errors import RetrofitError
from retrofit.utils.text import one_line

Runtime = Literal["onnxruntime", "openvino"]
_WARM = 2  # turns that are not timed

Runner = Callable[[np.ndarray[Any, Any]], object]


@dataclass(frozen=True)
class FileCost:
    """What one file costs.

    Attributes:
        file: Its name.
        seconds: Time of one batch.
        bytes: Its size.
        time_ratio: Time over that of the last file in the same turn, the reference; None for the reference.
    """

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
    """Measure ONNX files against the last of them, on the CPU.

    Args:
        files: Files by name; each takes images of its own size.
        runtime: "onnxruntime", or "openvino", which gets a fixed shape and computes float32 as float32.
        batch_size: Images in a batch.
        rounds: Timed turns of each file.
        threads: Of the runtime; its own choice if None.
        progress: Called as progress(turns done, in all).

    Raises:
        RetrofitError: If the runtime is not installed, or does not take a file.
    """
    runners = {name: _opened(path, runtime, batch_size, threads) for name, path in files.items()}
    times: dict[str, list[float]] = {name: [] for name in files}
    for turn in range(_WARM + rounds):
        for name, (run, pixels) in runners.items():
            start = time.perf_counter()
            run(pixels)
            if turn >= _WARM:
                times[name].append(time.perf_counter() - start)
        if progress is not None and turn >= _WARM:
            progress(turn - _WARM + 1, rounds)
    reference = times[list(files)[-1]]
    return [
        FileCost(
            name,
            Spread.of(found),
            files[name].stat().st_size,
            None if found is reference else Spread.of([a / b for a, b in zip(found, reference, strict=True)]),
        )
        for name, found in times.items()
    ]


def _opened(path: Path, runtime: Runtime, batch_size: int, threads: int | None) -> tuple[Runner, np.ndarray[Any, Any]]:
    """Open a file; return what runs it, and images for it."""
    opened = {"onnxruntime": _in_onnxruntime, "openvino": _in_openvino}[runtime]
    if not path.is_file():
        raise RetrofitError(f"there is no file {path}; give one that retrofit export wrote")
    shape = (batch_size, *_input_size(path))
    pixels = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    try:
        run = opened(path, shape, threads)
        run(pixels)
    except ImportError:
        raise RetrofitError(f"{runtime} is not installed; pip install {runtime}") from None
    except Exception as error:  # runtimes have exceptions of their own
        raise RetrofitError(f"{runtime} cannot run {path} ({one_line(error)}); export it again") from error
    return run, pixels


def _in_onnxruntime(path: Path, _shape: tuple[int, ...], threads: int | None) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda pixels: session.run(None, {name: pixels})


def _in_openvino(path: Path, shape: tuple[int, ...], threads: int | None) -> Runner:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    model.reshape(list(shape))  # only then does it fuse elementwise chains
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    return lambda pixels: request.infer({0: pixels})


def _input_size(path: Path) -> tuple[int, ...]:
    """Return the (C, H, W) of a file's images: what its metadata say, or its input's own shape."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
        known = {entry.key: entry.value for entry in model.metadata_props}
        if "input_size" in known:
            return tuple(int(side) for side in json.loads(known["input_size"]))
        dims = model.graph.input[0].type.tensor_type.shape.dim[1:]
    except Exception as error:  # protobuf's, and whatever a damaged file brings about
        raise RetrofitError(
            f"{path} is not an ONNX file ({one_line(error)}); give one that retrofit export wrote"
        ) from error
    if not dims or not all(dim.dim_value > 0 for dim in dims):
        raise RetrofitError(f"{path} does not say which images it takes; export it with retrofit export")
    return tuple(dim.dim_value for dim in dims)
