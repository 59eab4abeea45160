"""Which layers are approximated how well, and which lambdas are frozen: judged on images, not on formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.errors import RetrofitError
from retrofit.export.approximation.allocation import Candidate, allocations
from retrofit.export.approximation.calibration import Observer, gaussian
from retrofit.export.approximation.fit import MAX_SIZE, Fit, Fitter, LayerFunction
from retrofit.export.approximation.lines import LineFitter
from retrofit.export.approximation.polynomial import PolynomialFitter
from retrofit.export.forms import fused_layers as channel_map
from retrofit.export.forms.operations import constant_norm
from retrofit.layers.channel_map import ChannelMap
from retrofit.layers.lambdas import lambda_values
from retrofit.surgery.identity_check import largest_gap, scale_of
from retrofit.utils.onnx_runtimes import Runtime
from retrofit.utils.placement import device_of

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
class Transform:
    """A layer that may be approximated.

    Attributes:
        map: What it computes, upright.
        shape: Of its input.
        high: Upper limit of the ReLU (inf) or ReLU6 behind it; None if there is none.
        activation: That ReLU, if it can be taken away.
    """

    map: ChannelMap
    shape: Sequence[int]
    high: float | None
    activation: nn.Module | None


Transforms = Mapping[nn.Module, Transform]


@dataclass(frozen=True)
class Approximation:
    """What may be approximated, and how well the network must then agree with itself.

    Attributes:
        runtime: What constant transforms are approximated for; None leaves them exact.
        degree: Of all polynomials, or the number of lines; None for as few as meet the tolerance.
        freeze_lambda: Whether layers that estimate lambda take its mean over the images instead.
        tolerance: Largest difference of an output, as a share of its scale.
        fit: Batches of images to fit on; without any, the running statistics have to do.
        check: Batches to judge on.
    """

    runtime: Runtime | None
    degree: int | None
    freeze_lambda: bool
    tolerance: float
    fit: Sequence[Tensor]
    check: Sequence[Tensor]


def choose(net: nn.Module, transforms: Transforms, wanted: Approximation) -> dict[nn.Module, Fit]:
    """Approximate transforms, with as little computation as keeps the network within the tolerance.

    Args:
        net: The network, in evaluation.
        transforms: What may be approximated, by layer.
        wanted: The tolerance and the images.

    Returns:
        A fit for each layer that is approximated; the others stay exact.

    Raises:
        RetrofitError: If no choice of degrees meets the tolerance.
    """
    assert wanted.runtime is not None
    functions = _functions(net, transforms, wanted.fit)
    families = FAMILIES[wanted.runtime]
    if wanted.degree is not None:
        return {layer: _of_size(function, families[0].fitter, wanted.degree) for layer, function in functions.items()}
    limit, best = _ROOM * wanted.tolerance, math.inf
    expected = [answers(net, [batch]) for batch in wanted.check]
    for chosen in allocations(_candidates(net, transforms, functions, families, wanted.fit or wanted.check)):
        with _approximated(transforms, chosen):
            difference = _difference(net, wanted.check, expected, limit)
        if difference <= limit:
            return chosen
        best = min(best, difference)
    advice = "raise `tolerance`" if wanted.fit else "raise `tolerance`, give `calibrate` images"
    raise RetrofitError(
        f"approximations change the output by {best:.2g} of its scale, not safely less than "
        f"{wanted.tolerance:g}; {advice} or use `fold='exact'`"
    )


def mean_lambdas(net: nn.Module, images: Sequence[Tensor]) -> dict[nn.Module, float]:
    """Return the mean lambda, strength included, of each layer that estimates it, over images."""
    device = device_of(net)
    found: dict[nn.Module, list[Tensor]] = {}
    for batch in images:
        for name, values in lambda_values(net, batch.to(device)).items():
            found.setdefault(net.get_submodule(name), []).append(values.double().mean())
    return {
        layer: 1 + float(layer.effective_alpha) * (float(torch.stack(means).mean()) - 1)  # type: ignore[arg-type]
        for layer, means in found.items()
        if channel_map.estimates(layer)
    }


@torch.no_grad()
def answers(net: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a network gives for each batch, one after the other."""
    device = device_of(net)
    return [leaf for batch in inputs for leaf in tree_leaves(net(batch.to(device))) if isinstance(leaf, Tensor)]


def _difference(net: nn.Module, batches: Sequence[Tensor], expected: Sequence[Sequence[Tensor]], limit: float) -> float:
    """Return how far off the output is that is furthest off for its scale; of batches up to the first beyond a limit.

    As `parity.compare` will judge the folded network: each output by its own scale, over all batches.
    """
    scales = [max(map(scale_of, leaves)) for leaves in zip(*expected, strict=True)]
    largest = 0.0
    for batch, leaves in zip(batches, expected, strict=True):
        gaps = map(largest_gap, leaves, answers(net, [batch]))
        for gap, scale in zip(gaps, scales, strict=True):
            largest = max(largest, gap / scale if scale else math.inf if gap else 0.0)
        if largest > limit:
            break
    return largest


def _functions(net: nn.Module, transforms: Transforms, images: Sequence[Tensor]) -> dict[nn.Module, LayerFunction]:
    """Return what is to be approximated, on the values that the images bring about."""
    observer = Observer(sum(map(len, images)))
    with observer.observing(transforms):
        answers(net, images)
    seen, functions = observer.samples(), {}
    for layer, one in transforms.items():
        scale, shift = one.map.scale, one.map.shift
        data = seen[layer].affine(scale, shift) if layer in seen else gaussian(len(scale), scale.device)
        functions[layer] = LayerFunction(one.map, data, one.high)
    return functions


def _of_size(function: LayerFunction, fitter: type[Fitter], size: int) -> Fit:
    affine = function.affine()
    return affine if affine.rms_error <= AFFINE else fitter(function).fit(size)


def _candidates(
    net: nn.Module,
    transforms: Transforms,
    functions: Mapping[nn.Module, LayerFunction],
    families: Sequence[Family],
    images: Sequence[Tensor],
) -> list[Candidate]:
    """Fit all kinds and sizes, and see what an error of each layer alone does to the output."""
    few = torch.cat(list(images))[:_FEW]
    expected = answers(net, [few])
    found = []
    for layer, function in functions.items():
        fits, costs = [function.affine()], [0.0]
        for family in families:
            fitter = family.fitter(function)
            for size in range(2, MAX_SIZE + 1):
                fits.append(fitter.fit(size))
                costs.append(family.base + size * family.each)
        with _approximated(transforms, {layer: fits[1]}):
            gaps = [(a.double() - b) / (scale_of(a) or 1.0) for a, b in zip(expected, answers(net, [few]), strict=True)]
        change = sum(float(gap.square().sum()) for gap in gaps)
        harm = change / max(fits[1].rms_error ** 2, 1e-30)
        found.append(Candidate(layer, fits, costs, harm, math.prod(transforms[layer].shape)))
    return found


@contextmanager
def _approximated(transforms: Transforms, fits: Mapping[nn.Module, Fit]) -> Iterator[None]:
    """Let layers answer with their approximations for a while."""
    with ExitStack() as stack:
        for layer, fit in fits.items():
            one = transforms[layer]
            stack.enter_context(layer.register_forward_hook(_replacer(one, fit)))
            if fit.has_activation and one.activation is not None:
                one.activation.forward = lambda x: x  # a hook would come too late: the ReLU may work in place
                stack.callback(delattr, one.activation, "forward")
        yield


def _replacer(one: Transform, fit: Fit) -> Callable[..., Tensor]:
    """Return a forward hook that answers with the approximation of a layer."""
    ndim = len(one.shape)
    norm = constant_norm(one.map.scale * fit.scale, one.map.shift * fit.scale + fit.shift, ndim)
    form = nn.Sequential(norm, *fit.parts(ndim))
    return lambda _layer, args, _out: form(args[0])
