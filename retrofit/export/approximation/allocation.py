"""Which layers get how good an approximation: what error a network can bear, spread to where it is cheapest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Node

from retrofit.export.approximation.fit import Fit

_FALL = 1.25  # of the squared error, from one choice to the next


@dataclass(frozen=True)
class Candidate:
    """What a layer may become.

    Attributes:
        layer: The layer.
        fits: Approximations of it.
        costs: Of each, an element, as a share of what the exact transform costs; the first is free.
        harm: What a squared error of the layer, relative to its output's variance, adds to that of the network.
        elements: Of its output.
    """

    layer: Node
    fits: Sequence[Fit]
    costs: Sequence[float]
    harm: float
    elements: int

    def error(self, fit: Fit) -> float:
        """Return what a fit adds to the squared error of the network."""
        return self.harm * fit.rms_error**2

    def upgrades(self) -> list[tuple[float, Fit | None, float]]:
        """Return the steps from the first fit to the exact transform (None) that take off error, best first.

        Each with the error that it takes off by its cost, what it leads to, and the error that is left then: the lower
        convex hull of error over cost.
        """
        points = [(self.elements * cost, self.error(fit), fit) for fit, cost in zip(self.fits, self.costs, strict=True)]
        ends: list[tuple[float, float, Fit | None]] = [*points, (float(self.elements), 0.0, None)]
        hull = ends[:1]
        while hull[-1][1] > 0:
            cost, error, _ = hull[-1]
            hull.append(max((end for end in ends if end[0] > cost), key=lambda end: (error - end[1]) / (end[0] - cost)))
        return [((a[1] - b[1]) / (b[0] - a[0]), b[2], b[1]) for a, b in pairwise(hull)]


def allocations(candidates: Sequence[Candidate]) -> Iterator[dict[Node, Fit]]:
    """Yield choices of approximations for the layers, from the cheapest on, with ever less squared error.

    A layer that is missing is to stay exact; that all of them do is not among the choices.
    """
    state: dict[Node, Fit | None] = {one.layer: one.fits[0] for one in candidates}
    errors = {one.layer: one.error(one.fits[0]) for one in candidates}
    steps = [(worth, one.layer, fit, error) for one in candidates for worth, fit, error in one.upgrades()]
    steps.sort(key=lambda step: step[0])
    while chosen := {layer: fit for layer, fit in state.items() if fit is not None}:
        yield chosen
        if not steps:
            return
        level = sum(errors.values()) / _FALL
        while steps and sum(errors.values()) > level:
            _, layer, state[layer], errors[layer] = steps.pop()
