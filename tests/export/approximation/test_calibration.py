"""What layers see is sampled with its extremes, each value counts for its share, and tails are as long as they look."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from retrofit.export.approximation.calibration import Observer, WeightedSample, gaussian, with_tails


def observed(batches: list[Tensor]) -> WeightedSample:
    observer = Observer(sum(map(len, batches)))
    for batch in batches:
        observer.take("layer", batch)
    return observer.samples()["layer"]


@pytest.mark.parametrize("shape", [(32, 3, 20, 20), (32, 3, 2, 2), (64, 3)])
def test_moments_and_extremes_of_what_was_seen(shape: tuple[int, ...]) -> None:
    batches = [torch.rand(shape) * torch.tensor([1.0, 2.0, 5.0]).view(3, *[1] * (len(shape) - 2)) for _ in range(4)]
    data = observed(batches)
    everything = torch.cat([batch.movedim(1, 0).flatten(1) for batch in batches], 1).double()
    seen, weight = data.h[:, : data.seen], data.weight[: data.seen]
    assert torch.equal(seen.amax(1), everything.amax(1))
    assert torch.equal(seen.amin(1), everything.amin(1))
    mean = seen @ weight / weight.sum()
    assert ((mean - everything.mean(1)).abs() < 0.1 * everything.std(1)).all()


def test_batches_count_by_their_size() -> None:
    batches = [torch.zeros(1, 2, 16, 16), torch.ones(3, 2, 16, 16), torch.full((60, 2, 16, 16), 2.0)]
    data = observed(batches)
    shares = [float(data.weight[data.h[0] == value].sum() / data.weight.sum()) for value in (0, 1, 2)]
    assert shares == pytest.approx([1 / 64, 3 / 64, 60 / 64], abs=0.02)


def test_extremes_count_for_no_more_than_they_are() -> None:
    x = torch.randn(8, 1, 100, 100, generator=torch.Generator().manual_seed(0))
    x.view(-1)[0] = 1000.0
    data = observed([x])
    assert float(data.weight[data.h[0] == 1000].sum()) == pytest.approx(1 / x.numel(), rel=0.01)


def test_as_much_lies_beyond_as_new_values_will() -> None:
    generator = torch.Generator().manual_seed(0)
    h = -torch.rand(1, 4000, generator=generator, dtype=torch.float64).log()  # exponential
    data = with_tails(h, torch.full((4000,), 1 / 4000, dtype=torch.float64), 4000, 40)
    beyond = data.h[:, data.seen :]
    above, below = beyond > h.max(), beyond < h.min()
    assert above.sum() == below.sum() == beyond.shape[1] / 2
    assert float(data.weight[data.seen :].sum()) == pytest.approx(2 / 4000)
    excess = float(beyond[above].mean() - h.max())
    assert 1.0 < excess < 3.0  # 1 for an exponential, twice that to be safe
    assert float(h.min() - beyond[below].mean()) < 0.1


def test_constant_channels_have_no_tails() -> None:
    data = observed([torch.full((4, 2, 5, 5), 3.0)])
    assert torch.equal(data.h, torch.full_like(data.h, 3.0))


def test_affine() -> None:
    data = gaussian(2)
    moved = data.affine(torch.tensor([2.0, -1.0]), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(moved.h[0], 2 * data.h[0] + 0.5)
    torch.testing.assert_close(moved.h[1], 1 - data.h[1])
    assert moved.seen == data.seen


def test_gaussian_quantiles() -> None:
    data = gaussian(3)
    seen, weight = data.h[0, : data.seen], data.weight[: data.seen]
    assert float(weight.sum()) == pytest.approx(1)
    torch.testing.assert_close(weight.cumsum(0), torch.from_numpy(norm.cdf(seen)), atol=2e-3, rtol=0)
