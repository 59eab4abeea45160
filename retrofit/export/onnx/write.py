"""The file: checked first, then written whole; beyond 2 GB, where protobuf ends, with the weights in a file beside."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from torch import Tensor

from retrofit.export.onnx.runtime import check_model, runner
from retrofit.export.parity import Check, Parity, ParityError, compare
from retrofit.utils.files import atomic_write, ensure_writable, termination_unwinds

LARGEST = 2**31 - 2**20  # bytes that one protobuf file can hold, and some for its own words


def write(
    model: onnx.ModelProto,
    path: Path,
    force: bool,
    checks: Sequence[Check],
) -> tuple[Parity, int]:
    """Check a model and write it.

    Args:
        model: The model.
        path: The file; weights beyond 2 GB go to `path` with `.data` added.
        force: Whether an existing file may be replaced.
        checks: What it has to answer, one after the other.

    Returns:
        The last comparison, and how many bytes were written.

    Raises:
        RetrofitError: If the model is not valid, differs, or cannot be written: there is no file then.
    """
    if model.ByteSize() > LARGEST:
        return _write_apart(model, path, force, checks)
    check_model(model)
    content = model.SerializeToString(deterministic=True)
    found = _checked(runner(content), checks)
    with atomic_write(path, force) as temporary:
        temporary.write_bytes(content)
    return found, len(content)


def _write_apart(
    model: onnx.ModelProto,
    path: Path,
    force: bool,
    checks: Sequence[Check],
) -> tuple[Parity, int]:
    data = ensure_writable(path.with_name(path.name + ".data"), force)
    with (
        termination_unwinds(),
        tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent) as folder,
    ):
        aside = Path(folder) / path.name
        weights, before = aside.with_name(data.name), aside.with_name("before")
        onnx.save_model(model, aside, save_as_external_data=True, location=data.name, size_threshold=1024)
        check_model(aside)
        found = _checked(runner(aside), checks)
        length = aside.stat().st_size + weights.stat().st_size
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
    return found, length


def _checked(run: Callable[[Tensor], list[Tensor]], checks: Sequence[Check]) -> Parity:
    for check in checks:
        found = compare(run, check)
        if not found.passed:
            raise ParityError(found, "ONNX Runtime differs from PyTorch", check.advice)
    return found
