"""Which power transforms are approximated how well: judged on images, not on formulas.

An error that the network can bear is spread to where it is cheapest.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from retrofit.compare import largest_gap, scale_of, tensors_of
from retrofit.errors import RetrofitError
from retrofit.export.approximation.fit import (
    MAX_SIZE,
    LayerFunction,
    LineFitter,
    Observer,
    PolynomialFitter,
)
from retrofit.export.capture import POWER, Fit, Transform, shape_of
from retrofit.inputs import Call
from retrofit.layers.forms import ConstantNorm
from retrofit.utils.onnx_runtimes import Runtime

_FAMILIES: Mapping[Runtime, Sequence[tuple[type[LineFitter | PolynomialFitter], float, float]]] = {
    "onnxruntime": [(PolynomialFitter, -0.125, 0.125)],
    "openvino": [(LineFitter, -0.04, 0.04), (PolynomialFitter, 0.055, 0.007)],
}
"""What approximates best in a runtime, first; what any of them costs an element, as a share of what
the exact transform costs there, and what each degree or line costs besides, as
`benchmarks/export_latency.py` shows for tf_efficientnet_lite0.
"""

# with a degree given: what is as good as affine
_AFFINE = 1e-3
# images that show what errors do
_FEW = 8
# of the tolerance: the folded network rounds differently from the one that choices are tried in
_ROOM = 0.98
# of the squared error, from one choice to the next
_FALL = 1.25


@torch.no_grad()
def choose(
    module: fx.GraphModule,
    runtime: Runtime,
    degree: int | None,
    tolerance: float,
    fitted: Sequence[Call],
    judged: Sequence[Call],
) -> dict[Node, Fit]:
    """Approximate power transforms, with as little computation as keeps the network within the
    tolerance.

    Fits are made on the calls `fitted`, or on running statistics where there are none; the
    tolerance, a share of each output's scale, holds for the calls `judged`. A given degree is that
    of all fits. Transforms that the answer does not have stay exact. A RetrofitError says that no
    choice of degrees meets the tolerance.
    """
    found = (
        Transform.of(module, node)
        for node in module.graph.find_nodes(op="call_function", target=POWER)
    )
    # a frozen estimate is one number
    transforms = [one for one in found if one.lmbda.numel() > 1]
    if not transforms:
        return {}
    observer, functions = Observer(sum(call.batch for call in fitted)), {}
    for call in fitted:
        answers(module, call, observer=observer)
    for one in transforms:
        data = observer.sample(one.node, len(one.sign), one.sign.device)
        functions[one.node] = LayerFunction(
            one, replace(data, h=data.h * one.sign[:, None]), one.high
        )
    if degree is not None:
        fits, fitter = (
            {node: function.affine() for node, function in functions.items()},
            _FAMILIES[runtime][0][0],
        )
        rough = {node: functions[node] for node, fit in fits.items() if fit.rms_error > _AFFINE}
        return fits | {node: fitter(function).fit(degree) for node, function in rough.items()}
    limit, best = _ROOM * tolerance, math.inf
    expected = [(call, answers(module, call)) for call in judged]
    for fits in allocations(_options(module, functions, runtime, fitted or judged)):
        difference = _difference(module, fits, expected, limit)
        if difference <= limit:
            return fits
        best = min(best, difference)
    advice = "raise `tolerance`" if fitted else "raise `tolerance`, give `calibrate` images"
    what = f"approximations change the output by {best:.2g} of its scale, not safely less than {tolerance:g}"
    raise RetrofitError(f"{what}; {advice} or use `fold='exact'`")


class _Run(fx.Interpreter):
    """A run of a captured network, with other modules for some nodes; the observer takes what power
    transforms do.
    """

    def __init__(
        self, module: fx.GraphModule, instead: Mapping[Node, nn.Module], observer: Observer | None
    ) -> None:
        super().__init__(module)
        self._instead, self._observer = instead, observer

    def run_node(self, n: Node) -> object:
        """Compute the value of a node."""
        if n in self._instead:
            return self._instead[n](self.env[n.args[0]])  # type: ignore[index]
        if self._observer is not None and n.target is POWER:
            self._observer.take(n, self.env[n.args[0]])  # type: ignore[index]
        return super().run_node(n)


@torch.no_grad()
def answers(
    module: fx.GraphModule,
    call: Call,
    fits: Mapping[Node, Fit] | None = None,
    observer: Observer | None = None,
) -> list[Tensor]:
    """Return the tensors that a captured network answers, with fits in the place of transforms and
    their ReLUs.
    """
    instead: dict[Node, nn.Module] = {}
    for node, fit in (fits or {}).items():
        one = Transform.of(module, node)
        norm = ConstantNorm(torch.zeros_like(fit.shift), one.sign * fit.scale, fit.shift)
        instead[node] = nn.Sequential(norm, *fit.parts)
        if fit.has_activation and one.relu is not None:
            instead[one.relu] = nn.Identity()
    return list(
        tensors_of(
            _Run(module, instead, observer).run(*tree_leaves((call.args, dict(call.kwargs))))
        )
    )


def _difference(
    module: fx.GraphModule,
    fits: Mapping[Node, Fit],
    expected: Sequence[tuple[Call, list[Tensor]]],
    limit: float,
) -> float:
    """Return the largest difference of an output, as a share of its scale over all calls; stop
    beyond a limit.
    """
    scales = [
        max(map(scale_of, leaves))
        for leaves in zip(*(answer for _, answer in expected), strict=True)
    ]
    largest = 0.0
    for call, leaves in expected:
        gaps = map(largest_gap, leaves, answers(module, call, fits))
        shares = [
            gap / scale if scale else math.inf if gap else 0.0
            for gap, scale in zip(gaps, scales, strict=True)
        ]
        largest = max([largest, *shares])
        if largest > limit:
            break
    return largest


class Candidate(NamedTuple):
    """What a layer may become: a fit, or the exact transform (None); what that costs, and the
    squared error it adds.
    """

    fit: Fit | None
    cost: float
    error: float


def _options(
    module: fx.GraphModule,
    functions: Mapping[Node, LayerFunction],
    runtime: Runtime,
    calls: Sequence[Call],
) -> dict[Node, list[Candidate]]:
    """Fit all kinds and sizes, and see what an error of each transform alone does to the output."""
    few = next((call for call in calls if call.batch >= _FEW), calls[-1])
    few = few.resized(min(_FEW, few.batch))
    expected = answers(module, few)
    options = {}
    for node, function in functions.items():
        costs = [(function.affine(), 0.0)]
        for family, base, each in _FAMILIES[runtime]:
            fitter = family(function)
            costs += [(fitter.fit(size), base + size * each) for size in range(2, MAX_SIZE + 1)]
        probe = costs[1][0]
        pairs = list(zip(expected, answers(module, few, {node: probe}), strict=True))
        gaps = [
            torch.where(a == b, 0.0, a.double() - b) / (scale_of(a) or 1.0) for a, b in pairs
        ]  # also of infinity
        harm = sum(float(gap.square().sum()) for gap in gaps) / max(probe.rms_error**2, 1e-30)
        elements = math.prod(shape_of(node)[1:])
        options[node] = [
            Candidate(fit, elements * cost, harm * fit.rms_error**2) for fit, cost in costs
        ]
        options[node].append(Candidate(None, elements, 0.0))
    return options


def allocations(options: Mapping[Node, Sequence[Candidate]]) -> Iterator[dict[Node, Fit]]:
    """Yield choices of an option for each layer, from the first, free ones on, with ever less
    squared error: it is taken off where most goes for its cost. A layer that is missing stays
    exact; that all of them do is not among the choices.
    """
    state = {node: own[0] for node, own in options.items()}
    while fits := {node: option.fit for node, option in state.items() if option.fit is not None}:
        yield fits
        error = sum(option.error for option in state.values())
        # nothing is left, or no number says how much
        if not 0 < error < math.inf:
            return
        while sum(option.error for option in state.values()) > error / _FALL:
            steps = [
                ((now.error - option.error) / (option.cost - now.cost), node, option)
                for node, now in state.items()
                for option in options[node]
                if option.cost > now.cost
            ]
            _, node, state[node] = max(steps, key=lambda step: step[0])
