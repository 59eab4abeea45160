import numpy as np
import pingouin
import pytest
import torch
from scipy import stats

from retrofit.diagnose import meters
from retrofit.diagnose.meters import LinearityMeter, PowerMeter


@pytest.mark.parametrize(
    ("law", "count"), [("norm", 2), ("uniform", 3), ("expon", 50), ("norm", 2000)]
)
def test_a_q_q_plot_is_scipys(law: str, count: int) -> None:
    sample = getattr(stats, law).rvs(size=count, random_state=0)
    plot, ((theoretical, ordered), (_, _, r)) = meters.qq(sample), stats.probplot(sample)
    assert plot.r2 == pytest.approx(r**2)
    places = np.searchsorted(theoretical, plot.theoretical - 1e-9)
    assert len(set(places)) == len(plot.ordered) == min(count, 64)
    np.testing.assert_allclose(plot.theoretical, theoretical[places])
    np.testing.assert_allclose(plot.ordered, (ordered[places] - sample.mean()) / sample.std())


@pytest.mark.parametrize("values", [np.zeros(50), np.full(50, 1e6), np.array([0.0, np.inf] * 5)])
def test_what_has_no_line(values: meters.FloatArray) -> None:
    with np.errstate(invalid="ignore"):
        assert meters.qq(values) is None


@pytest.mark.parametrize(
    ("count", "correlation", "scale"),
    [(3, 0.6, 1.0), (20, 0.0, 1e-4), (400, -0.999, 1e5), (400, 0.6, 1.0), (20, 1.0, 1.0)],
)
def test_henze_zirkler_is_pingouins(count: int, correlation: float, scale: float) -> None:
    x, noise = np.random.default_rng(count).normal(size=(2, count))
    pair = (
        np.stack([x, correlation * x + (1 - correlation**2) ** 0.5 * noise], 1) * scale + 3 * scale
    )
    assert meters.henze_zirkler(pair) == pytest.approx(
        pingouin.multivariate_normality(pair).hz, rel=1e-6
    )


def test_dependence_is_zero_for_independent_channels_and_one_for_equal_ones() -> None:
    pair = np.random.default_rng(1).normal(size=(1000, 2))
    assert meters.dependence(pair) == pytest.approx(0, abs=0.02)
    assert meters.dependence(pair[:, [0, 0]]) == pytest.approx(1)


def test_values_of_a_sample_belong_together() -> None:
    y = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    values = meters.sample(y[:, [0, 2]], 5, torch.Generator().manual_seed(0))
    assert values.shape == (5, 2)
    assert set(np.diff(values, axis=1).ravel()) == {8.0}


def features(n: int, c: int, p: int) -> torch.Tensor:
    return torch.randn(n, c, p) * (torch.rand(n, c, 1) + 0.1) + 0.3 * torch.randn(1, c, 1)


def test_the_shares_are_those_of_the_definition_batch_by_batch() -> None:
    y = features(40, 6, 30)
    meter = PowerMeter()
    for part in y.split(7):
        meter.update(part)
    power = meter.result()
    y = y.double()
    mean, std = y.mean(2), y.std(2, correction=0)
    total = y.square().mean()
    parts = [
        part
        for of in (mean, std)
        for part in (of.mean(0).square().mean(), of.var(0, correction=0).mean())
    ]
    shares = [power.p1, power.p2, power.p3, power.p4]
    assert shares == pytest.approx([float(part / total) for part in parts], rel=1e-5)
    by_channel = y.square().mean((0, 2))
    assert power.balance == pytest.approx(
        float(by_channel.sum() ** 2 / (6 * by_channel.square().sum())), rel=1e-5
    )


def test_linearity_is_the_squared_correlation_batch_by_batch() -> None:
    x = features(16, 4, 20)
    z = torch.relu(x)
    meter = LinearityMeter()
    for a, b in zip(x.split(3), z.split(3), strict=True):
        meter.update(a, b)
    pairs = [
        torch.corrcoef(torch.stack([x[:, c].flatten(), z[:, c].flatten()]).double())[0, 1]
        for c in range(4)
    ]
    assert meter.result() == pytest.approx(float(torch.stack(pairs).square().mean()), rel=1e-5)
