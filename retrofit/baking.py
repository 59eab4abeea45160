"""`retrofit.bake`: the way back to strength 0, with constants that are the network's own.

At strength 0 a converted layer costs what its source costs: a BatchNorm in evaluation, which folds
into the convolution before it. A layer that was trained at strength 1 is another function there.
Baking moves it to strength 0 and gives it the weight and bias that come nearest, per channel and in
the mean square over images, to what it computed at its own strength. All layers are fitted in one
pass through the network, in its order. A batch holds the images twice: one half passes the layers
as they are, the other the layers baked so far. So each layer makes up for the ones before it.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.compare import Reference
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.layers import ProxyNorm, StrengthMixin
from retrofit.layers.strength import refuse_partial_state
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.utils.forward_pass import hooked, images_of, placement_of
from retrofit.utils.output_tensors import tensors_in
from retrofit.utils.text import one_line, plural

TOLERANCE = 0.1
_BATCH = 32
# Half of them are fitted on, half are judged on, and a spread takes two
_FEWEST = 4
# Thresholds that are tried between all layers and none
_TRIALS = 5
# Share of the images that count as the worst
_WORST = 0.01

_Constants = dict[str, tuple[Tensor, Tensor]]
"""Weight and bias by layer."""


@dataclass(frozen=True)
class BakedLayer:
    """What became of one layer."""

    name: str
    # Rms error of constants, as a share of its output's standard deviation; None if not tried
    error: float | None
    # Whether it is at strength 0 now
    baked: bool
    # Why not
    reason: str = ""


@dataclass(frozen=True)
class Stage:
    """The layers whose error is at most a threshold, judged on images that were not fitted on."""

    threshold: float
    layers: int
    # Rms of the change of the network's output, as a share of its standard deviation
    error: float
    # The same of the worst 1% of the images, the worst one at least
    worst: float
    # Share of the images with the same highest output; None if it is no scores
    top1_agreement: float | None


@dataclass(frozen=True)
class BakeReport:
    """What was baked, and what it changes."""

    # Every layer with a strength, in the order of the network
    layers: tuple[BakedLayer, ...]
    # The choices of layers that were tried, in the order of their thresholds
    stages: tuple[Stage, ...]
    chosen: Stage
    tolerance: float
    # How many images were fitted on, and how many were judged on
    images: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"schema": 1, **asdict(self)}


@dataclass(frozen=True)
class _Choice:
    """Layers that were baked in a trial; the error of each layer that was tried."""

    stage: Stage
    errors: dict[str, float]
    constants: _Constants


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
        UsageError: If the tolerance is not a number above 0, `images` and `inputs` are both given
            or both missing, or a batch holds no images.
        RetrofitError: If there is nothing to bake, the layers differ in strength because part of a
            state was loaded, the images are too few or contain NaN, or no layer can be baked within
            the tolerance.
    """
    if not 0 < tolerance < math.inf:
        raise UsageError(
            f"`tolerance` must be more than 0, not {tolerance}; leave it out for the usual one"
        )
    refuse_partial_state(model)
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in model.parameters()):
        raise RetrofitError(
            "constants are fitted in float32; bake `model.float()`, and halve it again if you have "
            "to"
        )
    trial = _Trial(model, _samples(model, images, inputs))
    choices = _choices(trial, tolerance)
    stages = sorted((choice.stage for choice in choices), key=lambda stage: stage.threshold)
    best = _largest_within(choices, tolerance)
    _bake_layers(model, best.constants)
    layers = []
    for name in trial.names:
        is_baked = name in best.constants
        reason = "" if is_baked else trial.reasons.get(name, "costs too much")
        layers.append(BakedLayer(name, best.errors.get(name), is_baked, reason))
    return model, BakeReport(tuple(layers), tuple(stages), best.stage, tolerance, trial.images)


def _samples(model: nn.Module, images: Iterable[Any] | None, inputs: Inputs | None) -> Call:
    """Return all samples as one call."""
    if (images is None) == (inputs is None):
        raise UsageError("`bake` takes `images` or `inputs`; give one of them")
    if images is not None:
        inputs = torch.cat(list(images_of(images, "images")) or [torch.empty(0)])
    call = example_calls(model, inputs)[0]
    if call.batch < _FEWEST:
        raise RetrofitError(
            f"{plural(call.batch, 'image')} cannot be fitted and judged on; give {_FEWEST} or "
            "more, 64 say"
        )
    return call


def _choices(trial: "_Trial", tolerance: float) -> list[_Choice]:
    """Try all layers; where they change too much, some of them, by bisection of the threshold."""
    everything = trial.run(math.inf)
    choices = [everything]
    if everything.stage.error <= tolerance:
        return choices
    errors = [max(error, 1e-6) for error in everything.errors.values()]
    low = 0.9 * min(errors)
    high = 1.1 * max(errors)
    for _ in range(_TRIALS):
        middle = math.sqrt(low * high)
        choice = trial.run(middle)
        choices.append(choice)
        if choice.stage.error <= tolerance:
            low = middle
        else:
            high = middle
    return choices


def _largest_within(choices: Sequence[_Choice], tolerance: float) -> _Choice:
    """Return the choice of most layers within the tolerance."""
    baking = [choice for choice in choices if choice.stage.layers]
    within = [choice for choice in baking if choice.stage.error <= tolerance]
    if within:
        return max(within, key=lambda choice: choice.stage.layers)
    stages = [choice.stage for choice in baking]
    least = min(stages, key=lambda stage: stage.error)
    layers = plural(least.layers, "layer")
    raise RetrofitError(
        f"baking {layers} changes the output by {least.error:.2g} of its "
        f"standard deviation, more than {tolerance:g}; raise `tolerance`, or train there and back "
        "(`StrengthSchedule(shape='there-and-back')`, `retrofit finetune --strength-sched "
        "there-and-back`)"
    )


def _bake_layers(model: nn.Module, constants: _Constants) -> None:
    for name, (weight, bias) in constants.items():
        layer: Any = model.get_submodule(name)
        layer.bake(weight, bias)


class _Trial:
    """A copy of a network on which choices of layers are tried; `reasons` say which cannot be
    baked, and why.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        self._model = copy.deepcopy(model).eval()
        net = copy.deepcopy(self._model)
        layers = {
            name: layer for name, layer in net.named_modules() if isinstance(layer, StrengthMixin)
        }
        if not layers:
            raise RetrofitError(
                "the model holds no converted layer that has a strength; convert it first"
            )
        call = call.to(*placement_of(net))
        samples = torch.arange(call.batch, device="cpu")
        fitted = samples[::2]
        judged = samples[1::2]
        self.names = list(layers)
        self.images = len(fitted), len(judged)
        self._check = call.select(judged)
        self._fit = call.select(fitted.repeat(2))
        self._net = net
        self._expected = _outputs_of(net, self._check)
        self.reasons = _reasons(net, layers, call)
        self._layers: dict[str, Any] = {
            name: layer for name, layer in layers.items() if name not in self.reasons
        }
        if not self._layers:
            name, why = next(iter(self.reasons.items()))
            raise RetrofitError(f"no layer can be baked: {name or 'the model'} {why}")
        self._bare = {name: _bare_copy(layer) for name, layer in self._layers.items()}
        for layer in self._layers.values():
            _activate_by_hook(layer)

    def run(self, threshold: float) -> _Choice:
        """Bake the layers that constants serve well enough, and judge the network."""
        errors: dict[str, float] = {}
        constants: _Constants = {}

        def fit(name: str, _layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            """Fit constants to a layer's output. Its batch holds the images twice: the first half
            passed the layers as they are, the second the layers baked so far, and this one now.
            """
            half = len(out) // 2
            expected = out[:half]
            bare = self._bare[name]
            base = bare(args[0][half:])
            weight, bias, errors[name] = _regress(base, expected, bare.channel_dims(base))
            if errors[name] > threshold:
                return out
            weight, bias = self._layers[name].bakeable(weight, bias)
            constants[name] = weight, bias
            return torch.cat([expected, base * weight + bias])

        fitting = hooked(
            layer.register_forward_hook(partial(fit, name), prepend=True)
            for name, layer in self._layers.items()
        )
        with fitting:
            self._net(*self._fit.args, **self._fit.kwargs)
        baked = copy.deepcopy(self._model)
        _bake_layers(baked, constants)
        return _Choice(self._judged(threshold, baked, len(constants)), errors, constants)

    def _judged(self, threshold: float, baked: nn.Module, layers: int) -> Stage:
        """Return how the outputs of a network with some layers baked differ from its own."""
        outputs = _outputs_of(baked, self._check)
        changes = []
        for expected, answer in zip(self._expected, outputs, strict=True):
            variance = float((expected - expected.mean(0)).square().mean())
            if variance > 0:
                by_image = (expected - answer).square().flatten(1).mean(1)
                changes.append(by_image / variance)
        if not changes:
            raise RetrofitError(
                "the network answers all images alike; check its weights and the images"
            )
        squares = torch.stack(changes).mean(0)
        count = max(1, round(_WORST * len(squares)))
        worst = squares.topk(count).values
        error = float(squares.mean().sqrt())
        worst_error = float(worst.mean().sqrt())
        agreement = _agreement(self._expected[0], outputs[0])
        return Stage(threshold, layers, error, worst_error, agreement)


def _agreement(scores: Tensor, others: Tensor) -> float | None:
    """Return the share of images with the same highest score; None for what is no scores."""
    if scores.ndim != 2:
        return None
    same = scores.argmax(1) == others.argmax(1)
    return float(same.float().mean())


def _bare_copy(layer: Any) -> Any:
    """Return a layer's normalization at strength 0, without weight, bias and activation."""
    bare = copy.deepcopy(layer)
    bare.set_strength(0.0)
    bare.weight.fill_(1.0)
    bare.bias.zero_()
    _take_activation(bare)
    return bare


def _activate_by_hook(layer: Any) -> None:
    """Move the activation that a layer holds to a hook, so that others may come before it."""
    activation = _take_activation(layer)
    layer.register_forward_hook(lambda _layer, _args, out: activation(out))


def _take_activation(layer: Any) -> nn.Module:
    """Take the activation out of a layer that holds one, and return it."""
    fused = layer.fused_modules()
    if fused:
        layer.drop = nn.Identity()
        layer.act = nn.Identity()
    return nn.Sequential(*fused)


def _reasons(net: nn.Module, layers: Mapping[str, Any], call: Call) -> dict[str, str]:
    """Say of each layer that cannot be baked why."""
    calls = [call.resized(samples) for samples in (2, 4)]
    reference = Reference(net, calls, layers=layers)
    shapes = reference.shapes
    owners = Counter(
        id(tensor) for module in net.modules() for tensor in module.parameters(recurse=False)
    )
    reasons = {}
    for name, layer in layers.items():
        reason = _reason_of_layer(layer, owners)
        if not reason:
            reason = _reason_of_calls(shapes[name])
        if reason:
            reasons[name] = reason
    return reasons


def _reason_of_layer(layer: Any, owners: Mapping[int, int]) -> str:
    if isinstance(layer, ProxyNorm | WeightStandardization):
        return "is constant at inference already"
    if layer.strength == 0:
        return "is at strength 0 already"
    if layer.weight is None or layer.bias is None:
        return "has no weight and bias of its own"
    if owners[id(layer.weight)] > 1 or owners[id(layer.bias)] > 1:
        return "shares its parameters with another layer"
    return ""


def _reason_of_calls(shapes: Sequence[torch.Size]) -> str:
    """Say what is wrong with the shapes that a layer gave in calls with 2 and with 4 samples."""
    if len(shapes) != 2:
        return f"is called {len(shapes) // 2} times"
    if shapes[1][0] != 2 * shapes[0][0]:
        return "does not hold the images in its first dimension"
    return ""


def _outputs_of(net: nn.Module, call: Call) -> list[Tensor]:
    """Return a network's output tensors for all images, with a row for each image.

    Raises:
        RetrofitError: If it does not take such images, or its outputs have other rows.
    """
    rows = torch.arange(call.batch, device="cpu").split(_BATCH)
    try:
        batches = []
        for batch in (call.select(few) for few in rows):
            answer = net(*batch.args, **batch.kwargs)
            batches.append([tensor.float() for tensor in tensors_in(answer)])
        together = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
        if not together or any(len(tensor) != call.batch for tensor in together):
            raise ValueError(f"its outputs are {[tuple(tensor.shape) for tensor in together]}")
        return together
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        raise RetrofitError(
            "the network does not answer such images with tensors of one row an image "
            f"({one_line(error)}); bake the part of it that does"
        ) from error


def _regress(base: Tensor, target: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, float]:
    """Fit target = weight * base + bias by least squares.

    Returns:
        Weight and bias, which broadcast, and the rms error as a share of the target's standard
        deviation, over all channels together.
    """
    mean_base = base.mean(dims, keepdim=True)
    mean = target.mean(dims, keepdim=True)
    centred = base - mean_base
    spread = target - mean
    power = centred.square().mean(dims, keepdim=True)
    product = (centred * spread).mean(dims, keepdim=True)
    weight = product / power.clamp_min(1e-12)
    bias = mean - weight * mean_base
    left = (spread - weight * centred).square().mean()
    variance = spread.square().mean().clamp_min(1e-30)
    share = float((left / variance).sqrt())
    return weight, bias, share
