"""Which layers become polynomials of which degree, and which lambdas are frozen: judged on images, not on formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.errors import RetrofitError
from retrofit.export import layers
from retrofit.export.allocation import Candidate, allocations
from retrofit.export.forms import Clamp, Polynomial, constant_norm
from retrofit.export.layers import ChannelMap
from retrofit.export.polynomial import MAX_DEGREE, Fit, Fitter, gaussian_values
from retrofit.lambdas import lambda_values

AFFINE = 1e-3  # with a degree given: what is as good as affine
_FEW = 8  # images that show what errors do
_ROOM = 0.98  # of the tolerance: the folded network rounds differently from the one that choices are tried in
_SAMPLES = 2048  # values of each channel to fit on

Transforms = Mapping[Any, tuple[ChannelMap, float | None, Sequence[int]]]


@dataclass(frozen=True)
class Approximation:
    """What may be approximated, and how well the network must then agree with itself.

    Attributes:
        polynomial: Whether constant transforms become polynomials.
        degree: Of all of them; None for the lowest that meets the tolerance.
        freeze_lambda: Whether layers that estimate lambda take its mean over the images instead.
        tolerance: Largest difference of the output, as a share of the largest output.
        fit: Batches of images to fit on; without any, the running statistics have to do.
        check: Batches to judge on.
    """

    polynomial: bool
    degree: int | None
    freeze_lambda: bool
    tolerance: float
    fit: Sequence[Tensor]
    check: Sequence[Tensor]


def polynomial_parts(found: ChannelMap, fit: Fit, ndim: int) -> tuple[Tensor, Tensor, list[nn.Module]]:
    """Return scale and shift of the affine map from a layer's input, (C,) each, and what follows it."""
    scale, shift = found.scale * fit.scale, found.shift * fit.scale + fit.shift
    return scale, shift, [Clamp(fit.low, 1.0), Polynomial(fit.coefficients, ndim)]


def choose(net: nn.Module, transforms: Transforms, wanted: Approximation) -> dict[nn.Module, Fit]:
    """Fit polynomials for transforms, with as little computation as keeps the network within the tolerance.

    Args:
        net: The network, in evaluation.
        transforms: By layer: what it computes (upright), the upper limit of a ReLU behind it or None, and the
            shape of its input.
        wanted: The tolerance and the images.

    Returns:
        A fit for each layer that is approximated; the others stay exact.

    Raises:
        RetrofitError: If no choice of degrees meets the tolerance.
    """
    values = layer_values(net, list(transforms), wanted.fit)
    fitters = {}
    for layer, (found, high, _) in transforms.items():
        h = gaussian_values(len(found.scale))
        if layer in values:
            h = values[layer].double() * found.scale[:, None] + found.shift[:, None]
        fitters[layer] = Fitter(found, h, high)
    if wanted.degree is not None:
        return {layer: _of_degree(fitter, wanted.degree) for layer, fitter in fitters.items()}
    expected = answers(net, wanted.check)
    best = math.inf
    for chosen in allocations(_candidates(net, transforms, fitters, wanted.fit or wanted.check)):
        with _approximated(transforms, chosen):
            best = min(best, difference(expected, answers(net, wanted.check)))
        if best <= _ROOM * wanted.tolerance:
            return chosen
    advice = "raise --tolerance" if wanted.fit else "raise --tolerance, give --calibrate images"
    raise RetrofitError(
        f"polynomials up to degree {MAX_DEGREE} change the output by {best:.2g} of its scale, not safely less "
        f"than {wanted.tolerance:g}; {advice} or use --fold exact"
    )


def mean_lambdas(net: nn.Module, images: Sequence[Tensor]) -> dict[nn.Module, float]:
    """Return the mean lambda, strength included, of each layer that estimates it, over images."""
    place = next((p.device for p in net.parameters()), torch.device("cpu"))
    found: dict[nn.Module, list[Tensor]] = {}
    for batch in images:
        for name, values in lambda_values(net, batch.to(place)).items():
            found.setdefault(net.get_submodule(name), []).append(values.double().mean())
    return {
        layer: 1 + float(layer.degree) * (float(torch.stack(means).mean()) - 1)  # type: ignore[arg-type]
        for layer, means in found.items()
        if layers.estimates(layer)
    }


def layer_values(net: nn.Module, watched: Sequence[nn.Module], images: Sequence[Tensor]) -> dict[nn.Module, Tensor]:
    """Return inputs of layers, (C, S) each: a random choice of positions, and each batch's extremes."""
    found: dict[nn.Module, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    share = max(1, _SAMPLES // max(1, len(images)))

    def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        values = args[0].movedim(1, 0).flatten(1)
        chosen = torch.randint(values.shape[1], (share,), generator=generator).to(values.device)
        extremes = torch.stack(values.aminmax(dim=1), 1)
        found.setdefault(layer, []).append(torch.cat([values[:, chosen], extremes], 1))

    with ExitStack() as stack:
        for layer in watched:
            stack.callback(layer.register_forward_pre_hook(hook).remove)
        answers(net, images)
    return {layer: torch.cat(parts, 1) for layer, parts in found.items()}


@torch.no_grad()
def answers(net: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a network gives for each batch, one after the other."""
    place = next((p.device for p in net.parameters()), torch.device("cpu"))
    return [leaf for batch in inputs for leaf in tree_leaves(net(batch.to(place))) if isinstance(leaf, Tensor)]


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference as a share of the largest expected value."""
    gap = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))
    scale = max(float(a.abs().max()) for a in expected)
    return gap / scale if scale and math.isfinite(gap) else math.inf


def _of_degree(fitter: Fitter, degree: int) -> Fit:
    affine = fitter.fit(1)
    return affine if affine.rms_error <= AFFINE else fitter.fit(degree)


def _candidates(
    net: nn.Module, transforms: Transforms, fitters: Mapping[nn.Module, Fitter], images: Sequence[Tensor]
) -> list[Candidate]:
    """Fit all degrees, and see what an error of each layer alone does to the output."""
    few = torch.cat(list(images))[:_FEW]
    expected = answers(net, [few])
    found = []
    for layer, fitter in fitters.items():
        fits = [fitter.fit(degree) for degree in range(1, MAX_DEGREE + 1)]
        with _approximated(transforms, {layer: fits[1]}):
            gaps = [a.double() - b for a, b in zip(expected, answers(net, [few]), strict=True)]
        change = sum(float(gap.square().sum()) for gap in gaps)
        harm = change / max(fits[1].rms_error ** 2, 1e-30)
        found.append(Candidate(layer, fits, harm, math.prod(transforms[layer][2])))
    return found


@contextmanager
def _approximated(transforms: Transforms, fits: Mapping[nn.Module, Fit]) -> Iterator[None]:
    """Let layers answer with their approximations for a while."""
    with ExitStack() as stack:
        for layer, fit in fits.items():
            found, _, shape = transforms[layer]
            stack.callback(layer.register_forward_hook(_replacer(found, fit, len(shape))).remove)
        yield


def _replacer(found: ChannelMap, fit: Fit, ndim: int) -> Callable[..., Tensor]:
    """Return a forward hook that answers with the approximation of a layer."""
    if fit.degree == 1:
        scale, shift = fit.affine()
        form: nn.Module = constant_norm(found.scale * scale, found.shift * scale + shift, ndim)
    else:
        scale, shift, parts = polynomial_parts(found, fit, ndim)
        form = nn.Sequential(constant_norm(scale, shift, ndim), *parts)
    return lambda _layer, args, _out: form(args[0])
