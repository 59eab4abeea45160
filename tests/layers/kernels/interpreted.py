"""The Triton kernels in Triton's interpreter, which takes about a second a program;
`test_triton.py` runs this file.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import language as tl

from retrofit.layers import kernels
from retrofit.layers.kernels import self_test
from retrofit.layers.kernels.self_test import Case
from tests.layers.kernels import test_agree

ours, CPU = kernels._module("triton"), torch.device("cpu")

TINY = (  # with tiles of 4 elements, 3 programs share a channel
    Case("stretches", (1, 2, 11), (0, 2), (1, 2, 1)),
    Case("columns", (9, 5), (0,), (1, 5)),
    Case("tokens", (2, 9), (1,), (1, 9)),
    Case("groups", (1, 2, 3, 4), (2, 3), (1, 2, 3, 1)),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "_programs": lambda device: 6,
        "_COLUMNS": 4,
        "_TILE": 4,
        "_ROUNDS": 1,
    }.items():
        monkeypatch.setattr(ours, name, value)
    monkeypatch.setattr(self_test, "CASES", TINY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # as on a machine where nothing was tested


@triton.jit
def collect(Parts, row, at):
    total = ours._part(Parts, row, 0, at)
    for s in range(1, tl.num_programs(1) - 1):
        total += ours._part(Parts, row, s, at)
    return total


@triton.jit
def elements(e, at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offset, mask, parameter = intact(e, at, ROWS, COLUMNS)
    return offset, mask & (e + 1 + tl.arange(0, ROWS)[:, None] < at.stop), parameter


intact = ours._elements


@pytest.mark.parametrize(
    ("name", "broken", "dtype", "message"),
    [
        ("_elements", intact, torch.float32, "^None$"),
        ("_elements", intact, torch.bfloat16, "^None$"),
        (
            "_collect",
            collect,
            torch.float32,
            r"triton kernels for float32 on .* fail .* is .* of its scale off",
        ),
        (
            "_elements",
            elements,
            torch.float32,
            r"fail their self-test .* the output is .* of its scale off",
        ),
    ],
    ids=["right", "right in half", "programs that share a set", "the end of a set"],
)
def test_interpreted(
    name: str, broken: Any, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, name, broken)
    assert re.search(message, str(self_test.fault(ours, CPU, dtype)))


def test_interpreted_at_given_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    test_agree.test_given_lambda_at_and_beside_its_singular_points(2.0)
