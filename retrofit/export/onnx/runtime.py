"""ONNX models as programs: ONNX's own checker, and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import torch
from torch import Tensor

from retrofit.errors import RetrofitError
from retrofit.export.onnx.model import INPUT
from retrofit.utils.text import one_line


def check_model(model: onnx.ModelProto | Path) -> None:
    """Run ONNX's own checker, with shape inference.

    Raises:
        RetrofitError: If it complains.
    """
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except Exception as error:
        raise RetrofitError(f"the exported model is not valid ONNX ({one_line(error)}); please report it") from error


def runner(
    model: bytes | Path, what: str = "the exported model", advice: str = "please report it"
) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that runs a model with ONNX Runtime on the CPU.

    Args:
        model: The model, or its file.
        what: What an error calls it, and
        advice: says to do.

    Raises:
        RetrofitError: If ONNX Runtime cannot; so does the function.
    """
    import onnxruntime

    def refused(error: Exception) -> RetrofitError:
        return RetrofitError(f"ONNX Runtime cannot run {what} ({one_line(error)}); {advice}")

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    content = str(model) if isinstance(model, Path) else model
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common class
        raise refused(error) from error

    def run(x: Tensor) -> list[Tensor]:
        try:
            return [torch.from_numpy(array) for array in session.run(None, {INPUT: x.float().numpy()})]
        except Exception as error:
            raise refused(error) from error

    return run
