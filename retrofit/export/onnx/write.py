"""The file: checked first, then written whole; beyond 2 GB, where protobuf ends, with the weights in a file beside."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx.external_data_helper import set_external_data
from torch import Tensor
from torch.utils._pytree import tree_leaves

from retrofit.compare import Comparison, Reference
from retrofit.errors import RetrofitError
from retrofit.export.report import ComparisonError
from retrofit.utils.files import atomic_write, ensure_writable, termination_unwinds, writing
from retrofit.utils.onnx_runtimes import Run, open_onnx
from retrofit.utils.text import one_line

Check = tuple[Reference, str]
"""What a file has to answer, and what to do where it does not."""

Written = Iterator[tuple[Comparison, int]]

LARGEST = 2**31 - 2**20  # bytes that one protobuf file can hold, and some for its own words
SMALL = 1024  # bytes of a tensor that stays in it


def written(
    model: onnx.ModelProto, path: Path, force: bool, checks: Sequence[Check]
) -> AbstractContextManager[tuple[Comparison, int]]:
    """Check a model and write it aside; it gets its name when the body ends. If anything fails, there is no file.

    Args:
        model: The model.
        path: The file; weights beyond 2 GB go to `path` with `.data` added.
        force: Whether an existing file may be replaced.
        checks: What it has to answer, one after the other.

    Returns:
        What gives the last comparison, and how many bytes were written.

    Raises:
        RetrofitError: If the model is not valid, differs, or cannot be written.
    """
    return (_apart if model.ByteSize() > LARGEST else _whole)(model, path, force, checks)


@contextmanager
def _whole(model: onnx.ModelProto, path: Path, force: bool, checks: Sequence[Check]) -> Written:
    check_model(model)
    content = model.SerializeToString(deterministic=True)
    found = _checked(open_onnx(content), checks)
    with atomic_write(path, force) as temporary:
        temporary.write_bytes(content)
        yield found, len(content)


@contextmanager
def _apart(model: onnx.ModelProto, path: Path, force: bool, checks: Sequence[Check]) -> Written:
    data = ensure_writable(path.with_name(path.name + ".data"), force)
    with (
        writing(path),
        termination_unwinds(),
        tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent) as folder,
    ):
        aside = Path(folder) / path.name
        weights, before = aside.with_name(data.name), aside.with_name("before")
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= SMALL:
                set_external_data(tensor, data.name)
        onnx.save_model(model, aside)  # its own way of naming them refuses a name that the working folder holds
        check_model(aside)
        found = _checked(open_onnx(aside), checks)
        yield found, aside.stat().st_size + weights.stat().st_size
        try:
            if data.exists():
                os.replace(data, before)
            os.replace(weights, data)
            with atomic_write(path, force) as temporary:
                temporary.write_bytes(aside.read_bytes())
        except BaseException:
            if not weights.exists():
                data.unlink(missing_ok=True)
            if before.exists():  # the weights of the file that stays
                os.replace(before, data)
            raise


def check_model(model: onnx.ModelProto | Path) -> None:
    """Run ONNX's own checker, with shape inference.

    Raises:
        RetrofitError: If it complains.
    """
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except Exception as error:
        raise RetrofitError(f"the exported model is not valid ONNX ({one_line(error)}); please report it") from error


def _checked(run: Run, checks: Sequence[Check]) -> Comparison:
    def answers(*args: Any, **kwargs: Any) -> list[Tensor]:
        arrays = [leaf.cpu().numpy() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return [torch.from_numpy(values) for values in run(*arrays)]

    for reference, advice in checks:
        found = reference.compare(answers)
        if not found.passed:
            raise ComparisonError(found, "ONNX Runtime differs from PyTorch", advice)
    return found
