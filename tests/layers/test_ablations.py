"""What the paper compares its layer with: kinds of noise, degrees of gaussianization."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.layers.cases import CASES, EPS, Case, affine_of, as_sets, assert_same_gradient, randomise
from tests.oracles import normality as oracle

NAMES = ["batch2d", "layer two dims", "layer channels first", "group", "instance2d"]
SOME = pytest.mark.parametrize("case", [CASES[name] for name in NAMES], ids=NAMES)
TRACKED = pytest.mark.parametrize("name", ["batch2d", "sync", "instance tracked"])
XI, T = 0.3, 0.7


@pytest.fixture(autouse=True)
def _reset_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def built(case: Case, **options: Any) -> nn.Module:
    """A layer in float64 with random affine parameters, and noise."""
    return randomise(case.ours(**{case.affine: True}, **{"noise": XI, "strength": T, **options})).double()


@SOME
@pytest.mark.parametrize("kind", ["unscaled", "gaussian-dropout"])
@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_other_kinds_of_noise(case: Case, kind: str, alpha: float) -> None:
    layer = built(case, noise_kind=kind, alpha=alpha)
    x, y = (case.input(torch.float64).requires_grad_() for _ in range(2))
    torch.manual_seed(3)
    out = layer(x)
    torch.manual_seed(3)
    plain = oracle.normality_norm(as_sets(case, y), None, None, case.dim, EPS, T * alpha)
    z = torch.randn_like(plain)
    noisy = plain + T * XI * math.sqrt(2 / math.pi) * z if kind == "unscaled" else plain * (1 + T * XI * z)
    weight, bias = affine_of(case, layer)
    expected = (noisy * weight + bias).reshape(y.shape)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    assert_same_gradient(out, x, expected, y, 1e-5, 1e-7)
    assert torch.equal(layer.eval()(x), layer(x))


@SOME
@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_alpha_scales_the_step_of_lambda(case: Case, alpha: float) -> None:
    layer = built(case, noise=0.0, alpha=alpha)
    x, y = (case.input(torch.float64).requires_grad_() for _ in range(2))
    out = layer(x)
    weight, bias = affine_of(case, layer)
    expected = oracle.normality_norm(as_sets(case, y), weight, bias, case.dim, EPS, T * alpha).reshape(y.shape)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    assert_same_gradient(out, x, expected, y, 1e-5, 1e-7)


@SOME
def test_alpha_zero_leaves_the_plain_normalization_and_the_whole_noise(case: Case) -> None:
    layer = built(case, alpha=0.0)
    x = torch.cat([case.input(torch.float64)] * 64)
    weight, bias = affine_of(case, layer)
    plain = as_sets(case, x)
    plain = (plain - plain.mean(case.dim, True)) / (plain.var(case.dim, correction=0, keepdim=True) + EPS).sqrt()
    noise = (as_sets(case, layer(x).detach()) - bias) / weight - plain
    z = (noise / (T * XI * (plain - plain.mean(case.dim, True)).abs().mean(case.dim, True))).flatten()
    assert abs(float(z.mean())) < 5 / len(z) ** 0.5
    assert float(z.std()) == pytest.approx(1.0, abs=5 / len(z) ** 0.5)


@TRACKED
def test_alpha_enters_evaluation_and_changing_it_is_seen(name: str) -> None:
    case = CASES[name]
    layer = built(case, alpha=0.4)
    layer(case.input(torch.float64))
    layer.eval().requires_grad_(False)
    x = case.input(torch.float64)
    estimates = layer.running_lambda.clone()
    shape = (1, -1, 1, 1)
    h = (x - layer.running_mean.view(shape)) / (layer.running_var.view(shape) + EPS).sqrt()
    for alpha in (0.4, 0.9):
        layer.alpha = alpha
        lmbda = (1 + T * alpha * (estimates - 1)).view(shape)
        expected = oracle.power_transform(h, lmbda) * layer.weight.view(shape) + layer.bias.view(shape)
        for _ in range(2):  # computed, and from what was kept
            torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(layer.running_lambda, estimates)


@pytest.mark.parametrize("kind", ["unscaled", "gaussian-dropout"])
@pytest.mark.parametrize("name", ["batch2d", "layer"])
def test_half_precision_and_compilation(kind: str, name: str) -> None:
    case = CASES[name]
    layer = case.ours(noise=XI, noise_kind=kind, alpha=0.4)
    assert layer(case.input(torch.bfloat16)).dtype == torch.bfloat16
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = case.input().requires_grad_()
    torch.manual_seed(3)
    expected = layer(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)


def test_the_options_show_where_they_are_not_the_papers() -> None:
    assert repr(CASES["group"].ours()).endswith("noise=0.4)")
    shown = repr(CASES["group"].ours(noise_kind="unscaled", alpha=0.5))
    assert shown.endswith("noise=0.4, noise_kind=unscaled, alpha=0.5)")
