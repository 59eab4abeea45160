"""`retrofit.bake`: the way back to strength 0, with constants that are the network's own.

At strength 0 a converted layer costs what its source costs: a BatchNorm in evaluation, which folds
into the convolution before it. A layer that was trained at strength 1 is another function there.
Baking moves it to strength 0 and gives it the weight and bias that come nearest, per channel and in
the mean square over images, to what it computed at its own strength. All layers are fitted in one
pass through the network, in its order: the images go through twice at once, by the layers as they
are and by the layers baked so far, so that each layer makes up for the ones before it.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.compare import Reference, tensors_of
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.layers import ProxyNorm, StrengthMixin
from retrofit.layers.strength import refuse_partial_state
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.utils.running import (
    evaluating,
    hooked,
    images_of,
    kept_values,
    placement_of,
    put_back,
)
from retrofit.utils.text import one_line, plural

TOLERANCE = 0.1
_BATCH = 32
# of thresholds between all layers and none
_TRIALS = 5
# share of the images that count as the worst
_WORST = 0.01


@dataclass(frozen=True)
class BakedLayer:
    """What became of one layer."""

    name: str
    error: (
        float | None
    )  # rms of what constants leave, as a share of its output's standard deviation; None if not tried
    # whether it is at strength 0 now
    baked: bool
    # why not
    reason: str = ""


@dataclass(frozen=True)
class Stage:
    """A choice of layers, those whose error is not above a threshold, judged on images that were
    not fitted on.
    """

    threshold: float
    layers: int
    # rms of the change of the network's output, as a share of its standard deviation
    error: float
    # the same of the worst 1% of the images, the worst one at least
    worst: float
    top1_agreement: (
        float | None
    )  # share of the images with the same highest output; None if it is no scores


@dataclass(frozen=True)
class BakeReport:
    """What was baked, and what it changes."""

    # every one with a strength, in the order of the network
    layers: tuple[BakedLayer, ...]
    stages: tuple[
        Stage, ...
    ]  # the choices of layers that were tried, in the order of their thresholds
    chosen: Stage
    tolerance: float
    # how many were fitted on, and judged on
    images: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"schema": 1, **asdict(self)}


@torch.no_grad()
def bake(
    model: nn.Module,
    images: Iterable[Any] | None = None,
    *,
    inputs: Inputs | None = None,
    tolerance: float = TOLERANCE,
) -> tuple[nn.Module, BakeReport]:
    """Replace per-image statistics and power transforms with constants in the layers where this
    changes little.

    A baked layer is at strength 0 afterwards, with its own constants. It exports like its source
    layer and can be trained. Proxy normalization is unchanged, since it does not depend on images.

    Args:
        model: A converted network. Its layers are changed in place, or not at all if an error is
            raised.
        images: Batches (N, C, H, W) of preprocessed images, with or without labels. Every second
            image is used to fit the constants, the others to evaluate them.
        inputs: Instead of images, one batch of network inputs: a tensor, a tuple of positional
            arguments, or a dict of keyword arguments. Each tensor with as many rows as the first
            has one row per sample.
        tolerance: Largest allowed change of the output: its root mean square on the evaluation
            images, as a fraction of the output's standard deviation. Of the sets of layers tried,
            `bake` uses the largest one within it.

    Returns:
        The network, and the report.

    Raises:
        UsageError: If the tolerance is not above 0, `images` and `inputs` are both given or both
            missing, or a batch holds no images.
        RetrofitError: If there is nothing to bake, the layers differ in strength because part of a
            state was loaded, the images are too few or contain NaN, or no
            layer can be baked within the tolerance.
    """
    if not tolerance > 0:
        raise UsageError(
            f"`tolerance` must be more than 0, not {tolerance}; leave it out for the usual one"
        )
    refuse_partial_state(model)
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in model.parameters()):
        raise RetrofitError(
            "constants are fitted in float32; bake `model.float()`, and halve it again if you have to"
        )
    if (images is None) == (inputs is None):
        raise UsageError("`bake` takes `images` or `inputs`; give one of them")
    if images is not None:
        inputs = torch.cat(list(images_of(images, "images")) or [torch.empty(0)])
    call = example_calls(model, inputs)[0]
    if call.batch < 4:
        raise RetrofitError(
            f"{plural(call.batch, 'image')} cannot be fitted and judged on; give 4 or more, 64 say"
        )
    trial = _Trial(model, call)
    choices = [trial.run(math.inf)]
    if choices[0][0].error > tolerance:
        errors = [max(error, 1e-6) for error in choices[0][1].values()]
        low, high = 0.9 * min(errors), 1.1 * max(errors)
        for _ in range(_TRIALS):
            middle = math.sqrt(low * high)
            choices.append(trial.run(middle))
            low, high = (middle, high) if choices[-1][0].error <= tolerance else (low, middle)
    stages = sorted((stage for stage, _, _ in choices), key=lambda stage: stage.threshold)
    within = [choice for choice in choices if choice[0].error <= tolerance and choice[0].layers]
    if not within:
        least = min((stage for stage in stages if stage.layers), key=lambda stage: stage.error)
        what = f"baking {plural(least.layers, 'layer')} changes the output by {least.error:.2g}"
        how = "`StrengthSchedule(shape='there-and-back')`, `retrofit finetune --strength-sched there-and-back`"
        advice = f"raise `tolerance`, or train there and back ({how})"
        raise RetrofitError(f"{what} of its standard deviation, more than {tolerance:g}; {advice}")
    stage, left, constants = max(within, key=lambda choice: choice[0].layers)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in constants}
    before = kept_values(
        tensor for layer in layers.values() for tensor in (*layer.parameters(), *layer.buffers())
    )
    try:
        for name, layer in layers.items():
            layer.bake(*constants[name])
        # what reads its layers' tensors shows in the network itself alone
        with evaluating(model):
            chosen = trial.stage(stage.threshold, _answers(model, trial.check), stage.layers)
        if not chosen.error <= 1.001 * tolerance:
            what = f"the baked network's output changes by {chosen.error:.2g} of its standard deviation"
            why = (
                f"in the trial by {stage.error:.2g}: other code may read the tensors of its layers"
            )
            raise RetrofitError(f"{what}, {why}; the model is left as it was")
    except BaseException:
        put_back(before)
        raise
    rows = []
    for name in trial.names:
        reason = "" if name in constants else trial.reasons.get(name, "costs too much")
        rows.append(BakedLayer(name, left.get(name), name in constants, reason))
    return model, BakeReport(tuple(rows), tuple(stages), chosen, tolerance, trial.images)


class _Trial:
    """A copy of a network on which choices of layers are tried; `reasons` say which cannot be
    baked, and why.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        net = self._net = copy.deepcopy(model).eval()
        layers: dict[str, Any] = {
            name: one for name, one in net.named_modules() if isinstance(one, StrengthMixin)
        }
        if not layers:
            raise RetrofitError(
                "the model holds no converted layer that has a strength; convert it first"
            )
        self.names = list(layers)
        call = call.to(*placement_of(net))
        every = torch.arange(call.batch, device="cpu")
        self._fit, self.check = call.select(every[::2].repeat(2)), call.select(every[1::2])
        self.images = len(every[::2]), len(every[1::2])
        self._expected = _answers(net, self.check)
        self.reasons = _reasons(net, layers, call)
        self._layers = {name: layer for name, layer in layers.items() if name not in self.reasons}
        if not self._layers:
            name, why = next(iter(self.reasons.items()))
            raise RetrofitError(f"no layer can be baked: {name or 'the model'} {why}")
        self._bare: dict[
            str, Any
            # normalizations at strength 0, without weight, bias and activation
        ] = {}
        for name, layer in self._layers.items():
            bare = self._bare[name] = copy.deepcopy(layer)
            bare.set_strength(0.0)
            bare.weight.fill_(1.0)
            bare.bias.zero_()
            # as a hook, so that others may come before it
            if behind := layer.fused_modules():
                layer.drop = layer.act = bare.drop = bare.act = nn.Identity()
                after = nn.Sequential(*behind)
                layer.register_forward_hook(lambda *call, after=after: after(call[-1]))

    def run(
        self, threshold: float
    ) -> tuple[Stage, dict[str, float], dict[str, tuple[Tensor, Tensor]]]:
        """Bake the layers that constants serve well enough; return the error of each, and the
        constants.
        """
        errors: dict[str, float] = {}
        constants: dict[str, tuple[Tensor, Tensor]] = {}
        fitting = True

        def output(name: str, _layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            """Return a layer's output, of the samples from `start` on by constants if it is baked:
            while fitting, these are the first half's images again, as the layers baked so far give
            them.
            """
            if not fitting and name not in constants:
                return out
            start = len(out) // 2 if fitting else 0
            base = self._bare[name](args[0][start:])
            if fitting:
                weight, bias, errors[name] = _regress(
                    base, out[:start], self._bare[name].channel_dims(base)
                )
                if errors[name] > threshold:
                    return out
                constants[name] = self._layers[name].bakeable(weight, bias)
            weight, bias = constants[name]
            return torch.cat([out[:start], base * weight + bias])

        layers = self._layers.items()
        with hooked(
            layer.register_forward_hook(partial(output, name), prepend=True)
            for name, layer in layers
        ):
            self._net(*self._fit.args, **self._fit.kwargs)
            fitting = False
            answers = _answers(self._net, self.check)
        return self.stage(threshold, answers, len(constants)), errors, constants

    def stage(self, threshold: float, answers: Sequence[Tensor], layers: int) -> Stage:
        per_image = []
        for expected, found in zip(self._expected, answers, strict=True):
            spread = float((expected - expected.mean(0)).square().mean())
            if spread > 0:
                per_image.append((expected - found).square().flatten(1).mean(1) / spread)
        if not per_image:
            raise RetrofitError(
                "the network answers all images alike; check its weights and the images"
            )
        squares = torch.stack(per_image).mean(0)
        worst = squares.sort(descending=True).values[: max(1, round(_WORST * len(squares)))]
        first = self._expected[0]
        same = (
            None
            if first.ndim != 2
            else float((first.argmax(1) == answers[0].argmax(1)).float().mean())
        )
        return Stage(
            threshold, layers, float(squares.mean().sqrt()), float(worst.mean().sqrt()), same
        )


def _reasons(net: nn.Module, layers: dict[str, Any], call: Call) -> dict[str, str]:
    """Say of each layer that cannot be baked why."""
    shapes = Reference(net, [call.resized(samples) for samples in (2, 4)], layers=layers).shapes
    reasons = {}
    owners = Counter(
        id(tensor) for module in net.modules() for tensor in module.parameters(recurse=False)
    )
    for name, layer in layers.items():
        if isinstance(layer, ProxyNorm | WeightStandardization):
            reasons[name] = "is constant at inference already"
        elif layer.strength == 0:
            reasons[name] = "is at strength 0 already"
        elif layer.weight is None or layer.bias is None:
            reasons[name] = "has no weight and bias of its own"
        elif owners[id(layer.weight)] > 1 or owners[id(layer.bias)] > 1:
            reasons[name] = "shares its parameters with another layer"
        elif len(shapes[name]) != 2:
            reasons[name] = f"is called {len(shapes[name]) // 2} times"
        elif shapes[name][1][0] != 2 * shapes[name][0][0]:
            reasons[name] = "does not hold the images in its first dimension"
    return reasons


def _answers(net: nn.Module, call: Call) -> list[Tensor]:
    """Return the tensors that a network gives, of all images together, each image apart in the
    first dimension. A RetrofitError says that it does not take such images, or answers otherwise.
    """
    calls = [call.select(few) for few in torch.arange(call.batch, device="cpu").split(_BATCH)]
    try:
        batches = [
            [leaf.float() for leaf in tensors_of(net(*one.args, **one.kwargs))] for one in calls
        ]
        together = [torch.cat(leaves) for leaves in zip(*batches, strict=True)]
        if not together or any(len(leaf) != call.batch for leaf in together):
            raise ValueError(f"its outputs are {[tuple(leaf.shape) for leaf in together]}")
        return together
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        what = "the network does not answer such images with tensors of one row an image"
        raise RetrofitError(f"{what} ({one_line(error)}); bake the part of it that does") from error


def _regress(base: Tensor, target: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, float]:
    """Fit target = weight * base + bias by least squares; return weight and bias, which broadcast,
    and the rms of what is left as a share of the target's standard deviation, over all channels
    together.
    """
    mean_base, mean = base.mean(dims, keepdim=True), target.mean(dims, keepdim=True)
    centred, target = base - mean_base, target - mean
    power = centred.square().mean(dims, keepdim=True)
    weight = (centred * target).mean(dims, keepdim=True) / power.clamp_min(1e-12)
    left = (target - weight * centred).square().mean()
    share = float((left / target.square().mean().clamp_min(1e-30)).sqrt())
    return weight, mean - weight * mean_base, share
