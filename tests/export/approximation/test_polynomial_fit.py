"""Polynomials stay near the transform where the data is, and sane where it is not."""

import pytest
import torch
from scipy.stats import norm, yeojohnson
from torch import Tensor

from retrofit.export.approximation import observed_values, polynomial_fit
from retrofit.export.approximation.observed_values import WeightedSample, gaussian
from retrofit.export.approximation.polynomial_fit import LayerFunction
from retrofit.export.power_operator import Replacement
from retrofit.layers.constant_maps import ChannelMap

INF = float("inf")


def channels(*lmbda: float, gamma: float = 1.0, beta: float = 0.1) -> ChannelMap:
    ones = torch.ones(len(lmbda), dtype=torch.float64)
    return ChannelMap(
        ones, 0 * ones, torch.tensor(lmbda, dtype=torch.float64), gamma * ones, beta * ones
    )


def plain(h: Tensor) -> WeightedSample:  # values that all count the same, and nothing beyond them
    return WeightedSample(h, torch.full((h.shape[1],), 1 / h.shape[1], dtype=h.dtype), h.shape[1])


def rms(error: Tensor, data: WeightedSample) -> float:
    return float((error.square() @ data.weight / data.weight.sum()).mean().sqrt())


def at(fit: Replacement, h: Tensor) -> Tensor:
    return fit.module()(h.T.float()).T.double()


def truth(layer: ChannelMap, h: Tensor, high: float | None = None) -> Tensor:
    rows = [
        torch.from_numpy(yeojohnson(row.numpy(), float(lmbda)))
        for row, lmbda in zip(h, layer.lmbda, strict=True)
    ]
    y = torch.stack(rows) * layer.gamma[:, None] + layer.beta[:, None]
    return y if high is None else y.clamp(0, high)


@pytest.mark.parametrize("high", [None, INF, 1.5])
@pytest.mark.parametrize("beta", [-0.5, 0.7])
@pytest.mark.parametrize(("degree", "bound"), [(2, 0.05), (6, 0.01)])
def test_fit(degree: int, bound: float, beta: float, high: float | None) -> None:
    layer, data = channels(0.3, 0.7, 1.1, 1.6, beta=beta), gaussian(4)
    target = LayerFunction(layer, data, high)
    fit = target.polynomial(degree)
    error = (at(fit, data.h) - truth(layer, data.h, high)) / target.scale
    assert (fit.form, fit.degree, fit.has_activation) == ("polynomial", degree, high is not None)
    assert fit.rms_error == pytest.approx(rms(error, data), rel=1e-6)
    assert fit.max_error == pytest.approx(float(error[:, : data.seen].abs().max()), rel=1e-6)
    assert fit.rms_error < bound
    assert at(fit, 100 * data.h).abs().max() < 20  # the polynomial's own limits


@pytest.mark.parametrize("high", [None, INF])
def test_a_few_far_values_do_not_bend_the_rest(
    high: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = torch.randn(8, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h[:, :4] *= 20
    layer = channels(*[0.3] * 8)
    limited = LayerFunction(layer, plain(h), high).polynomial(2).rms_error
    monkeypatch.setattr(polynomial_fit, "_SHARES", (1.0,))
    assert limited < 0.9 * LayerFunction(layer, plain(h), high).polynomial(2).rms_error


def test_a_root_far_below_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = gaussian(8)
    layer = channels(*[2.2] * 8, gamma=0.75, beta=5.5)
    data = plain(-normal.h[:, : normal.seen].exp())
    near = LayerFunction(layer, data, INF).polynomial(6).rms_error
    monkeypatch.setattr(polynomial_fit, "_ROOT_DISTANCE", 1e9)
    assert near < 0.5 * LayerFunction(layer, data, INF).polynomial(6).rms_error


@pytest.mark.parametrize("high", [None, INF, 6.0])
@pytest.mark.parametrize(
    ("lmbda", "gamma", "beta"),
    [
        (0.0, 1.0, 3.0),
        (2.0, 1.0, 3.0),
        (0.0, 1.0, -3.0),
        (0.5, 0.0, 1.0),
        (0.5, 0.0, 0.0),
        (0.5, 1e-3, 1.0),
    ],
)
def test_channels_without_a_root_in_range(
    lmbda: float, gamma: float, beta: float, high: float | None
) -> None:
    layer, data = channels(*[lmbda] * 3, gamma=gamma, beta=beta), gaussian(3)
    expected = truth(layer, data.h, high)
    fit = LayerFunction(layer, data, high).polynomial(5)
    error = rms(at(fit, data.h) - expected, data)
    assert error < 0.05 * max(1.0, rms(expected - expected.mean(), data))


def observed(batches: list[Tensor]) -> WeightedSample:
    node = torch.fx.Graph().placeholder("x")
    observer = observed_values.Observer(sum(map(len, batches)))
    for batch in batches:
        observer.take(node, batch)
    return observer.sample(node, 0, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(32, 3, 20, 20), (32, 3, 2, 2), (64, 3)])
def test_moments_and_extremes_of_what_was_seen(shape: tuple[int, ...]) -> None:
    batches = [
        torch.rand(shape) * torch.tensor([1.0, 2.0, 5.0]).view(3, *[1] * (len(shape) - 2))
        for _ in range(4)
    ]
    data = observed(batches)
    everything = torch.cat([batch.movedim(1, 0).flatten(1) for batch in batches], 1).double()
    seen, weight = data.h[:, : data.seen], data.weight[: data.seen]
    assert all(map(torch.equal, seen.aminmax(dim=1), everything.aminmax(dim=1)))
    assert (
        (seen @ weight / weight.sum() - everything.mean(1)).abs() < 0.1 * everything.std(1)
    ).all()


def test_values_count_for_their_share() -> None:
    data = observed(
        [torch.zeros(1, 2, 16, 16), torch.ones(3, 2, 16, 16), torch.full((60, 2, 16, 16), 2.0)]
    )
    shares = [
        float(data.weight[data.h[0] == value].sum() / data.weight.sum()) for value in (0, 1, 2)
    ]
    assert shares == pytest.approx([1 / 64, 3 / 64, 60 / 64], abs=0.02)
    x = torch.randn(8, 1, 100, 100, generator=torch.Generator().manual_seed(0))
    x.view(-1)[0] = 1000.0
    data = observed([x])
    assert float(data.weight[data.h[0] == 1000].sum()) == pytest.approx(1 / x.numel(), rel=0.01)


def test_as_much_lies_beyond_as_new_values_will() -> None:
    h = -torch.rand(
        1, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).log()  # exponential
    data = observed_values.with_tails(
        h, torch.full((4000,), 1 / 4000, dtype=torch.float64), 4000, 40
    )
    beyond = data.h[:, data.seen :]
    above, below = beyond > h.max(), beyond < h.min()
    assert above.sum() == below.sum() == beyond.shape[1] / 2
    assert float(data.weight[data.seen :].sum()) == pytest.approx(2 / 4000)
    assert (
        1.0 < float(beyond[above].mean() - h.max()) < 3.0
    )  # 1 for an exponential, twice that to be safe
    assert float(h.min() - beyond[below].mean()) < 0.1
    constant = observed([torch.full((4, 2, 5, 5), 3.0)])
    assert torch.equal(constant.h, torch.full_like(constant.h, 3.0))


def test_gaussian_quantiles() -> None:
    data = gaussian(3)
    seen, weight = data.h[0, : data.seen], data.weight[: data.seen]
    torch.testing.assert_close(
        weight.cumsum(0), torch.from_numpy(norm.cdf(seen)), atol=2e-3, rtol=0
    )
