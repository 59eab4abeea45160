"""Which power transforms are approximated how well: judged on images, not on formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from retrofit.compare import largest_gap, scale_of, tensors_of
from retrofit.errors import RetrofitError
from retrofit.export.approximation.allocation import Candidate, allocations
from retrofit.export.approximation.calibration import Observer, gaussian
from retrofit.export.approximation.fit import MAX_SIZE, Fit, Fitter, LayerFunction
from retrofit.export.approximation.lines import LineFitter
from retrofit.export.approximation.polynomial import PolynomialFitter
from retrofit.export.capture import with_rows
from retrofit.export.nodes import Transform, shape_of
from retrofit.export.power_forms import POWER
from retrofit.inputs import Call
from retrofit.layers.forms import ConstantNorm
from retrofit.utils.onnx_runtimes import Runtime

AFFINE = 1e-3  # with a degree given: what is as good as affine
_FEW = 8  # images that show what errors do
_ROOM = 0.98  # of the tolerance: the folded network rounds differently from the one that choices are tried in


@dataclass(frozen=True)
class Family:
    """Approximations of one kind in one runtime.

    Attributes:
        fitter: Fits them.
        base: What any of them costs an element, as a share of what the exact transform costs there.
        each: What each degree, or line, costs besides.
    """

    fitter: type[Fitter]
    base: float
    each: float


FAMILIES: Mapping[Runtime, Sequence[Family]] = {
    "onnxruntime": [Family(PolynomialFitter, -0.125, 0.125)],
    "openvino": [Family(LineFitter, -0.04, 0.04), Family(PolynomialFitter, 0.055, 0.007)],
}
"""What approximates best, first; costs as `benchmarks/export_latency.py` shows them for tf_efficientnet_lite0."""


@dataclass(frozen=True)
class Approximation:
    """What may be approximated, and how well the network must then agree with itself.

    Attributes:
        runtime: What transforms are approximated for.
        degree: Of all polynomials, or the number of lines; None for as few as meet the tolerance.
        tolerance: Largest difference of an output, as a share of its scale.
        fit: Calls with images to fit on; without any, the running statistics have to do.
        check: Calls to judge on.
    """

    runtime: Runtime
    degree: int | None
    tolerance: float
    fit: Sequence[Call]
    check: Sequence[Call]


Instead = Mapping[Node, Callable[[Tensor], Tensor]]
"""What takes the place of nodes of one input."""


@torch.no_grad()
def choose(module: fx.GraphModule, transforms: Sequence[Transform], wanted: Approximation) -> dict[Node, Fit]:
    """Approximate power transforms, with as little computation as keeps the network within the tolerance.

    Args:
        module: The captured network.
        transforms: What may be approximated.
        wanted: The tolerance and the images.

    Returns:
        A fit for each transform that is approximated, by node; the others stay exact.

    Raises:
        RetrofitError: If no choice of degrees meets the tolerance.
    """
    if not transforms:
        return {}
    by_node = {one.node: one for one in transforms}
    functions = _functions(module, by_node, wanted.fit)
    families = FAMILIES[wanted.runtime]
    if wanted.degree is not None:
        return {node: _of_size(function, families[0].fitter, wanted.degree) for node, function in functions.items()}
    limit, best = _ROOM * wanted.tolerance, math.inf
    expected = [answers(module, [call]) for call in wanted.check]
    for chosen in allocations(_candidates(module, by_node, functions, families, wanted.fit or wanted.check)):
        difference = _difference(module, approximated(by_node, chosen), wanted.check, expected, limit)
        if difference <= limit:
            return chosen
        best = min(best, difference)
    advice = "raise `tolerance`" if wanted.fit else "raise `tolerance`, give `calibrate` images"
    raise RetrofitError(
        f"approximations change the output by {best:.2g} of its scale, not safely less than "
        f"{wanted.tolerance:g}; {advice} or use `fold='exact'`"
    )


class _Run(fx.Interpreter):
    """A run of a captured network, with other functions for some nodes, and a look at what transforms take."""

    def __init__(self, module: fx.GraphModule, instead: Instead, look: Callable[[Node, Tensor], None] | None) -> None:
        super().__init__(module)
        self._instead, self._look = instead, look

    def run_node(self, n: Node) -> object:
        """Compute the value of a node."""
        if self._look is not None and n.target is POWER:
            self._look(n, self.env[n.args[0]])  # type: ignore[index]
        return self._instead[n](self.env[n.args[0]]) if n in self._instead else super().run_node(n)  # type: ignore[index]


@torch.no_grad()
def answers(
    module: fx.GraphModule,
    calls: Sequence[Call],
    instead: Instead | None = None,
    look: Callable[[Node, Tensor], None] | None = None,
) -> list[Tensor]:
    """Return the tensors that a captured network answers to each call, one after the other."""
    run = _Run(module, instead or {}, look)
    return [out for call in calls for out in tensors_of(run.run(*tree_leaves((call.args, dict(call.kwargs)))))]


def approximated(transforms: Mapping[Node, Transform], fits: Mapping[Node, Fit]) -> Instead:
    """Return what takes the place of the nodes of some transforms, and of the ReLUs that their fits include."""
    instead: dict[Node, Callable[[Tensor], Tensor]] = {}
    for node, fit in fits.items():
        one = transforms[node]
        norm = ConstantNorm(torch.zeros_like(fit.shift), one.sign * fit.scale, fit.shift)
        instead[node] = nn.Sequential(norm, *fit.parts())
        if fit.has_activation and one.relu is not None:
            instead[one.relu] = nn.Identity()
    return instead


def _difference(
    module: fx.GraphModule,
    instead: Instead,
    calls: Sequence[Call],
    expected: Sequence[Sequence[Tensor]],
    limit: float,
) -> float:
    """Return how far off the output is that is furthest off for its scale; of calls up to the first beyond a limit.

    As the folded network will be judged: each output by its own scale, over all batches.
    """
    scales = [max(map(scale_of, leaves)) for leaves in zip(*expected, strict=True)]
    largest = 0.0
    for call, leaves in zip(calls, expected, strict=True):
        gaps = map(largest_gap, leaves, answers(module, [call], instead))
        for gap, scale in zip(gaps, scales, strict=True):
            largest = max(largest, gap / scale if scale else math.inf if gap else 0.0)
        if largest > limit:
            break
    return largest


def _functions(
    module: fx.GraphModule, transforms: Mapping[Node, Transform], calls: Sequence[Call]
) -> dict[Node, LayerFunction]:
    """Return what is to be approximated, on the values that some calls bring about."""
    observer = Observer(sum(call.batch for call in calls))
    answers(module, calls, look=observer.take)
    seen, functions = observer.samples(), {}
    for node, one in transforms.items():
        data = seen[node].affine(one.sign, 0 * one.sign) if node in seen else gaussian(len(one.sign), one.sign.device)
        functions[node] = LayerFunction(one, data, one.high)
    return functions


def _of_size(function: LayerFunction, fitter: type[Fitter], size: int) -> Fit:
    affine = function.affine()
    return affine if affine.rms_error <= AFFINE else fitter(function).fit(size)


def _candidates(
    module: fx.GraphModule,
    transforms: Mapping[Node, Transform],
    functions: Mapping[Node, LayerFunction],
    families: Sequence[Family],
    calls: Sequence[Call],
) -> list[Candidate]:
    """Fit all kinds and sizes, and see what an error of each transform alone does to the output."""
    few = next((call for call in calls if call.batch >= _FEW), calls[-1])
    few = with_rows(few, min(_FEW, few.batch))
    expected = answers(module, [few])
    found = []
    for node, function in functions.items():
        fits, costs = [function.affine()], [0.0]
        for family in families:
            fitter = family.fitter(function)
            for size in range(2, MAX_SIZE + 1):
                fits.append(fitter.fit(size))
                costs.append(family.base + size * family.each)
        changed = answers(module, [few], approximated(transforms, {node: fits[1]}))
        gaps = [(a.double() - b) / (scale_of(a) or 1.0) for a, b in zip(expected, changed, strict=True)]
        change = sum(float(gap.square().sum()) for gap in gaps)
        harm = change / max(fits[1].rms_error ** 2, 1e-30)
        found.append(Candidate(node, fits, costs, harm, math.prod(shape_of(node)[1:])))
    return found
