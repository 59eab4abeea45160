from __future__ import annotations

import pytest
import torch

from retrofit.diagnose.meters import LinearityMeter, PowerMeter


def features(n: int, c: int, p: int, seed: int = 0, offset: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(n, c, 1, generator=generator) + 0.1
    return torch.randn(n, c, p, generator=generator) * scale + offset * torch.randn(1, c, 1, generator=generator)


def test_the_shares_are_those_of_the_definition_batch_by_batch() -> None:
    y = features(40, 6, 30)
    meter = PowerMeter()
    for part in y.split(7):
        meter.update(part)
    power = meter.result()
    y = y.double()
    mean, std = y.mean(2), y.std(2, correction=0)
    total = y.square().mean()
    parts = [part for of in (mean, std) for part in (of.mean(0).square().mean(), of.var(0, correction=0).mean())]
    shares = [power.p1, power.p2, power.p3, power.p4]
    assert shares == pytest.approx([float(part / total) for part in parts], rel=1e-5)
    assert sum(shares) == pytest.approx(1, abs=1e-6)


def test_one_channel_with_all_the_power() -> None:
    y = torch.zeros(3, 8, 4)
    y[:, 2] = torch.randn(3, 4)
    meter = PowerMeter()
    meter.update(y)
    assert meter.result().balance == pytest.approx(1 / 8)


def test_linearity_is_the_squared_correlation_batch_by_batch() -> None:
    x = features(16, 4, 20)
    z = torch.relu(x)
    meter = LinearityMeter()
    for a, b in zip(x.split(3), z.split(3), strict=True):
        meter.update(a, b)
    pairs = [torch.corrcoef(torch.stack([x[:, c].flatten(), z[:, c].flatten()]).double())[0, 1] for c in range(4)]
    assert meter.result() == pytest.approx(float(torch.stack(pairs).square().mean()), rel=1e-5)
