"""The power transform and the estimate of lambda against scipy, and on the sets that break a plain
Newton step.
"""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn

from retrofit import layers
from retrofit.layers import power_transform
from retrofit.layers.normality_mixin import lambda_values
from tests import oracles as oracle
from tests.layers.cases import normality_norm

SETS = {
    "gaussian": lambda g: g.normal(size=4000), "exponential": lambda g: g.exponential(size=4000),
    "uniform": lambda g: g.uniform(size=4000), "negative lognormal": lambda g: -g.lognormal(0, 0.5, size=4000),
    "heavy tails": lambda g: g.standard_t(4, size=4000),
    # as trained channels, which no bound may hold
    "skewed": lambda g: g.beta(0.3, 3, size=6000), "negative, skewed": lambda g: -g.gamma(0.2, size=6000),
}  # fmt: skip


def standardized(x: np.ndarray, variance: float = 1.0) -> Tensor:
    return torch.tensor((x - x.mean()) / x.std() * np.sqrt(variance))


def step_of(h: Tensor) -> tuple[Tensor, power_transform.StepGradient]:
    return power_transform.first_step(h, power_transform.Reductions((0,)))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("variance", [1.0, 0.8, 0.1])
def test_the_step_is_newtons_by_scipys_likelihood(name: str, variance: float) -> None:
    h = standardized(SETS[name](np.random.default_rng(0)), variance)
    slope, curvature = oracle.likelihood_derivatives(h.numpy())
    step, gradient = step_of(h)
    assert step.item() == pytest.approx(
        -slope / max(curvature, power_transform.MIN_CURVATURE), rel=1e-4, abs=1e-5
    )
    assert gradient.by_m1.item() == pytest.approx(
        1 / max(curvature, power_transform.MIN_CURVATURE), rel=1e-4
    )


@pytest.mark.parametrize(
    ("values", "variance"),
    [
        (np.random.default_rng(3).gamma(2.0, size=50), 0.7),
        (np.repeat([0.0, 1.0], [16, 3]), 0.3),  # whose L'' is floored
        (np.repeat([0.0, 1.0, -0.1], [998, 1, 1]), 1.0),  # whose step a bound holds
    ],
    ids=["free", "floored", "held"],
)
def test_step_derivative_is_autograds(values: np.ndarray, variance: float) -> None:
    h = standardized(values, variance).requires_grad_()
    (expected,) = torch.autograd.grad(step_of(h)[0].sum(), h)
    (_, gradient), a = step_of(h.detach()), h.detach().abs()
    ours = power_transform.step_derivative(h.detach(), a, a.log1p(), 1 / (1 + a), gradient) / len(h)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


HARD = {
    "dead": torch.zeros(64),
    "constant": torch.full((64,), 3.7),
    "two values": torch.tensor([0.0, 1.0]).repeat(32),
    "one different": torch.nn.functional.one_hot(torch.tensor(0), 4096).float(),
    "bimodal": torch.cat([torch.full((32,), -1.0), torch.full((32,), 1.0)])
    + torch.linspace(0, 1e-3, 64),
    "lopsided bimodal": torch.cat([torch.zeros(60), torch.ones(4)]),
    "below eps": torch.linspace(0, 1, 64) * 1e-5,
    "far below eps": torch.linspace(0, 1, 64) * 1e-12,
    "outlier": torch.cat([torch.linspace(-1, 1, 255), torch.tensor([1e4])]),
    "outliers of both signs": torch.cat([torch.linspace(-1, 1, 4094), torch.tensor([1e4, -7e3])]),
    "cauchy": torch.tan(torch.linspace(-1.57, 1.57, 1001)),
    "relu": torch.linspace(-3, 1, 200).relu(),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_sets_stay_finite_and_within_the_stretch_and_are_torchs_without_spread(
    name: str,
) -> None:
    x, plain = (HARD[name].clone().requires_grad_() for _ in range(2))
    out, found = normality_norm(x, None, None, dim=(0,), eps=1e-5)
    for values in (out, nn.functional.layer_norm(plain, x.shape)):
        (values * torch.linspace(-1, 1, len(x))).sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    h = (x.detach() - found.mean) / (found.var + 1e-5).sqrt()
    stretch = ((found.lmbda - 1) * torch.where(h < 0, -1.0, 1.0) * h.abs().log1p()).exp()
    assert stretch.max() <= math.exp(power_transform.LOG_STRETCH) * 1.001
    if name in ("dead", "constant"):
        assert found.lmbda.item() == 1.0
        torch.testing.assert_close(x.grad, plain.grad, rtol=1e-5, atol=1e-4)


LMBDAS = [-3.0, -1.0, -1e-6, 0.0, 1e-9, 1e-4, 0.4, 1.0, 1.6, 2 - 1e-5, 2.0, 2 + 1e-9, 3.3, 5.0]


@pytest.mark.parametrize("lmbda", LMBDAS)
def test_matches_scipy(lmbda: float) -> None:
    h = np.concatenate([np.linspace(-50, 50, 2001), [0.0, 1e-12, -1e-12, np.inf, -np.inf, np.nan]])
    ours = layers.yeo_johnson(torch.tensor(h), torch.tensor(lmbda, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(ours, oracle.psi(h, lmbda), rtol=1e-9, atol=1e-24)


@pytest.mark.parametrize("lmbda", LMBDAS)
def test_gradients(lmbda: float) -> None:
    h = torch.tensor(
        [-4.0, -0.7, -1e-3, 0.0, 2e-3, 0.3, 6.0], dtype=torch.float64, requires_grad=True
    )
    lam = torch.full_like(h, lmbda).requires_grad_()
    assert torch.autograd.gradcheck(layers.yeo_johnson, (h, lam))
    assert torch.autograd.gradgradcheck(layers.yeo_johnson, (h, lam))


@pytest.mark.parametrize(
    "u", [0.0, 1e-8, 1e-3, 0.3, 0.4999, 0.5001, 1.0, 5.0, -0.4999, -0.5001, -20.0]
)
def test_lmbda_derivative_has_no_cancellation(u: float) -> None:
    """Against the defining integral of x * exp(u * x), whose quadrature does not cancel."""
    expected, _ = quad(lambda x: x * np.exp(u * x), 0, 1)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        at = torch.tensor(u, dtype=dtype)
        got = power_transform.lmbda_derivative(at, torch.ones((), dtype=dtype), at.expm1()).item()
        assert got == pytest.approx(expected, rel=tolerance)


IMAGES = torch.distributions.Gamma(2.0, 1.0).sample((6, 8, 5, 5))


def test_running_averages_need_no_images() -> None:
    model = nn.Sequential(layers.BatchNormalNorm2d(8), nn.ReLU(), layers.BatchNormalNorm2d(8))
    model[2].running_lambda.fill_(0.5)
    values = lambda_values(model)
    assert list(values) == ["0", "2"]
    assert values["2"].tolist() == [0.5] * 8


@pytest.mark.parametrize(
    ("layer", "sets"),
    [
        (layers.GroupNormalNorm(2, 8), lambda x: x.reshape(12, -1)),
        (layers.InstanceNormalNorm2d(8), lambda x: x.reshape(48, -1)),
        (layers.LayerNormalNorm((8, 5, 5)), lambda x: x.reshape(6, -1)),
        (layers.LayerNormalNorm2d(8), lambda x: x.permute(0, 2, 3, 1).reshape(150, 8)),
    ],
    ids=["group", "instance", "layer", "layer2d"],
)
def test_one_estimate_for_each_normalized_set(layer: nn.Module, sets: object) -> None:
    (found,) = lambda_values(nn.Sequential(layer).eval(), IMAGES).values()
    # Batch normalization with each set as a channel estimates the same lambda.
    rows = sets(IMAGES)  # type: ignore[operator]
    batch = layers.BatchNormalNorm1d(len(rows), momentum=1.0)
    batch(rows.T)
    torch.testing.assert_close(found, batch.running_lambda, rtol=1e-4, atol=1e-4)
    assert found.std() > 0
