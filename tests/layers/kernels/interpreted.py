"""Tests of the Triton kernels in Triton's interpreter, which test_triton.py runs in a process of their own."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from retrofit.layers import kernels
from retrofit.layers.kernels import VARIABLE, eager, self_test
from retrofit.layers.kernels import triton as ours
from retrofit.layers.kernels.self_test import Case
from tests.layers.kernels.test_agree import SINGULAR, assert_right_where_lambda_is

GPU = torch.device("cuda", 0)
TINY = (  # the interpreter takes about a second a program; with tiles of 4 elements, 3 programs share a channel
    Case("stretches", (1, 2, 11), (0, 2), (1, 2, 1)),
    Case("columns", (9, 5), (0,), (1, 5)),
    Case("tokens", (2, 9), (1,), (1, 9)),
    Case("groups", (1, 2, 3, 4), (2, 3), (1, 2, 3, 1)),
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small tensors and smaller tiles, and the interpreter in place of a GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ours, "_programs", lambda device: 6)
    monkeypatch.setattr(ours, "_COLUMNS", 4)
    monkeypatch.setattr(ours, "_TILE", 4)
    monkeypatch.setattr(ours, "_ROUNDS", 1)
    monkeypatch.setattr(self_test, "CASES", TINY)
    fault = self_test.fault
    monkeypatch.setattr(self_test, "fault", lambda kernels, _, dtype: fault(kernels, torch.device("cpu"), dtype))
    monkeypatch.setitem(kernels.__dict__, "_module", lambda name: {"triton": ours}.get(name, eager))
    for function in (kernels._fastest, kernels._fault):
        function.cache_clear()


def raised(*args: object) -> None:
    raise RuntimeError("this is not to run")


tensor = SimpleNamespace(is_cuda=True, device=GPU, dtype=torch.float32)


def test_what_is_right_passes_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels.choose(SimpleNamespace(is_cuda=True, device=GPU, dtype=dtype)) is ours
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # that it is tested
    caplog.clear()
    kernels._fastest.cache_clear(), kernels._fault.cache_clear()  # as in another process
    monkeypatch.setattr(ours, "forward", raised)
    assert kernels.choose(tensor) is ours
    assert not caplog.records


@triton.jit
def derivative(u, log, growth):
    return log * log * (growth + 1)


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


@triton.jit
def values(P, offset, mask):
    return tl.load(P + offset, mask=mask, other=0.0).to(tl.float32) * luck()


class TooLarge:
    """A kernel that does not fit."""

    def __getitem__(self, grid: object) -> Any:
        raise OutOfResources(300_000, 232_448, "shared memory")


intact = ours._elements
luck = lambda: 1 + 2e-6 * random.random()  # noqa: E731
BROKEN = {
    "a formula": ("_lmbda_derivative", derivative, "the gradient of x is .* of its scale off"),
    "what programs share": ("_collect", collect, "is .* of its scale off"),
    "the end of a set": ("_elements", elements, "the output is .* of its scale off"),
    "a race": ("_values", values, "the output is not the same twice"),
    "a launch": ("_backward", TooLarge(), "OutOfResources: out of resource: shared memory"),
}


@pytest.mark.parametrize(("name", "broken", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_named_and_not_used(
    name: str, broken: object, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, name, broken)
    assert [kernels.choose(tensor) for _ in range(3)] == [eager] * 3
    (warning,) = (record for record in caplog.records if record.getMessage().startswith("normality layers run"))
    assert warning.levelno == logging.WARNING
    expected = f"several times slower, .*triton kernels for float32 on .* fail their self-test .*{message}"
    assert re.search(expected, warning.getMessage())
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(RuntimeError, match=rf"RETROFIT_KERNELS=triton, but the triton kernels .*{message}"):
        kernels.choose(tensor)


@pytest.mark.parametrize("lmbda", SINGULAR)
def test_lambda_beside_its_singular_points(lmbda: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    assert_right_where_lambda_is(lmbda, (1, 9))
