"""ONNX models run on the CPU by ONNX Runtime or OpenVINO, in float32 on every processor, and what
their files say.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.text import one_line

Runtime = Literal["onnxruntime", "openvino"]
RUNTIMES: dict[Runtime, str] = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}

Array = np.ndarray[Any, Any]
Run = Callable[..., list[Array]]


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
    the number to the runtime; `advice` is what an error says to do. A UsageError says that the
    runtime is not installed, a RetrofitError, of the function too, that it cannot run the model.
    """

    def guarded(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except ImportError:
            raise UsageError(
                f"{runtime} is not installed; pip install {runtime}, or take another `runtime`"
            ) from None
        # the runtimes' exceptions have no common class
        except Exception as error:
            what = "the exported model" if isinstance(model, bytes) else model
            raise RetrofitError(
                f"{RUNTIMES[runtime]} cannot run {what} ({one_line(error)}); {advice}"
            ) from error

    run = guarded(
        _in_onnxruntime if runtime == "onnxruntime" else _in_openvino, model, shape, threads
    )
    return lambda *inputs: guarded(run, *inputs)


def _in_onnxruntime(model: bytes | Path, _shape: Sequence[int] | None, threads: int | None) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def _in_openvino(model: bytes | Path, shape: Sequence[int] | None, threads: int | None) -> Run:
    import openvino

    core = openvino.Core()
    read = core.read_model(model)
    if shape is not None:
        read.reshape(list(shape))
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    settings |= {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
    request = core.compile_model(read, "CPU", settings).create_infer_request()
    return lambda *inputs: [
        value.copy() for value in request.infer(dict(enumerate(inputs))).values()
    ]


def metadata(path: Path) -> dict[str, Any]:
    """Return what an ONNX file says of itself, as JSON where it is JSON; RetrofitError if there is
    no such file.
    """
    if not path.is_file():
        raise RetrofitError(
            f"there is no file {path}; `retrofit.export_onnx` and `retrofit export` write such files"
        )
    try:
        entries = onnx.load(path, load_external_data=False).metadata_props
    # protobuf's errors have no common class
    except Exception as error:
        raise RetrofitError(
            f"{path} is not an ONNX file ({one_line(error)}); export it again"
        ) from error
    known: dict[str, Any] = {entry.key: entry.value for entry in entries}
    for key, text in known.items():
        with suppress(ValueError, RecursionError):
            known[key] = json.loads(text)
    return known
