"""Error is taken off where it is cheapest, until none is left."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node

from retrofit.export.approximation.allocation import Candidate, allocations
from retrofit.export.approximation.fit import Fit


def fit(degree: int, error: float) -> Fit:
    return Fit("polynomial", degree, torch.ones(1), torch.zeros(1), list, False, error, error)


def candidate(errors: list[float], harm: float = 1.0, elements: int = 1) -> Candidate:
    fits = [fit(degree, error) for degree, error in enumerate(errors, 1)]
    return Candidate(Graph().placeholder("x"), fits, [cost_of(one) for one in fits], harm, elements)


def cost_of(fit: Fit | None) -> float:
    return 1.0 if fit is None else fit.size / 60 * (fit.size > 1)


def total(candidates: list[Candidate], chosen: dict[Node, Fit]) -> float:
    return sum(one.harm * chosen[one.layer].rms_error ** 2 for one in candidates if one.layer in chosen)


def cost(candidates: list[Candidate], chosen: dict[Node, Fit]) -> float:
    return sum(one.elements * cost_of(chosen.get(one.layer)) for one in candidates)


def degrees(candidates: list[Candidate]) -> list[list[int | None]]:
    return [
        [chosen[one.layer].size if one.layer in chosen else None for one in candidates]
        for chosen in allocations(candidates)
    ]


def test_harm_and_size_decide_who_is_next() -> None:
    errors = [0.1, 0.01, 0.001]
    found = degrees([candidate(errors), candidate(errors, harm=9.0), candidate(errors, elements=5)])
    assert found[:4] == [[1, 1, 1], [1, 2, 1], [2, 2, 1], [2, 2, 2]]
    assert found[-1].count(None) == 2  # that all stay exact is no choice


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([0.0, 0.0], [1]),
        ([0.5, 0.5, 0.5], [1]),
        ([0.5, 0.3, 0.3], [1, 2]),
        ([0.5, 0.49, 0.1], [1, 3]),
    ],
)
def test_only_what_helps(errors: list[float], expected: list[int]) -> None:
    assert degrees([candidate(errors)]) == [[degree] for degree in expected]


errors = st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3).map(lambda values: sorted(values, reverse=True))


@given(st.lists(st.tuples(errors, st.floats(0.01, 100), st.integers(1, 1000)), min_size=1, max_size=3))
def test_error_falls_and_no_cheaper_choice_has_less(layers: list[tuple[list[float], float, int]]) -> None:
    candidates = [candidate(*layer) for layer in layers]
    found = list(allocations(candidates))
    for before, after in pairwise(found):
        assert total(candidates, after) < total(candidates, before)
        assert cost(candidates, after) > cost(candidates, before)
    for chosen in found:
        ours, spent = total(candidates, chosen), cost(candidates, chosen)
        for other in product(*([*one.fits, None] for one in candidates)):
            them = {one.layer: fit for one, fit in zip(candidates, other, strict=True) if fit is not None}
            assert not (cost(candidates, them) <= spent and total(candidates, them) < ours * (1 - 1e-9) - 1e-30)
