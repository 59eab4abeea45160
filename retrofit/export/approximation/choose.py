"""Choose how closely each power transform is approximated, judged on images.

The error that the network can bear goes to the layers where it saves most computation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from retrofit.errors import RetrofitError
from retrofit.export.approximation.observed_values import Observer
from retrofit.export.approximation.polynomial_fit import MAX_DEGREE, LayerFunction
from retrofit.export.graph_nodes import shape_of
from retrofit.export.power_operator import POWER, Replacement, Transform
from retrofit.inputs import Call
from retrofit.utils.output_tensors import largest_gap, scale_of, tensors_in

# The cost of a polynomial for each degree above 1, as a share of the exact transform's, as
# benchmarks/export_latency.py shows for tf_efficientnet_lite0
_COST_OF_DEGREE = 0.125
# With a degree given: the error of a line, below which it is good enough
_AFFINE = 1e-3
# Images on which the effect of a layer's error is measured
_FEW = 8
# Share of the tolerance that is used: the folded network rounds differently from the one tried here
_USED_SHARE = 0.98
# The scale of an output that is zero
_ZERO = 1e-30
# The squared error falls by this factor or more from one choice to the next
_FALL = 1.25

Functions = Mapping[Node, LayerFunction]


@torch.no_grad()
def choose(
    module: fx.GraphModule,
    degree: int | None,
    tolerance: float,
    fitted: Sequence[Call],
    judged: Sequence[Call],
) -> dict[Node, Replacement]:
    """Approximate power transforms with as little computation as the tolerance allows.

    Args:
        module: The captured network.
        degree: The degree of all fits; None to choose one for each.
        tolerance: Largest change of an output, as a share of its scale, on the calls `judged`.
        fitted: Calls on which functions are fitted; without any, running statistics are used.
        judged: Calls on which the outputs are compared.

    Returns:
        The fits, by node; a transform without one stays exact.

    Raises:
        RetrofitError: If no choice of degrees meets the tolerance.
    """
    functions = _functions(module, fitted)
    if not functions:
        return {}
    if degree is not None:
        return _of_one_degree(functions, degree)
    limit = _USED_SHARE * tolerance
    smallest = math.inf
    expected = [outputs_of(module, call) for call in judged]
    options = _options(module, functions, fitted or judged)
    for fits in allocations(options):
        difference = _largest_difference(module, fits, judged, expected, limit)
        if difference <= limit:
            return fits
        smallest = min(smallest, difference)
    raise RetrofitError(
        f"approximations change the output by {smallest:.2g} of its scale, not safely less than "
        f"{tolerance:g}; raise `tolerance`, give more `calibrate` images or use `fold='exact'`"
    )


def _functions(module: fx.GraphModule, calls: Sequence[Call]) -> dict[Node, LayerFunction]:
    """Return what each power transform computes, on the values that it sees in some calls."""
    nodes = module.graph.find_nodes(op="call_function", target=POWER)
    transforms = [Transform.of(module, node) for node in nodes]
    # A frozen estimate is one number for all channels
    transforms = [transform for transform in transforms if transform.lmbda.numel() > 1]
    observer = Observer(sum(call.batch for call in calls))
    for call in calls:
        outputs_of(module, call, observer=observer)
    functions = {}
    for transform in transforms:
        node = transform.node
        sign = transform.sign
        data = observer.sample(node, len(sign), sign.device)
        mirrored = replace(data, h=data.h * sign[:, None])
        functions[node] = LayerFunction(transform, mirrored, transform.high)
    return functions


def _of_one_degree(functions: Functions, degree: int) -> dict[Node, Replacement]:
    """Fit all functions with one degree but those that a line fits as well."""
    fits = {}
    for node, function in functions.items():
        affine = function.affine()
        fits[node] = affine
        if affine.rms_error > _AFFINE:
            fits[node] = function.polynomial(degree)
    return fits


class _Run(fx.Interpreter):
    """A run of a captured network with fits in the place of some transforms, and of the ReLUs that
    they include; the observer sees the inputs of the others.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        fits: Mapping[Node, Replacement],
        observer: Observer | None,
    ) -> None:
        super().__init__(module)
        self._observer = observer
        self._instead: dict[Node, nn.Module] = {}
        for node, fit in fits.items():
            transform = Transform.of(module, node)
            self._instead[node] = fit.module(transform.sign)
            if fit.has_activation and transform.relu is not None:
                self._instead[transform.relu] = nn.Identity()

    def run_node(self, n: Node) -> object:
        """Compute the value of a node."""
        if n in self._instead:
            return self._instead[n](self.env[n.args[0]])  # type: ignore[index]
        if self._observer is not None and n.target is POWER:
            self._observer.take(n, self.env[n.args[0]])  # type: ignore[index]
        return super().run_node(n)


@torch.no_grad()
def outputs_of(
    module: fx.GraphModule,
    call: Call,
    fits: Mapping[Node, Replacement] | None = None,
    observer: Observer | None = None,
) -> list[Tensor]:
    """Return the output tensors of a captured network, with fits in the place of transforms and
    their ReLUs.
    """
    run = _Run(module, fits or {}, observer)
    arguments = tree_leaves((call.args, dict(call.kwargs)))
    return list(tensors_in(run.run(*arguments)))


def _largest_difference(
    module: fx.GraphModule,
    fits: Mapping[Node, Replacement],
    calls: Sequence[Call],
    expected: Sequence[list[Tensor]],
    limit: float,
) -> float:
    """Return the largest difference of an output, as a share of its scale over all calls; calls
    after the first beyond the limit are not run.
    """
    by_output = zip(*expected, strict=True)
    scales = [max(map(scale_of, tensors)) for tensors in by_output]
    largest = 0.0
    for call, tensors in zip(calls, expected, strict=True):
        gaps = map(largest_gap, tensors, outputs_of(module, call, fits))
        for gap, scale in zip(gaps, scales, strict=True):
            largest = max(largest, gap / (scale or _ZERO))
        if largest > limit:
            break
    return largest


class Candidate(NamedTuple):
    """A fit for a layer, or the exact transform (None), with its cost and the squared error that it
    adds to the output.
    """

    fit: Replacement | None
    cost: float
    error: float


def _options(
    module: fx.GraphModule, functions: Functions, calls: Sequence[Call]
) -> dict[Node, list[Candidate]]:
    """Fit all degrees, and see what an error of each transform alone does to the output."""
    call = next((call for call in calls if call.batch >= _FEW), calls[-1])
    call = call.resized(min(_FEW, call.batch))
    expected = outputs_of(module, call)
    options = {}
    for node, function in functions.items():
        fits = [function.affine(), *map(function.polynomial, range(2, MAX_DEGREE + 1))]
        changed = outputs_of(module, call, {node: fits[1]})
        # What a unit of error does to the output
        harm = _squared_change(expected, changed) / max(fits[1].rms_error ** 2, 1e-30)
        elements = math.prod(shape_of(node)[1:])
        options[node] = [_candidate(fit, elements, harm) for fit in fits]
        options[node].append(Candidate(None, elements, 0.0))
    return options


def _candidate(fit: Replacement, elements: int, harm: float) -> Candidate:
    cost = elements * _COST_OF_DEGREE * (fit.degree - 1)
    return Candidate(fit, cost, harm * fit.rms_error**2)


def _squared_change(expected: Sequence[Tensor], changed: Sequence[Tensor]) -> float:
    """Return the squared difference of all outputs, each by its scale."""
    total = 0.0
    for a, b in zip(expected, changed, strict=True):
        # Where both are infinite there is none
        gap = (a.double() - b).masked_fill(a == b, 0.0) / (scale_of(a) or 1.0)
        total += float(gap.square().sum())
    return total


def allocations(options: Mapping[Node, Sequence[Candidate]]) -> Iterator[dict[Node, Replacement]]:
    """Yield choices of a candidate for each layer, with less and less squared error.

    The first choice has each layer's first candidate, which costs nothing. From one choice to the
    next, error is removed where that costs least. A layer that a choice lacks stays exact; the
    choice that lacks all of them is not yielded.
    """
    chosen = {node: candidates[0] for node, candidates in options.items()}
    while True:
        fits = _fits_of(chosen)
        if not fits:
            return
        yield fits
        error = _total_error(chosen)
        # Nothing is left, or no number says how much
        if not 0 < error < math.inf:
            return
        while _total_error(chosen) > error / _FALL:
            node, option = _most_effective_step(chosen, options)
            chosen[node] = option


def _fits_of(chosen: Mapping[Node, Candidate]) -> dict[Node, Replacement]:
    return {node: option.fit for node, option in chosen.items() if option.fit is not None}


def _total_error(chosen: Mapping[Node, Candidate]) -> float:
    return sum(option.error for option in chosen.values())


def _most_effective_step(
    chosen: Mapping[Node, Candidate], options: Mapping[Node, Sequence[Candidate]]
) -> tuple[Node, Candidate]:
    """Return the layer and its dearer option that take off most squared error for their cost."""
    steps = [
        (node, option)
        for node, current in chosen.items()
        for option in options[node]
        if option.cost > current.cost
    ]
    return max(steps, key=lambda step: _effect(chosen[step[0]], step[1]))


def _effect(current: Candidate, dearer: Candidate) -> float:
    return (current.error - dearer.error) / (dearer.cost - current.cost)
