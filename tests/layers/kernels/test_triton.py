"""The Triton kernels without a GPU: their self-test, their interpreter, and their compiler to
machine code.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from retrofit.layers import BatchNormalNorm2d, kernels
from retrofit.layers.kernels import eager, self_test
from retrofit.layers.kernels import triton as triton_kernels
from retrofit.layers.kernels.triton import launcher, norm_backward
from retrofit.layers.kernels.triton_plan import plan_of
from tests.pretend_device import DEVICE, pretended

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
sass = importlib.import_module("sass")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = tuple(self_test.TOLERANCES)
ALL_CASES = self_test.CASES


@pytest.fixture(autouse=True)
def _unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # as on a machine where nothing was tested
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_test, "CASES", self_test.CASES[:1])


# the formulas as kernels, whose calls are counted, and whose results `change` may spoil
class Recorder:
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


def test_what_passed_is_remembered_for_its_dtype_and_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Recorder()
    for _ in range(3):
        assert [self_test.fault(stub, CPU, dtype) for dtype in DTYPES] == [None] * 3
    assert stub.calls == 2 * len(DTYPES)
    newer = [SimpleNamespace(version="9.9")]
    monkeypatch.setattr(
        self_test.importlib.metadata,
        "distributions",
        lambda name: newer if name == "triton" else [],
    )
    assert self_test.fault(stub, CPU, torch.float32) is None
    assert stub.calls == 2 * len(DTYPES) + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda out: out.mul_(1.001),
            r"\(channels, contiguous: the output is 1\.0e-03 of its scale off\)",
        ),
        (lambda out: out.view(-1)[:1].fill_(torch.nan), "the output is nan of its scale off"),
        (lambda out: out.add_(1e-6 * torch.rand(())), "the output is not the same twice"),
        (lambda out: out.no_such_instruction, r"AttributeError: 'Tensor' object has no attribute"),
    ],
)
def test_what_failed_is_named_and_tried_again(
    change: Callable[[torch.Tensor], Any], message: str
) -> None:
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
    with pretended(torch.nn.Module()):
        assert self_test.compare(Recorder(), self_test.CASES[0], DEVICE, torch.bfloat16) is None


def test_programs_share_the_sets_of_the_cases_that_say_so() -> None:
    for case in ALL_CASES:
        # Of a T4, which has few processors
        each = plan_of(case.shape, case.dims, case.affine, 40)
        assert each is not None
        assert (each.splits > 1) == ("share" in case.name)


def test_the_launcher_takes_what_kernels_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton writes a function of a kernel's arguments, by their names and with some of its own."""
    backend = triton.compiler.make_backend(GPUTarget("cuda", 90, 32))
    taken: dict[str, set[Any]] = {}

    def launch(kernel: Any, plan: Any, *arguments: Any, **options: Any) -> None:
        bind = triton.runtime.jit.create_function_from_signature(
            kernel.signature, kernel.params, backend
        )
        _, kinds, _ = bind(*arguments, *plan.numbers, plan.tile, num_warps=plan.warps)
        taken.setdefault(kernel.__name__, set()).update(kind for kind, _ in kinds)

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(launcher, "processors", lambda device: 40)
    for case in ALL_CASES:
        self_test._results(triton_kernels, case, CPU, torch.bfloat16)
    whole = {"forward_kernel", "backward_kernel", "apply_kernel"}
    forward = {"statistics_kernel", "step_kernel", "noise_kernel", "result_kernel"}
    assert taken.keys() == whole | forward | {"gradient_sums_kernel", "gradient_kernel"}
    for name, kinds in taken.items():
        assert {"*bf16", "*fp32", "i32", "constexpr"} <= kinds, name


@pytest.mark.parametrize(("version", "fails"), [("3.4.0", True), ("3.5.1", False)])
def test_an_old_triton_is_named(version: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(self_test, "fault", lambda *_: None)
    kernels._fault.cache_clear()
    fault = kernels._fault("triton", GPU, torch.float32)
    kernels._fault.cache_clear()
    expected = "triton 3.4.0 is older than 3.5, which the kernels need"
    assert fault == (expected if fails else None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_this_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "CASES", ALL_CASES)
    assert self_test.fault(triton_kernels, GPU, dtype) is None


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_a_cuda_graph_captures_a_step_and_replays_it(noise: float) -> None:
    layer = BatchNormalNorm2d(16, noise=noise, strength=0.5).cuda()
    still = torch.randn(32, 16, 14, 14, device="cuda").requires_grad_()
    # Compiled, tested and allocated for before anything is captured
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(layer(still).square().sum(), still)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(still)
        (gradient,) = torch.autograd.grad(out.square().sum(), still)
    with torch.no_grad():
        still.copy_(torch.randn_like(still).exp())
    batches = layer.num_batches_tracked.item()
    graph.replay()
    torch.cuda.synchronize()
    assert layer.num_batches_tracked.item() == batches + 1
    if not noise:
        expected = layer(still)
        (eagerly,) = torch.autograd.grad(expected.square().sum(), still)
        torch.testing.assert_close((out, gradient), (expected, eagerly))
    else:
        first = out.clone()
        graph.replay()
        assert not torch.equal(first, out)


def test_what_is_broken_is_replaced_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    known = {("retrofit.layers.kernels.triton", GPU, torch.bfloat16): "they are broken"}
    monkeypatch.setattr(self_test, "fault", lambda module, *where: known[module.__name__, *where])
    kernels._fault.cache_clear(), kernels._fastest.cache_clear()
    x = SimpleNamespace(is_cuda=True, device=GPU, dtype=torch.bfloat16)
    assert [kernels.choose(x) for _ in range(3)] == [eager] * 3
    (record,) = caplog.records
    assert record.getMessage().endswith("many times slower, on cuda: they are broken")
    kernels._fault.cache_clear(), kernels._fastest.cache_clear()


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """In a process of its own: functions are interpreted or not when they are first read."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    file, environment = (
        Path(__file__).with_name("interpreted.py"),
        {**os.environ, "TRITON_INTERPRET": "1"},
    )
    done = subprocess.run(
        [*command, file], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "23 passed" in done.stdout


CAPABILITIES = (75, 80, 86, 89, 90, 100)  # of T4, A100, RTX 30, RTX 40 and L4, H100, B200
# Registers that a thread may have, and bytes of stack, to which they are spilled; bytes of the 48
# KiB that every GPU gives a program without asking
MOST = {"REG": 255, "STACK": 64, "SHARED": 16 * 1024}
# Instructions an element, forward and backward
INSTRUCTIONS = {"bnn, channels_last": 150, "bnn, contiguous": 150}
OF_MAPS = {
    "ln, channels_last": 30,
    # A set of 3136 takes a tile of 4096
    "ln, contiguous": 50,
    "ln with ProxyNorm SiLU, channels_last": 60,
    "ln with ProxyNorm SiLU, contiguous": 80,
    "ProxyNorm ReLU, channels_last": 30,
    "ProxyNorm SiLU, channels_last": 30,
    "ProxyNorm GELU, channels_last": 48,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_fit_gpus_that_are_not_here(capability: int) -> None:
    """The largest kernels for every GPU, all of them for one."""
    everything = capability == 90
    for name, layer in sass.LAYERS.items() if everything else [("bnn", _CHANNELS_LAST)]:
        for kernel in sass.launches(*layer, everything):
            code = sass.built(kernel, layer, "bf16", capability)
            within = all(code.resources[key] <= most for key, most in MOST.items())
            assert within, (name, kernel.__name__, code.resources)


_CHANNELS_LAST = sass.LAYERS["bnn, channels_last"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_instructions_and_the_width_of_accesses(name: str, dtype: str, capability: int) -> None:
    layer = sass.LAYERS[name]
    launches = [sass.built(kernel, layer, dtype, capability) for kernel in sass.launches(*layer)]
    assert sum(launch.instructions for launch in launches) <= INSTRUCTIONS[name]
    for launch in launches:
        accesses = {op for loop in launch.loops for op in loop if op[:3] in ("LDG", "STG")}
        assert all("64" in access or "128" in access for access in accesses)
        assert launch.count("CALL") == 0
        assert launch.resources["REG"] <= norm_backward.REGISTERS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("name", OF_MAPS)
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp32"), (100, "bf16")]
)
def test_instructions_of_maps(name: str, capability: int, dtype: str) -> None:
    activation, kernels, layer = sass.MAPS[name]
    launches = [
        sass.built(kernel, layer, dtype, capability, absent, activation)
        for kernel, absent in kernels.items()
    ]
    assert sum(launch.instructions for launch in launches) <= OF_MAPS[name]
    assert all(launch.count("CALL") == 0 for launch in launches)
