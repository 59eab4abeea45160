"""Polynomials stay near the transform where the data is, sane where it is not, and fold away where they are affine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from scipy.stats import yeojohnson
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export.api import fold_program
from retrofit.export.approximation import polynomial
from retrofit.export.approximation.calibration import WeightedSample, gaussian
from retrofit.export.approximation.choose import Approximation, answers, approximated, choose
from retrofit.export.approximation.fit import LayerFunction
from retrofit.export.approximation.polynomial import PolynomialFitter
from retrofit.export.capture import Program, capture
from retrofit.export.nodes import Transform, calls_of, layer_of
from retrofit.export.power_forms import POWER
from retrofit.inputs import Call
from retrofit.layers.channel_map import ChannelMap
from tests.export.networks import norm, train_a_little

LMBDA = torch.linspace(-0.5, 2.4, 8).double()


def channels(lmbda: Tensor = LMBDA, gamma: float = 1.0, beta: float = 0.1) -> ChannelMap:
    ones = torch.ones(len(lmbda), dtype=torch.float64)
    return ChannelMap(ones, 0 * ones, lmbda.double(), gamma * ones, beta * ones)


def plain(h: Tensor) -> WeightedSample:
    """Values that all count the same, and nothing beyond them."""
    return WeightedSample(h, torch.full((h.shape[1],), 1 / h.shape[1], dtype=h.dtype), h.shape[1])


def rms(error: Tensor, data: WeightedSample) -> float:
    return float((error.square() @ data.weight / data.weight.sum()).mean().sqrt())


def truth(found: ChannelMap, h: Tensor) -> Tensor:
    rows = [torch.from_numpy(yeojohnson(row.numpy(), float(lmbda))) for row, lmbda in zip(h, found.lmbda, strict=True)]
    return torch.stack(rows) * found.gamma[:, None] + found.beta[:, None]


@pytest.mark.parametrize("high", [None, float("inf"), 1.5])
@pytest.mark.parametrize("beta", [-0.5, 0.0, 0.7])
@pytest.mark.parametrize("degree", [2, 3, 6])
def test_fit(degree: int, beta: float, high: float | None) -> None:
    found = channels(LMBDA[2:-2], beta=beta)
    data = gaussian(len(found.lmbda))
    target = LayerFunction(found, data, high)
    fit = PolynomialFitter(target).fit(degree)
    expected = truth(found, data.h)
    expected = expected if high is None else expected.clamp(0, high)
    error = (fit(data.h) - expected) / target.scale
    assert fit.size == degree
    assert fit.rms_error == pytest.approx(rms(error, data), rel=1e-6)
    assert fit.max_error == pytest.approx(float(error[:, : data.seen].abs().max()), rel=1e-6)
    assert fit.rms_error < {2: 0.05, 3: 0.03, 6: 0.01}[degree]
    assert fit(100 * data.h).abs().max() < 20  # the polynomial's own limits


def test_higher_degrees_are_better() -> None:
    fitter = PolynomialFitter(LayerFunction(channels(), gaussian(8), float("inf")))
    errors = [fitter.fit(degree).rms_error for degree in range(2, 9)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("high", [None, float("inf")])
def test_a_few_far_values_do_not_bend_the_rest(high: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(8, 4000, generator=generator, dtype=torch.float64)
    h[:, :4] *= 20
    data = plain(h)
    found = channels(torch.full((8,), 0.3))
    limited = PolynomialFitter(LayerFunction(found, data, high)).fit(2).rms_error
    monkeypatch.setattr(polynomial, "_SHARES", (1.0,))
    assert limited < 0.9 * PolynomialFitter(LayerFunction(found, data, high)).fit(2).rms_error


def test_a_root_far_below_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    data = gaussian(8)
    data = plain(-data.h[:, : data.seen].exp())
    found = channels(torch.full((8,), 2.2), 0.75, 5.5)
    near = PolynomialFitter(LayerFunction(found, data, float("inf"))).fit(6).rms_error
    monkeypatch.setattr(polynomial, "_ROOM", 1e9)
    assert near < 0.5 * PolynomialFitter(LayerFunction(found, data, float("inf"))).fit(6).rms_error


@pytest.mark.parametrize("high", [None, float("inf"), 6.0])
@pytest.mark.parametrize(
    ("lmbda", "gamma", "beta"),
    [
        (0.0, 1.0, 3.0),
        (2.0, 1.0, 3.0),
        (0.0, 1.0, -3.0),
        (0.5, 0.0, 1.0),
        (0.5, 0.0, 0.0),
        (0.5, 1e-3, 1.0),
        (0.5, 1.0, -7.0),
    ],
)
def test_channels_without_a_root_in_range(lmbda: float, gamma: float, beta: float, high: float | None) -> None:
    found = channels(torch.full((3,), lmbda), gamma, beta)
    data = gaussian(3)
    expected = truth(found, data.h)
    expected = expected if high is None else expected.clamp(0, high)
    error = rms(PolynomialFitter(LayerFunction(found, data, high)).fit(5)(data.h) - expected, data)
    assert error < 0.05 * max(1.0, rms(expected - expected.mean(), data))


def network(low: float, high: float, act: nn.Module) -> nn.Module:
    layer = norm(8, running_lambda=torch.linspace(low, high, 8), running_mean=torch.zeros(8))
    return nn.Sequential(nn.Conv2d(4, 8, 3), layer, act, nn.Conv2d(8, 5, 3, padding=1)).eval()


class Folded:
    """A network folded with approximations."""

    def __init__(self, model: nn.Module, images: list[Tensor], **changes: Any) -> None:
        options: dict[str, Any] = {"runtime": "onnxruntime", "degree": None, "tolerance": 0.05}
        calls = [Call((batch,)) for batch in images]
        self.program: Program = capture(model, calls[0])
        module = self.program.module
        transforms = [Transform.of(module, node) for node in calls_of(module.graph, POWER)]
        fits = choose(module, transforms, Approximation(**{**options, **changes}, fit=calls, check=calls))
        by_node = {one.node: one for one in transforms}
        self.judged = answers(module, calls, approximated(by_node, fits))
        self.fits = {layer_of(node): fit for node, fit in fits.items()}
        fold_program(self.program, fits)
        self.model, self.layers = module, self.program.layers
        self.kinds = {type(part).__name__ for part in module.modules()}

    @property
    def degrees(self) -> list[int]:
        """By layer; 9 where the transform is exact."""
        return [self.fits[name].size if name in self.fits else 9 for name in self.layers]


@pytest.fixture
def images() -> list[Tensor]:
    return list(torch.randn(3, 8, 4, 9, 9))


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.SiLU()], ids=str)
def test_lowest_degree_within_tolerance(act: nn.Module, images: list[Tensor]) -> None:
    model, degrees = network(0.2, 1.8, act), []
    for tolerance in (0.2, 0.02, 0.01 if isinstance(act, nn.SiLU) else 0.002):
        folded = Folded(model, images, tolerance=tolerance)
        with torch.no_grad():
            expected, found = model(torch.cat(images)), folded.model(torch.cat(images))
        assert (found - expected).abs().max() <= tolerance * expected.abs().max() * 1.01
        degrees += folded.degrees
        if folded.layers["1"] == "polynomial":
            assert not {"relu", "hardtanh"} & {node.name for node in folded.model.graph.nodes}
    assert degrees == sorted(degrees)
    assert degrees[0] < degrees[-1]  # 9: exact


class Shared(nn.Module):
    """One activation, called twice."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.conv, self.norm, self.act, self.last = network(low, high, nn.ReLU(inplace=True))  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.last(self.act(self.norm(self.conv(x)))))


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_what_is_judged_is_what_is_folded(runtime: str, images: list[Tensor]) -> None:
    images = [5 * x for x in images]  # far enough for parabolas to dip below zero
    folded = Folded(Shared(1.5, 3.5).eval(), images, runtime=runtime, degree=2)
    assert folded.degrees == [2]
    found = answers(folded.model, [Call((x,)) for x in images])
    torch.testing.assert_close(found, folded.judged, atol=1e-5, rtol=1e-5)


class Branches(nn.Module):
    """Two equal branches, the second of which counts for little."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = network(0.2, 1.8, nn.ReLU())
        self.quiet = copy.deepcopy(self.loud)

    def forward(self, x: Tensor) -> Tensor:
        return self.loud(x) + 0.05 * self.quiet(x)


def test_a_layer_gets_what_its_errors_cost_the_network(images: list[Tensor]) -> None:
    folded = Folded(Branches().eval(), images, tolerance=0.003)
    assert next(iter(folded.layers)).startswith("loud")
    loud, quiet = folded.degrees
    assert loud > quiet


class TwoOutputs(nn.Module):
    """A large output of an almost linear branch, and a small one of a bent one."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = network(0.999, 1.001, nn.ReLU()), network(-0.5, 2.5, nn.ReLU())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"large": 1000 * self.large(x), "small": self.small(x)}


def test_each_output_is_met_by_its_own_scale(images: list[Tensor]) -> None:
    model, x = TwoOutputs().eval(), torch.cat(images)
    folded = retrofit.fold(model, "poly", input_size=(4, 9, 9), calibrate=images, tolerance=0.02)
    with torch.no_grad():
        found, expected = folded(x[1::2])["small"], model(x[1::2])["small"]
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


def test_nearly_affine_layer_folds_away(images: list[Tensor]) -> None:
    folded = Folded(network(0.9999, 1.0001, nn.ReLU()), images)
    assert folded.layers == {"1": "folded"}
    assert folded.degrees == [1]


def test_tolerance_that_no_degree_meets(images: list[Tensor]) -> None:
    with pytest.raises(RetrofitError, match="raise `tolerance`"):
        Folded(network(-1.5, 3.5, nn.SiLU()), images, tolerance=1e-9)


def test_given_degree(images: list[Tensor]) -> None:
    folded = Folded(network(0.4, 1.6, nn.ReLU()), images, degree=3)
    assert (folded.layers, folded.degrees) == ({"1": "polynomial"}, [3])
    assert 0 < folded.fits["1"].rms_error < folded.fits["1"].max_error


def test_frozen_lambda(images: list[Tensor]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), retrofit.layers.GroupNormalNorm(2, 8, noise=0.0), nn.Conv2d(8, 3, 1))
    options: Any = {"input_size": (4, 9, 9), "calibrate": images, "tolerance": 1.0}
    folded = retrofit.fold(model.eval(), freeze_lambda=True, **options)
    h = model[0](torch.cat(images)).detach().unflatten(1, (2, 4)).flatten(2)
    lmbda = retrofit.layers.normality_norm.normality_norm(h[::2], None, None, dim=(2,), eps=1e-5)[1].lmbda
    h = (h - h.mean(2, keepdim=True)) / (h.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = torch.from_numpy(yeojohnson(h.double().numpy().ravel(), float(lmbda.mean()))).view(len(h), 8, 7, 7)
    with torch.no_grad():
        torch.testing.assert_close(folded(torch.cat(images)), model[2](expected.float()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"fold": "cubic"}, "use exact or poly"),
        ({"degree": 3}, "use `fold=.poly.`"),
        ({"runtime": "openvino"}, "use `fold=.poly.`"),
        ({"fold": "poly", "runtime": "tflite"}, "use onnxruntime or openvino"),
        ({"fold": "poly", "degree": 1}, "use 2 to 8"),
        ({"fold": "poly", "degree": 9}, "use 2 to 8"),
        ({"freeze_lambda": True}, "`calibrate`"),
        ({"fold": "poly", "calibrate": [torch.zeros(1, 4, 9, 9)]}, "`calibrate` more"),
        ({"tolerance": -1.0}, "more than 0"),
    ],
)
def test_arguments(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        retrofit.fold(network(0.4, 1.6, nn.ReLU()), input_size=(4, 9, 9), **options)


def test_public_fold_judges_on_other_images_than_it_fits(images: list[Tensor]) -> None:
    model = train_a_little(
        nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)), 6, 1.0
    )
    images = list(torch.randn(2, 16, 3, 6, 6))
    folded = retrofit.fold(model, "poly", input_size=(3, 6, 6), calibrate=images, tolerance=0.1)
    with torch.no_grad():
        expected, found = model(torch.cat(images)[1::2]), folded(torch.cat(images)[1::2])
    assert (found - expected).abs().max() <= 0.1 * expected.abs().max()
