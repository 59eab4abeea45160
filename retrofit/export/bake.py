"""`retrofit.bake`: the way back to strength 0, with constants that are the network's own.

At strength 0 a converted layer costs what its source costs: a BatchNorm in evaluation, which folds into the convolution
before it. A layer that was trained at strength 1 is another function there. Baking moves it to strength 0 and gives it
the weight and bias that come nearest, per channel and in the mean square over images, to what it computed at its own
strength. All layers are fitted in one pass through the network, in its order: the images go through twice at once, by
the layers as they are and by the layers baked so far, so that each layer makes up for the ones before it.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.compare import tensors_of
from retrofit.errors import RetrofitError, UsageError
from retrofit.export.capture import placed, select_rows
from retrofit.export.strength_0 import per_channel, regress, representable, settle
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.layers import ProxyNorm, StrengthMixin
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.utils.batches import images_of
from retrofit.utils.evaluating import evaluating, kept_values, put_back
from retrofit.utils.hooks import hooked
from retrofit.utils.placement import placement_of
from retrofit.utils.text import one_line, plural

TOLERANCE = 0.1
IMAGES = 128
"""As many images as are used at once, half of them to fit on."""
_BATCH = 32
_TRIALS = 5  # of thresholds between all layers and none
_WORST = 0.01  # share of the images that count as the worst


@dataclass(frozen=True)
class BakedLayer:
    """What became of one layer.

    Attributes:
        name: Its name.
        error: Root mean square of what constants leave of its output, as a share of the output's standard deviation;
            None for a layer that was not looked at.
        baked: Whether it is at strength 0 now.
        reason: Why not; empty if it is.
    """

    name: str
    error: float | None
    baked: bool
    reason: str = ""


@dataclass(frozen=True)
class Stage:
    """One choice of layers, and what it does on images that were not fitted on.

    Attributes:
        threshold: Largest error of a layer that is baked.
        layers: How many are.
        error: Root mean square of the change of the network's output, as a share of its standard deviation.
        worst: The same of the worst 1% of the images, the worst one at least.
        top1_agreement: Share of the images with the same highest output; None for outputs that are no scores.
    """

    threshold: float
    layers: int
    error: float
    worst: float
    top1_agreement: float | None


@dataclass(frozen=True)
class BakeReport:
    """What was baked, and what it changes.

    Attributes:
        layers: Every layer with a strength, in the order of the network.
        stages: The choices that were tried, in the order of their thresholds.
        chosen: The one that was taken.
        tolerance: Largest error of the output that passes.
        images: How many were fitted on, and how many judged on.
    """

    layers: tuple[BakedLayer, ...]
    stages: tuple[Stage, ...]
    chosen: Stage
    tolerance: float
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
    """Turn what layers estimate from each image, and their power transforms, into constants, where little is lost.

    Layers that are baked stand at strength 0 afterwards, with constants of their own: they export as their source does,
    and can be trained on. Proxy activations stay, since what they are depends on no image.

    Args:
        model: A converted network; its layers change in place, or not at all.
        images: Batches (N, C, H, W), preprocessed, with labels or without; every second image is fitted on and the
            others are judged on.
        inputs: In place of images, one batch as the network takes it: one tensor, a tuple of positional arguments, or a
            dict of keyword arguments; every tensor of as many rows as the first has one row a sample.
        tolerance: Largest change of the output, root mean square on the images judged on as a share of the output's
            standard deviation. Of the choices tried the one with most layers within it is taken.

    Returns:
        The network, and the report.

    Raises:
        UsageError: If the tolerance is not above 0, there are both images and inputs, or a batch holds no images.
        RetrofitError: If there is nothing to bake, too few images or NaN in them, or nothing can be baked within the
            tolerance.
    """
    if not tolerance > 0:
        raise UsageError(f"`tolerance` must be more than 0, not {tolerance}; leave it out for the usual one")
    call = _call(model, images, inputs)
    if call.batch < 4:
        raise RetrofitError(
            f"{plural(call.batch, 'image')} cannot be fitted and judged on; give 4 or more, 64 if you can"
        )
    trial = _Trial(model, call)
    choices = [trial.run(math.inf)]
    if choices[0].stage.error > tolerance:
        errors = [max(error, 1e-6) for error in choices[0].errors.values()]
        low, high = 0.9 * min(errors), 1.1 * max(errors)
        for _ in range(_TRIALS):
            middle = math.sqrt(low * high)
            choices.append(trial.run(middle))
            low, high = (middle, high) if choices[-1].stage.error <= tolerance else (low, middle)
    within = [choice for choice in choices if choice.stage.error <= tolerance and choice.stage.layers]
    tried = sorted((choice.stage for choice in choices), key=lambda stage: stage.threshold)
    if not within:
        raise RetrofitError(_nothing_baked(tried, tolerance))
    chosen = max(within, key=lambda choice: choice.stage.layers)
    layers = {name: model.get_submodule(name) for name in chosen.fits}
    before = kept_values(tensor for one in layers.values() for tensor in (*one.parameters(), *one.buffers()))
    for name, layer in layers.items():
        settle(layer, *chosen.fits[name])
    stage = trial.judge(model, chosen.stage)
    if stage.error > 1.001 * tolerance:
        put_back(before)
        raise RetrofitError(
            f"the baked network's output changes by {stage.error:.2g} of its standard deviation, in the trial by "
            f"{chosen.stage.error:.2g}; the model is left as it was: in half precision bake a float32 copy "
            "(`model.float()`), else please report it"
        )
    reasons = {name: "" if name in chosen.fits else trial.reasons.get(name, "costs too much") for name in trial.names}
    rows = (BakedLayer(name, chosen.errors.get(name), name in chosen.fits, reason) for name, reason in reasons.items())
    return model, BakeReport(tuple(rows), tuple(tried), stage, tolerance, trial.images)


def _call(model: nn.Module, images: Iterable[Any] | None, inputs: Inputs | None) -> Call:
    """Return one call with all samples."""
    if (images is None) == (inputs is None):
        raise UsageError("`bake` takes `images` or `inputs`; give one of them")
    if inputs is not None:
        return example_calls(model, inputs)[0]
    batches = list(images_of(images, "images"))  # type: ignore[arg-type]
    return Call((torch.cat(batches) if batches else torch.empty(0),))


def _nothing_baked(tried: Sequence[Stage], tolerance: float) -> str:
    least = min((stage for stage in tried if stage.layers), key=lambda stage: stage.error, default=None)
    if least is None:
        return "no layer can be baked"
    return (
        f"baking {plural(least.layers, 'layer')} changes the output by {least.error:.2g} of its standard deviation, "
        f"more than {tolerance:g}; raise `tolerance`, or train there and back "
        "(`StrengthSchedule(shape='there-and-back')`, `retrofit finetune --strength-sched there-and-back`)"
    )


@dataclass(frozen=True)
class _Choice:
    """What one choice of layers does: judged, the errors of each layer, and weight and bias of those that are baked."""

    stage: Stage
    errors: dict[str, float]
    fits: dict[str, tuple[Tensor, Tensor]]


class _Trial:
    """A copy of a network on which choices of layers are tried.

    Attributes:
        names: Its layers with a strength.
        reasons: Why some of them cannot be baked.
        images: How many are fitted on, and judged on.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        """Find what can be baked, and let the network answer as it is."""
        net = self._net = copy.deepcopy(model).eval()
        if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in net.parameters()):
            net.float()
        found = {name: layer for name, layer in net.named_modules() if isinstance(layer, StrengthMixin)}
        if not found:
            raise RetrofitError("the model holds no converted layer that has a strength; convert it first")
        self.names = list(found)
        device, dtype = placement_of(net)
        call = placed(call, device, dtype)
        every = torch.arange(call.batch, device=device)
        self._fit, self._check = select_rows(call, every[::2].repeat(2)), select_rows(call, every[1::2])
        self.images = len(every[::2]), len(every[1::2])
        rows = [_rows(net, found, select_rows(call, every[:n])) for n in (1, 2)]
        self.reasons = _reasons(net, found, rows)
        self._layers: dict[str, Any] = {name: one for name, one in found.items() if name not in self.reasons}
        if not self._layers:
            name, why = next(iter(self.reasons.items()))
            raise RetrofitError(f"no layer can be baked: {name or 'the model'} {why}")
        self._plain = {name: _plain(layer) for name, layer in self._layers.items()}
        for layer in self._layers.values():
            _activate_by_hook(layer)
        self._expected = _answers(net, self._check)

    def run(self, threshold: float) -> _Choice:
        """Bake the layers that constants serve well enough."""
        errors: dict[str, float] = {}
        fits: dict[str, tuple[Tensor, Tensor]] = {}

        def fit(name: str, plain: Any, _layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            """Fit the second half of the batch, that of the layers baked so far, to the first."""
            base, wanted = plain(args[0][len(out) // 2 :]), out[: len(out) // 2]
            dims, shape = per_channel(plain, base)
            weight, bias, errors[name] = regress(base, wanted, dims)
            if errors[name] > threshold:
                return out
            fits[name] = weight, bias = representable(self._layers[name], weight, bias)
            return torch.cat([wanted, base * weight.view(shape) + bias.view(shape)])

        def baked(name: str, plain: Any, _layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if name not in fits:
                return out
            _, shape = per_channel(plain, out)
            weight, bias = fits[name]
            return plain(*args) * weight.view(shape) + bias.view(shape)

        with self._hooked(fit):
            _run(self._net, self._fit)
        with self._hooked(baked):
            answers = _answers(self._net, self._check)
        return _Choice(self._judge(threshold, answers, len(fits)), errors, fits)

    def _hooked(self, hook: Any) -> AbstractContextManager[None]:
        """Let every layer answer by a hook for a while, before its activation."""
        return hooked(
            layer.register_forward_hook(partial(hook, name, self._plain[name]), prepend=True)
            for name, layer in self._layers.items()
        )

    def judge(self, model: nn.Module, stage: Stage) -> Stage:
        """Compare the network itself, after the baking of a choice, with what it was."""
        with evaluating(model):
            answers = _answers(model, placed(self._check, *placement_of(model)))
        return self._judge(stage.threshold, answers, stage.layers)

    def _judge(self, threshold: float, answers: Sequence[Tensor], layers: int) -> Stage:
        """Compare answers with those of the network as it is."""
        per_image = []
        for ours, theirs in zip(self._expected, answers, strict=True):
            spread = float((ours - ours.mean(0)).square().mean())
            if spread > 0:
                per_image.append((ours - theirs).square().flatten(1).mean(1) / spread)
        if not per_image:
            raise RetrofitError(
                "the network answers all images alike, which shows nothing; check its weights and the images"
            )
        squares = torch.stack(per_image).mean(0)
        worst = squares.sort(descending=True).values[: max(1, round(_WORST * len(squares)))]
        first = self._expected[0]
        same = None if first.ndim != 2 else float((first.argmax(1) == answers[0].argmax(1)).float().mean())
        return Stage(threshold, layers, float(squares.mean().sqrt()), float(worst.mean().sqrt()), same)


def _rows(net: nn.Module, layers: dict[str, Any], call: Call) -> dict[str, list[int]]:
    """Return the first dimension of each output of each layer."""
    rows: dict[str, list[int]] = {name: [] for name in layers}

    def look(name: str, _layer: nn.Module, _args: Any, out: Tensor) -> None:
        rows[name].append(len(out))

    with hooked(layer.register_forward_hook(partial(look, name)) for name, layer in layers.items()):
        _answers(net, call)  # refuses images of another shape
    return rows


def _reasons(net: nn.Module, layers: dict[str, Any], rows: Sequence[dict[str, list[int]]]) -> dict[str, str]:
    """Say of each layer that cannot be baked why; `rows` are those of one sample and of two."""
    reasons = {}
    one, two = rows
    owners = Counter(id(tensor) for module in net.modules() for tensor in module.parameters(recurse=False))
    for name, layer in layers.items():
        if isinstance(layer, ProxyNorm | WeightStandardization):
            reasons[name] = "is constant at inference already"
        elif layer.strength == 0:
            reasons[name] = "is at strength 0 already"
        elif layer.weight is None or layer.bias is None:
            reasons[name] = "has no weight and bias of its own"
        elif owners[id(layer.weight)] > 1 or owners[id(layer.bias)] > 1:
            reasons[name] = "shares its parameters with another layer"
        elif len(one[name]) != 1:
            reasons[name] = f"is called {len(one[name])} times"
        elif two[name] != [2 * one[name][0]]:
            reasons[name] = "does not hold the images in its first dimension"
    return reasons


def _plain(layer: Any) -> nn.Module:
    """Return a layer's normalization at strength 0 alone, weight and bias apart."""
    plain = copy.deepcopy(layer)
    plain.set_strength(0.0)
    plain.weight.fill_(1.0)
    plain.bias.zero_()
    if layer.fused_modules():
        plain.drop = plain.act = nn.Identity()
    return plain.eval()


def _activate_by_hook(layer: Any) -> None:
    """Let the activation of a fused layer be a hook, so that others may come before it."""
    behind = layer.fused_modules()
    if behind:
        layer.drop = layer.act = nn.Identity()
        layer.register_forward_hook(lambda _layer, _args, out: nn.Sequential(*behind)(out))


def _run(net: nn.Module, call: Call) -> Any:
    return net(*call.args, **call.kwargs)


def _answers(net: nn.Module, call: Call) -> list[Tensor]:
    """Return the tensors that a network gives, of all images together, each image apart in the first dimension.

    Raises:
        RetrofitError: If it does not take such images, or answers otherwise.
    """
    rows = torch.arange(call.batch, device=placement_of(net)[0]).split(_BATCH)
    try:
        batches = [[leaf.float() for leaf in tensors_of(_run(net, select_rows(call, few)))] for few in rows]
        together = [torch.cat(leaves) for leaves in zip(*batches, strict=True)]
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        raise RetrofitError(
            "baking compares tensors of one row an image, which the network does not give for such images "
            f"({one_line(error)}); bake the part of it that does"
        ) from error
    if not together or any(len(leaf) != call.batch for leaf in together):
        raise RetrofitError("baking compares outputs of one row an image, the network gives others; bake a part of it")
    return together
