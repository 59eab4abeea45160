from __future__ import annotations

import numpy as np
import pingouin
import pytest
import torch
from scipy import stats

from retrofit.diagnose import gaussianity


@pytest.mark.parametrize("count", [2, 3, 1000])
def test_quantiles_are_scipys(count: int) -> None:
    np.testing.assert_allclose(gaussianity._normal_quantiles(count), stats.probplot(np.zeros(count), fit=False)[0])


@pytest.mark.parametrize(("law", "low", "high"), [("norm", 0.99, 1), ("expon", 0.6, 0.9), ("uniform", 0.9, 0.97)])
def test_r2_by_distribution(law: str, low: float, high: float) -> None:
    plot = gaussianity.qq(getattr(stats, law).rvs(size=2000, random_state=0))
    assert plot is not None
    assert low <= plot.r2 <= high
    assert len(plot.theoretical) == len(plot.ordered) <= 64


@pytest.mark.parametrize("values", [np.zeros(50), np.full(50, 1e6), np.array([0.0, np.inf] * 5)])
def test_what_has_no_line(values: gaussianity.FloatArray) -> None:
    with np.errstate(invalid="ignore"):
        assert gaussianity.qq(values) is None


@pytest.mark.parametrize(
    ("count", "correlation", "scale"),
    [(3, 0.6, 1.0), (20, 0.0, 1e-4), (400, -0.999, 1e5), (400, 0.6, 1.0), (20, 1.0, 1.0)],
)
def test_henze_zirkler_is_pingouins(count: int, correlation: float, scale: float) -> None:
    x, noise = np.random.default_rng(count).normal(size=(2, count))
    pair = np.stack([x, correlation * x + (1 - correlation**2) ** 0.5 * noise], 1) * scale + 3 * scale
    assert gaussianity.henze_zirkler(pair) == pytest.approx(pingouin.multivariate_normality(pair).hz, rel=1e-6)


def test_dependence_is_zero_for_independent_channels_and_one_for_equal_ones() -> None:
    pair = np.random.default_rng(1).normal(size=(1000, 2))
    assert gaussianity.dependence(pair) == pytest.approx(0, abs=0.02)
    assert gaussianity.dependence(pair[:, [0, 0]]) == pytest.approx(1)


def test_values_of_a_sample_belong_together() -> None:
    y = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    generator = torch.Generator().manual_seed(0)
    channels = torch.tensor([0, 2])
    values = gaussianity.sample(y, channels, 5, generator)
    assert values.shape == (5, 2)
    assert set(np.diff(values, axis=1).ravel()) == {8.0}
