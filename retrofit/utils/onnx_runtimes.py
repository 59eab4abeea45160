"""ONNX models run on the CPU by ONNX Runtime or OpenVINO, in float32 on every processor, and what
their files say.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.text import one_line

Runtime = Literal["onnxruntime", "openvino"]
RUNTIMES: dict[Runtime, str] = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}

Array = np.ndarray[Any, Any]
Run = Callable[..., list[Array]]

# Of ONNX Runtime's log: what goes wrong comes as an exception too
_FATAL = 4


def open_onnx(
    model: bytes | Path,
    runtime: Runtime = "onnxruntime",
    *,
    shape: Sequence[int] | None = None,
    threads: int | None = None,
    advice: str = "please report it",
) -> Run:
    """Return a function that takes the model's inputs, images (N, C, H, W) in float32 say, and
    returns its outputs.

    OpenVINO computes in bfloat16 by itself where the processor does, but not here. It fuses chains
    of elementwise operations only where the `shape` of the images is fixed. `threads` None leaves
    the number to the runtime; `advice` is what an error says to do.

    Raises:
        UsageError: If the runtime is not installed.
        RetrofitError: If the runtime cannot open the model; the function, if it cannot run it.
    """
    name = "the exported model"
    if isinstance(model, Path):
        name = str(model)
    with _one_line_errors(runtime, name, advice):
        if runtime == "onnxruntime":
            run = _in_onnxruntime(model, threads)
        else:
            run = _in_openvino(model, shape, threads)

    def guarded(*inputs: Array) -> list[Array]:
        with _one_line_errors(runtime, name, advice):
            return run(*inputs)

    return guarded


@contextmanager
def _one_line_errors(runtime: Runtime, name: str, advice: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise UsageError(
            f"{runtime} is not installed; pip install {runtime}, or take another `runtime`"
        ) from None
    # The runtimes' exceptions have no common class
    except Exception as error:
        raise RetrofitError(
            f"{RUNTIMES[runtime]} cannot run {name} ({one_line(error)}); {advice}"
        ) from error


def _in_onnxruntime(model: bytes | Path, threads: int | None) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = threads or 0
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def _in_openvino(model: bytes | Path, shape: Sequence[int] | None, threads: int | None) -> Run:
    import openvino

    core = openvino.Core()
    network = core.read_model(model)
    if shape is not None:
        sizes = list(shape)
        network.reshape(sizes)
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    compiled = core.compile_model(network, "CPU", settings)
    request = compiled.create_infer_request()

    def run(*inputs: Array) -> list[Array]:
        by_position = dict(enumerate(inputs))
        answer = request.infer(by_position)
        outputs = answer.values()
        return [values.copy() for values in outputs]

    return run


def metadata(path: Path) -> dict[str, Any]:
    """Return what an ONNX file says of itself, as JSON where it is JSON.

    Raises:
        RetrofitError: If there is no such file, or it is no ONNX file.
    """
    if not path.is_file():
        raise RetrofitError(
            f"there is no file {path}; `retrofit.export_onnx` and `retrofit export` write such "
            "files"
        )
    import onnx

    try:
        entries = onnx.load(path, load_external_data=False).metadata_props
    # Protobuf's errors have no common class
    except Exception as error:
        raise RetrofitError(
            f"{path} is not an ONNX file ({one_line(error)}); export it again"
        ) from error
    known: dict[str, Any] = {entry.key: entry.value for entry in entries}
    for key, text in known.items():
        with suppress(ValueError, RecursionError):
            known[key] = json.loads(text)
    return known
