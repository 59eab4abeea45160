from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrofit.diagnose.linearity import LinearityMeter
from retrofit.diagnose.power import PowerMeter


def features(n: int, c: int, p: int, seed: int = 0, offset: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(n, c, 1, generator=generator) + 0.1
    return torch.randn(n, c, p, generator=generator) * scale + offset * torch.randn(1, c, 1, generator=generator)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7), st.integers(0, 99))
def test_the_shares_sum_to_one(n: int, c: int, p: int, seed: int) -> None:
    meter = PowerMeter()
    meter.update(features(n, c, p, seed))
    power = meter.result()
    assert power.p1 + power.p2 + power.p3 + power.p4 == pytest.approx(1, abs=1e-6)
    assert 1 / c - 1e-6 <= power.balance <= 1 + 1e-6


def test_the_shares_are_those_of_the_definition() -> None:
    y = features(40, 6, 30)
    meter = PowerMeter()
    meter.update(y)
    power = meter.result()
    y = y.double()
    mean, std = y.mean(2), y.std(2, correction=0)
    total = y.square().mean()
    assert power.p1 == pytest.approx(float(mean.mean(0).square().mean() / total), rel=1e-5)
    assert power.p2 == pytest.approx(float(mean.var(0, correction=0).mean() / total), rel=1e-5)
    assert power.p3 == pytest.approx(float(std.mean(0).square().mean() / total), rel=1e-5)
    assert power.p4 == pytest.approx(float(std.var(0, correction=0).mean() / total), rel=1e-5)


def test_batch_by_batch_is_the_whole_set() -> None:
    y = features(24, 3, 10)
    whole, parts = PowerMeter(), PowerMeter()
    whole.update(y)
    for part in y.split(5):
        parts.update(part)
    for key, value in vars(whole.result()).items():
        assert getattr(parts.result(), key) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(
    ("y", "share"),
    [
        (torch.full((4, 2, 5), 3.0), "p1"),
        (torch.tensor([-1.0, 1.0]).view(2, 1, 1).expand(2, 3, 4), "p2"),
        (torch.tensor([-1.0, 1.0]).view(1, 1, 2).expand(3, 3, 2), "p3"),
    ],
)
def test_extremes(y: torch.Tensor, share: str) -> None:
    meter = PowerMeter()
    meter.update(y)
    assert getattr(meter.result(), share) == pytest.approx(1)


def test_one_channel_with_all_the_power() -> None:
    y = torch.zeros(3, 8, 4)
    y[:, 2] = torch.randn(3, 4)
    meter = PowerMeter()
    meter.update(y)
    assert meter.result().balance == pytest.approx(1 / 8)


def test_linearity_is_the_squared_correlation() -> None:
    x = features(16, 4, 20)
    z = torch.relu(x)
    whole, parts = LinearityMeter(), LinearityMeter()
    whole.update(x, z)
    for a, b in zip(x.split(3), z.split(3), strict=True):
        parts.update(a, b)
    pairs = [torch.corrcoef(torch.stack([x[:, c].flatten(), z[:, c].flatten()]).double())[0, 1] for c in range(4)]
    assert whole.result() == pytest.approx(float(torch.stack(pairs).square().mean()), rel=1e-5)
    assert parts.result() == pytest.approx(whole.result(), rel=1e-9)


def test_an_activation_far_from_its_bend_is_linear() -> None:
    x = features(8, 3, 30) + torch.tensor([50.0, -50.0, 50.0]).view(1, 3, 1)
    meter = LinearityMeter()
    meter.update(x, torch.relu(x))
    assert meter.result() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("meter", [PowerMeter(), LinearityMeter()])
def test_nothing_measured(meter: PowerMeter | LinearityMeter) -> None:
    with pytest.raises(ValueError, match="no images"):
        meter.result()
