"""The Triton kernels in Triton's interpreter, which takes about a second a program;
`test_triton.py` runs this file.
"""

import copy
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from triton import language as tl

from retrofit.layers import (
    BatchNormalNorm2d,
    MigratedGroupNorm,
    MigratedGroupNormAct,
    ProxyNorm,
    kernels,
)
from retrofit.layers.kernels import self_test, triton_plan
from retrofit.layers.kernels import triton as triton_kernels
from retrofit.layers.kernels.self_test import Case
from retrofit.layers.kernels.triton import launcher, sums, tiles
from tests.layers.cases import gradients_when_recomputed
from tests.layers.kernels import test_agree

CPU = torch.device("cpu")

TINY = (
    Case("stretches that programs share", (2, 2, 19), (0, 2), (1, 2, 1)),
    Case("columns that programs share", (11, 5), (0,), (1, 5)),
    Case("columns", (1, 5, 4), (1,), (1, 5, 1)),
    Case("merged columns", (1, 5, 2, 2), (1, 3), (1, 1, 2, 2)),
    Case("tokens", (3, 9), (1,), (1, 9)),
    Case("rows", (2, 2, 9), (2,), (1, 2, 1)),
    Case("groups", (1, 2, 3, 4), (2, 3), (1, 2, 3, 1)),
    Case("groups, lanes", (1, 5, 2, 6), (1, 3), (1, 1, 2, 6)),
    Case("full tiles", (16, 4), (0,), (1, 4)),
)
FIRST = (Case("columns that programs share", (9, 3), (0,), (1, 3), noise=False),)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"TILE": 8, "COLUMNS": 4, "ROUNDS": 1, "LARGEST": 16}.items():
        monkeypatch.setattr(triton_plan, name, value)
    triton_plan.plan_of.cache_clear()
    monkeypatch.setattr(launcher, "processors", lambda device: 3)
    monkeypatch.setattr(self_test, "CASES", FIRST)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # as on a machine where nothing was tested


def test_the_cases_are_of_every_way() -> None:
    plans = [triton_plan.plan_of(*case[1:4], 3) for case in TINY]
    assert {(each.tile.way, each.tile.along) for each in plans} == {
        *(("stretches", along) for along in ("sets", "runs", "lanes")),
        *(("rows", along) for along in ("sets", "lanes")),
        *(("columns", along) for along in ("sets", "runs")),
    }
    assert {each.splits > 1 for each in plans} == {True, False}
    assert {each.tile.merge for each in plans} == {1, 2}
    assert [each.tile.even for each in plans].count(True) == 1


@triton.jit
def reduce_parts(Parts, K: tl.constexpr, REDUCE: tl.constexpr, shared, LOADS: tl.constexpr = 16):
    # But for the first program's
    part = sums._load_parts(Parts, K, 1, shared, LOADS)
    return tl.sum(part, 0, keep_dims=True)


@triton.jit
def elements_at(place, first_run, first_lane, TILE: tl.constexpr):
    tile = intact(place, first_run, first_lane, TILE)
    run = first_run + tl.arange(0, TILE.rows)[:, None]
    mask = tile.mask & (run + 1 < place.stop)
    return tiles.Elements(tile.start, tile.offset, mask, tile.parameter)


intact = tiles.elements_at


@pytest.mark.parametrize(
    ("module", "broken", "message"),
    [
        (sums, reduce_parts, r"triton kernels for float32 on .* fail .* is .* of its scale off"),
        (tiles, elements_at, r"fail their self-test .* the output is .* of its scale off"),
    ],
    ids=["programs that share a set", "the end of a set"],
)
def test_what_is_broken_is_found(
    module: ModuleType, broken: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, broken.__name__, broken)
    assert re.search(message, str(self_test.fault(triton_kernels, CPU, torch.float32)))


@pytest.mark.parametrize("case", TINY, ids=[case.name for case in TINY])
def test_interpreted(case: Case) -> None:
    assert self_test.compare(triton_kernels, case, CPU, torch.float32, runs=1) is None


def test_maps() -> None:
    assert self_test.compare_maps(triton_kernels, CPU, torch.float32, (1, 2, 3, 5), runs=1) is None


@pytest.mark.parametrize("fused", [False, True], ids=["two modules", "one"])
def test_a_norm_and_its_proxy_have_the_gradients_of_the_formulas(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the activation, something else uses the norm's output."""
    launched: list[str] = []

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.append(kernel.__name__)
        run(kernel, *arguments, **options)

    run = launcher.launch
    monkeypatch.setattr(launcher, "launch", launch)
    norm = (MigratedGroupNormAct if fused else MigratedGroupNorm)(2, 4, strength=0.7)
    proxy = ProxyNorm(torch.nn.SiLU(), 4, norm=norm)
    if fused:
        norm.act = proxy
    generator = torch.Generator().manual_seed(0)
    for module in (norm, proxy):
        self_test._random(module, generator)
    x = torch.randn(2, 4, 3, 5, generator=generator)

    def results(norm: Any, proxy: Any, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = norm(x)
        out = y if fused else proxy(y) + y
        # In one module, the norm holds the proxy's too
        parameters = dict.fromkeys((*norm.parameters(), *proxy.parameters()))
        return [out, *torch.autograd.grad(out.square().sum(), [x, *parameters])]

    exact = copy.deepcopy([norm, proxy])
    monkeypatch.setenv(kernels.VARIABLE, "eager")
    expected = results(*(module.double() for module in exact), x.double())
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    found = [value.double() for value in results(norm, proxy, x)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert "map_backward_kernel" not in launched
    assert launched.count("products_kernel") == (1 if fused else 2)


def test_interpreted_in_half() -> None:
    assert self_test.compare(triton_kernels, TINY[0], CPU, torch.bfloat16, runs=1) is None


def test_interpreted_at_given_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    test_agree.test_what_overflows_is_not_finite()
    test_agree.test_given_lambda_at_and_beside_its_singular_points(2.0)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_the_formulas(
    momentum: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(9, 3, 2, 1).exp()
    states = []
    for name in ("eager", "triton"):
        monkeypatch.setenv(kernels.VARIABLE, name)
        layer = BatchNormalNorm2d(3, momentum=momentum, noise=0.0, strength=0.5)
        layer(x)
        layer(x.square())
        states.append(layer.state_dict())
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)


def test_strength_zero_is_the_identity_on_what_is_standardized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(9, 3, 2, 1)
    results = []
    for module in (torch.nn.BatchNorm2d(3), BatchNormalNorm2d(3, noise=0.4, strength=0.0)):
        monkeypatch.setenv(kernels.VARIABLE, "triton")
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(x.square())
        results.append((out.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_gradients_are_of_the_noise_that_is_drawn_when_the_layer_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    layer = BatchNormalNorm2d(3, noise=0.5)
    x = torch.randn(9, 3, 2, 1)
    torch.testing.assert_close(*gradients_when_recomputed(layer, x))


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_a_compiler_sees_an_operator(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    code: list[str] = []

    def record(graph: Any, inputs: Any) -> Any:
        code.append(graph.code)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    x, grad = torch.randn(5, 2, 2, 1).exp(), torch.randn(5, 2, 2, 1)
    results = []
    for compiled in (False, True):
        layer = BatchNormalNorm2d(2, noise=noise, strength=0.5)
        run = torch.compile(layer, backend=backend, fullgraph=True) if compiled else layer
        leaf = x.clone().requires_grad_()
        torch.manual_seed(0)
        out = run(leaf)
        out.backward(grad)
        gradients = [leaf.grad, *(parameter.grad for parameter in layer.parameters())]
        results.append([out.detach(), *gradients, *layer.buffers()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    forward, backward = code
    assert forward.count("retrofit.batch_normality.default(") == 1
    assert backward.count("retrofit.batch_normality_backward.default(") == 1
