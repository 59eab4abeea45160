"""The self-test of kernels, with the CPU in place of a GPU; interpreted.py breaks the Triton kernels themselves."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retrofit.layers import kernels
from retrofit.layers.kernels import eager, self_test
from retrofit.layers.kernels.layout import geometry_of
from tests.pretend_device import DEVICE, pretended

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = tuple(self_test.TOLERANCES)
ALL_CASES = self_test.CASES


@pytest.fixture(autouse=True)
def _unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine where nothing was tested."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_test, "CASES", self_test.CASES[:1])


class Recorder:
    """The formulas as kernels, whose calls are counted, and whose results `change` may spoil."""

    def __init__(self, change: Callable[[torch.Tensor], Any] = lambda out: None) -> None:
        self.__name__ = "kernels.stub"
        self.calls, self.change = 0, change

    def forward(self, out: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        stats = eager.forward(out, *args)
        self.change(out)
        return stats

    backward = staticmethod(eager.backward)
    apply = staticmethod(eager.apply)


def test_what_passed_is_remembered_for_its_dtype_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Recorder()
    for _ in range(3):
        assert [self_test.fault(stub, CPU, dtype) for dtype in DTYPES] == [None] * 3
    assert stub.calls == 2 * len(DTYPES)
    newer = [SimpleNamespace(version="9.9")]
    monkeypatch.setattr(self_test.importlib.metadata, "distributions", lambda name: newer if name == "triton" else [])
    assert self_test.fault(stub, CPU, torch.float32) is None
    assert stub.calls == 2 * len(DTYPES) + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.mul_(1.001), r"\(channels, contiguous: the output is 1\.0e-03 of its scale off\)"),
        (lambda out: out.view(-1)[:1].fill_(torch.nan), "the output is nan of its scale off"),
        (lambda out: out.add_(1e-6 * torch.rand(())), "the output is not the same twice"),
        (lambda out: out.no_such_instruction, r"AttributeError: 'Tensor' object has no attribute"),
    ],
)
def test_what_failed_is_named_and_tried_again(change: Callable[[torch.Tensor], Any], message: str) -> None:
    stub = Recorder(change)
    for _ in range(2):
        assert re.search(message, str(self_test.fault(stub, CPU, torch.float32)))
    assert stub.calls >= 2


def test_each_process_tests_where_nothing_can_be_kept_and_leaves_random_numbers_and_grad_mode_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub, state = Recorder(), torch.get_rng_state()
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert [self_test.fault(stub, CPU, torch.float32) for _ in range(2)] == [None, None]
    assert stub.calls == 4
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_nothing_meets_a_tensor_of_another_device() -> None:
    with pretended(torch.nn.Module()), torch.no_grad():
        self_test.compare(Recorder(), self_test.CASES[0], DEVICE, torch.bfloat16)


def test_programs_share_the_sets_of_the_cases_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrofit.layers.kernels import triton

    monkeypatch.setattr(triton, "_programs", lambda device: 4 * 40)  # of a T4, which has few
    for case in ALL_CASES:
        geometry = geometry_of(case.shape, case.dims, case.affine, triton._COLUMNS)
        assert geometry is not None
        launch = triton._Launch(torch.empty(case.shape, device="meta"), geometry)
        assert (launch.splits > 1) == ("share" in case.name)
        assert launch.where.elements > launch.rows  # a whole tile, and another
        assert launch.rows * launch.columns == triton._TILE


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_this_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "CASES", ALL_CASES)
    assert self_test.fault(kernels._module("triton"), GPU, dtype) is None


@pytest.mark.parametrize(
    ("fault", "chosen", "message"),
    [
        (None, "triton", "Triton kernels on GPUs in torch.bfloat16"),
        ("they are broken", "eager", "operations, several times slower, on GPUs in torch.bfloat16: they are broken"),
    ],
)
def test_what_is_broken_is_replaced_and_it_is_said_once(
    fault: str | None, chosen: str, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {("retrofit.layers.kernels.triton", GPU, torch.bfloat16): fault}
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(self_test, "fault", lambda module, *where: known[module.__name__, *where])
    kernels._fault.cache_clear(), kernels._fastest.cache_clear()
    x = SimpleNamespace(is_cuda=True, device=GPU, dtype=torch.bfloat16)
    assert [kernels.choose(x).__name__.rpartition(".")[2] for _ in range(3)] == [chosen] * 3
    (record,) = caplog.records
    assert message in record.getMessage()
    assert record.levelno == (logging.WARNING if fault else logging.INFO)
    if fault:
        monkeypatch.setenv(kernels.VARIABLE, "triton")
        with pytest.raises(RuntimeError, match="RETROFIT_KERNELS=triton, but they are broken; unset it or choose"):
            kernels.choose(x)
    kernels._fault.cache_clear(), kernels._fastest.cache_clear()
