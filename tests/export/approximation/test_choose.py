"""Approximations of whole networks: as little computation as the tolerance allows, where errors
cost least.
"""

import copy
import math
from collections.abc import Iterable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import yeojohnson
from torch import Tensor, nn
from torch.fx import Graph

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export.approximation.choose import Candidate, allocations, choose, outputs_of
from retrofit.export.capture import capture
from retrofit.export.graph_nodes import layer_of
from retrofit.export.graph_passes import fold_program
from retrofit.export.power_operator import Replacement
from retrofit.inputs import Call
from tests.export.networks import norm
from tests.layers.cases import normality_norm


def network(low: float, high: float, act: nn.Module) -> nn.Sequential:
    layer = norm(8, running_lambda=torch.linspace(low, high, 8), running_mean=torch.zeros(8))
    return nn.Sequential(nn.Conv2d(4, 8, 3), layer, act, nn.Conv2d(8, 5, 3, padding=1)).eval()


class Folded:  # a network folded with approximations
    def __init__(self, model: nn.Module, images: list[Tensor], **how: Any) -> None:
        calls = [Call((batch,)) for batch in images]
        program = capture(model, calls[0])
        fits = choose(program.module, how.get("degree"), how.get("tolerance", 0.05), calls, calls)
        self.judged = [outputs_of(program.module, call, fits) for call in calls]
        self.fits = {layer_of(node): fit for node, fit in fits.items()}
        fold_program(program, fits)
        self.model, self.layers = program.module, program.layers
        self.degrees = [
            self.fits[name].degree if name in self.fits else 9 for name in self.layers
        ]  # 9: exact


@pytest.fixture
def images() -> list[Tensor]:
    return list(torch.randn(3, 8, 4, 9, 9))


@pytest.mark.parametrize("act", [nn.ReLU6(), nn.SiLU()], ids=str)
def test_lowest_degree_within_tolerance(act: nn.Module, images: list[Tensor]) -> None:
    model, degrees = network(0.2, 1.8, act), []
    for tolerance in (0.2, 0.02, 0.01 if isinstance(act, nn.SiLU) else 0.002):
        folded = Folded(model, images, tolerance=tolerance)
        expected, found = model(torch.cat(images)).detach(), folded.model(torch.cat(images))
        assert (found - expected).abs().max() <= tolerance * expected.abs().max() * 1.01
        degrees.append(folded.degrees[0])
        if folded.layers["1"] == "polynomial":  # which includes a ReLU
            names = {node.name for node in folded.model.graph.nodes}
            assert bool({"hardtanh", "silu"} & names) == isinstance(act, nn.SiLU)
    assert degrees == sorted(degrees)
    assert degrees[0] < degrees[-1]  # 9: exact


def test_what_is_judged_is_what_is_folded(images: list[Tensor]) -> None:
    images = [5 * x for x in images]  # far enough for parabolas to dip below zero
    model = network(1.5, 3.5, nn.ReLU(inplace=True))
    model.append(model[2])  # one activation, called twice
    folded = Folded(model, images, degree=2)
    assert folded.degrees == [2]
    found = [outputs_of(folded.model, Call((x,))) for x in images]
    torch.testing.assert_close(found, folded.judged, atol=1e-5, rtol=1e-5)


class Branches(nn.ModuleList):  # two branches, the second of which counts for little
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x) + 0.05 * self[1](x)


def test_a_layer_gets_what_its_errors_cost_the_network(images: list[Tensor]) -> None:
    branch = network(0.2, 1.8, nn.ReLU())
    folded = Folded(Branches([branch, copy.deepcopy(branch)]).eval(), images, tolerance=0.003)
    assert next(iter(folded.layers)).startswith("0")
    loud, quiet = folded.degrees
    assert loud > quiet


class TwoOutputs(nn.ModuleList):  # a large output, and a small one with scores that are ruled out
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        small = self[1](x)
        return {
            "large": 1000 * self[0](x),
            "small": torch.cat([small, torch.full_like(small, -math.inf)], 1),
        }


def test_each_output_is_met_by_its_own_finite_scale_on_images_that_were_not_fitted(
    images: list[Tensor],
) -> None:
    # The large output is almost linear, the small one bent
    model = TwoOutputs([network(0.999, 1.001, nn.ReLU()), network(-0.5, 2.5, nn.ReLU())]).eval()
    x, options = torch.cat(images), {"input_size": (4, 9, 9), "calibrate": images}
    folded = retrofit.fold(model, "poly", tolerance=0.02, **options)  # type: ignore[arg-type]
    found, expected = folded(x[1::2])["small"], model(x[1::2])["small"].detach()
    assert found[:, 5:].isneginf().all()
    assert (found - expected)[:, :5].abs().max() <= 0.02 * expected[:, :5].abs().max()
    with pytest.raises(RetrofitError, match="raise `tolerance`"):
        retrofit.fold(model, "poly", tolerance=1e-9, **options)  # type: ignore[arg-type]


def test_nearly_affine_layer_folds_away(images: list[Tensor]) -> None:
    folded = Folded(network(0.9999, 1.0001, nn.ReLU()), images)
    assert (folded.layers, folded.degrees) == ({"1": "folded"}, [1])
    folded = Folded(network(0.4, 1.6, nn.ReLU()), images, degree=3)
    assert (folded.layers, folded.degrees) == ({"1": "polynomial"}, [3])
    assert 0 < folded.fits["1"].rms_error < folded.fits["1"].max_error


def test_frozen_lambda(images: list[Tensor]) -> None:
    layer = retrofit.layers.GroupNormalNorm(2, 8, noise=0.0, alpha=0.5, strength=0.8)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), layer, nn.Conv2d(8, 3, 1))
    options: Any = {"input_size": (4, 9, 9), "calibrate": images, "tolerance": 1.0}
    folded = retrofit.fold(model.eval(), freeze_lambda=True, **options)
    h = model[0](torch.cat(images)).detach().unflatten(1, (2, 4)).flatten(2)
    lmbda = normality_norm(h[::2], None, None, dim=(2,), eps=1e-5)[1].lmbda
    h = (h - h.mean(2, keepdim=True)) / (h.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    mean = 1 + 0.5 * 0.8 * float(lmbda.mean() - 1)
    expected = torch.from_numpy(yeojohnson(h.double().numpy().ravel(), mean)).view(len(h), 8, 7, 7)
    torch.testing.assert_close(
        folded(torch.cat(images)), model[2](expected.float()).detach(), atol=1e-4, rtol=1e-4
    )


def test_a_runtime_is_taken_with_a_warning(tmp_path: Any) -> None:
    with pytest.warns(DeprecationWarning, match="`runtime` has no effect"):
        retrofit.fold(nn.ReLU(), input_size=(4, 9, 9), runtime="openvino")
    with pytest.warns(DeprecationWarning, match="`runtime` has no effect"):
        retrofit.export_onnx(
            nn.ReLU(), tmp_path / "a.onnx", input_size=(4, 9, 9), runtime="openvino"
        )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        *(({"degree": 3}, "add `fold=.poly.`"), ({"freeze_lambda": True}, "`calibrate`")),
        *(({"fold": "poly", "degree": degree}, "use 2 to 8") for degree in (1, 9)),
        ({"fold": "poly", "calibrate": [torch.zeros(1, 4, 9, 9)]}, "give 2 or more `calibrate`"),
        (
            {"calibrate": [torch.zeros(2, 4, 8, 9)]},
            r"of one size, \(N, 4, 9, 9\); got images of \(4, 8, 9\)$",
        ),
        (
            {"dynamic_size": True, "calibrate": [torch.zeros(1, 4, n, 9) for n in (8, 9)]},
            r"8, 9\) and \(4, 9, 9\)$",
        ),
        *(({"fold": "cubic"}, "use exact or poly"), ({"batch": 0}, "no number of samples")),
        (
            {"batch": 2, "calibrate": [torch.zeros(3, 4, 9, 9)]},
            "give 4 or more `calibrate` images, not 3",
        ),
        *(
            ({"tolerance": tolerance}, f"more than 0, not {tolerance}; 0.0001 is usual")
            for tolerance in (-1.0, math.inf, math.nan)
        ),
        *(({"batch": batch}, "samples take .* GiB .*; give fewer") for batch in (10**6, 10**30)),
        (
            {"precision": "int8", "calibrate": [torch.zeros(1, 4, 9, 9)]},
            "give 2 or more `calibrate` images, not 1",
        ),
        ({"precision": "int4"}, "no precision 'int4'; use float32, float16, int8"),
        *(({"opset": opset}, "use 18 to 22") for opset in (17, 23)),
    ],
)
def test_arguments(options: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=complaint):
        retrofit.export_onnx(
            network(0.4, 1.6, nn.ReLU()), tmp_path / "a.onnx", input_size=(4, 9, 9), **options
        )


def options(errors: list[float], harm: float = 1.0, elements: int = 1) -> list[Candidate]:
    fits = [
        Replacement("", size, torch.ones(1), torch.zeros(1), [], False, e, e)
        for size, e in enumerate(errors, 1)
    ]
    found = [
        Candidate(fit, elements * fit.degree / 60 * (fit.degree > 1), harm * fit.rms_error**2)
        for fit in fits
    ]
    return [*found, Candidate(None, elements, 0.0)]


def sizes(layers: list[list[Candidate]]) -> list[list[int | None]]:
    nodes = {Graph().placeholder("x"): layer for layer in layers}
    return [
        [fits[node].degree if node in fits else None for node in nodes]
        for fits in allocations(nodes)
    ]


def test_harm_and_size_decide_who_is_next() -> None:
    errors = [0.1, 0.01, 0.001]
    found = sizes([options(errors), options(errors, harm=9.0), options(errors, elements=5)])
    assert found[:4] == [[1, 1, 1], [1, 2, 1], [2, 2, 1], [2, 2, 2]]
    assert found[-1].count(None) == 2  # that all stay exact is no choice
    for error in (math.nan, math.inf):  # of which nothing can be taken off
        assert sizes([options([error, 0.1])]) == [[1]]
    for errors, expected in (
        ([0.0, 0.0], [1]),
        ([0.5, 0.3, 0.3], [1, 2]),
        ([0.5, 0.49, 0.1], [1, 3]),
    ):
        assert sizes([options(errors)]) == [[size] for size in expected]


ERRORS = st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3).map(
    lambda values: sorted(values, reverse=True)
)


@given(
    st.lists(st.tuples(ERRORS, st.floats(0.01, 100), st.integers(1, 1000)), min_size=1, max_size=3)
)
def test_error_falls_and_no_cheaper_choice_has_less(
    given_layers: list[tuple[list[float], float, int]],
) -> None:
    layers = [options(*layer) for layer in given_layers]

    def total(choice: Iterable[Candidate]) -> tuple[float, float]:
        chosen = list(choice)
        return sum(option.error for option in chosen), sum(option.cost for option in chosen)

    found = [
        total(layer[(size or 4) - 1] for layer, size in zip(layers, row, strict=True))
        for row in sizes(layers)
    ]
    for (error, cost), (next_error, next_cost) in pairwise(found):
        assert next_error < error
        assert next_cost > cost
    for error, cost in map(total, product(*layers)):
        assert not any(
            cost <= ours_cost and error < ours * (1 - 1e-9) - 1e-30 for ours, ours_cost in found
        )
