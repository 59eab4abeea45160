"""Measure what the papers measure, layer by layer, on a network and images; the network is left as
it was.

Images pass batch by batch: moments are gathered as they go, quantiles from a few thousand values a
channel, so memory does not grow with their number.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from retrofit.attack import Attack
from retrofit.diagnose import meters
from retrofit.diagnose.meters import LinearityMeter, Power, PowerMeter, Probe, probes
from retrofit.errors import RetrofitError
from retrofit.graph.sites import find_sites
from retrofit.images.dataset import ImageData, sample_loader
from retrofit.layers import ProxyNorm
from retrofit.layers.base import lambda_values
from retrofit.networks.models import Network
from retrofit.utils.running import device_of, evaluating, hooked, without_image_rows

Batch = tuple[Tensor, "Tensor | None"]
Batches = Sequence[Batch] | DataLoader[Any]
Progress = Callable[[int, int, str], None]
Item = TypeVar("Item")

NOISE_LEVELS = (0.0, 0.1, 0.25, 0.5, 1.0)
INJECTED = 0.1
# of a channel in a batch, for a Q-Q plot
_VALUES = 2048
_PAIRS, _PAIR_VALUES = 8, 400
# values of a channel, below which statistics of pairs say nothing
FEWEST = 50
# of a channel in an image, evenly spread, for the activation's linearity
_POSITIONS = 4096
# layers that get noise
_SOURCES = 4
# followed through the layers, which takes two copies of a batch
_NOISE_IMAGES = 16


@dataclass(frozen=True)
class Layer:
    """What was found about one normalization layer."""

    name: str
    # class name
    kind: str
    r2: (
        float | None
    )  # mean R^2 of the Q-Q plots of what the affine gets: after the power transform, where there is one
    # the same before the transform; None where there is none
    r2_before: float | None
    power: Power
    henze_zirkler: (
        float | None
    )  # mean over pairs of channels; None where no pair varies, or a batch has too few values
    # mean adjusted mutual information over the same pairs
    dependence: float | None
    linearity: (
        float | None
    )  # how close to linear the activation that directly follows acts; None without one
    # Quantiles 0, 5, 25, 50, 75, 95 and 100% of lambda, strength included: over channels where a
    # running average is used, else over the normalized sets of the first images; None without a
    # transform.
    lmbda: tuple[float, ...] | None
    plot: meters.QQ | None = field(
        repr=False, compare=False
    )  # of the channel whose R^2 is the median one


@dataclass(frozen=True)
class Attenuation:
    """What is left, layer by layer, of noise added at one layer."""

    # the layer whose output got the noise
    source: str
    layers: tuple[
        str, ...
    ]  # it and those after it whose output varies, in the order in which they are called
    errors: tuple[
        float, ...
    ]  # of each one's output: |noisy - clean| / |clean - its mean over images and positions|


@dataclass(frozen=True)
class InputNoise:
    """Answers under noise on the images."""

    # standard deviation of the noise, in units of the normalized image
    level: float
    # percent right; None without labels
    top1: float | None
    # percent of answers that are those without noise
    agreement: float


@dataclass(frozen=True)
class UnderAttack:
    """Answers under attack: its kind and size, and the percentage of answers that stay right."""

    attack: str
    top1: float


@dataclass(frozen=True)
class Diagnosis:
    """What was found about a network."""

    # that were measured
    images: int
    # that were called, in the model's order
    layers: tuple[Layer, ...]
    # where noise injected at some layers went
    noise: tuple[Attenuation, ...]
    # empty where the model gives no class scores
    input_noise: tuple[InputNoise, ...]
    # Layers that subtract no mean, are one with their activation, or do not hold the images in
    # their first dimension.
    unmeasured: tuple[str, ...] = ()
    # None where none was asked for, or there are no labels
    attack: UnderAttack | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without the points of the Q-Q plots."""
        values = asdict(self)
        for layer in values["layers"]:
            del layer["plot"]
        return values


def labelled_batches(network: Network, data: ImageData, images: int, batch_size: int) -> Batches:
    """Return up to `images` images of a set in batches, with labels if these are known to be the
    network's outputs.
    """
    labelled = True
    if data.matched == "order":
        pixels, _ = next(iter(sample_loader(data, network.preprocess, images=1)))
        with evaluating(network.model):
            scores = network.model(pixels.to(device_of(network.model)))
        outputs = scores.shape[1] if isinstance(scores, Tensor) and scores.ndim == 2 else None
        labelled = data.classes is not None and not data.doubt(outputs, network.labels)
    return sample_loader(data, network.preprocess, images, batch_size, labelled)


def diagnose(
    model: nn.Module,
    batches: Batches,
    *,
    channels: int = 20,
    plotted: int = 10,
    seed: int = 0,
    attack: Attack | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure a network with normalization layers, on any device; its mode, hooks and statistics
    end as they were.

    A batch is preprocessed images, (N, C, H, W), and their labels or None. All are passed over at
    least twice, so a loader that reads them when asked for (`sample_loader`) keeps memory small.
    Q-Q plots are of `channels` of each layer, in `plotted` batches, evenly spread (20 and 10 are
    figure 6's); `seed` chooses channels, values and noise. An `attack` on the images counts the
    answers that stay right. `progress` gets (done, in all, what). A RetrofitError says that the
    network calls no normalization layer or gives scores that are not finite, or that there are no
    images.
    """
    every_probe, unmeasured = probes(model)
    if not len(batches):
        raise RetrofitError("there are no images to measure on; give some")
    device = device_of(model)
    first = next(iter(batches))[0].to(device)

    def passed_over(what: str) -> Iterator[Batch]:
        for pixels, labels in _reported(what, batches, progress):
            yield pixels.to(device), labels

    with evaluating(model):
        apart = without_image_rows(model, [probe.layer for probe in every_probe], first[:1])
        rowless = [probe.name for probe in every_probe if probe.layer in apart]
        if len(rowless) == len(every_probe):
            what = (
                "the model has no normalization layer that holds the images in its first dimension"
            )
            raise RetrofitError(f"{what}, to diagnose; `retrofit inspect` lists what a model has")
        every = -(-len(batches) // plotted)
        observers = [
            _Observer(probe, channels, seed, every)
            for probe in every_probe
            if probe.layer not in apart
        ]
        _follow_activations(model, observers)
        images, clean = 0, []
        with hooked(one.probe.layer.register_forward_pre_hook(one.observe) for one in observers):
            for pixels, _ in passed_over("layers"):
                scores = model(pixels)
                if isinstance(scores, Tensor) and scores.ndim == 2:
                    if not scores.isfinite().all():
                        raise RetrofitError(
                            "the network gives scores that are not finite; check its weights"
                        )
                    clean.append(scores.argmax(1))
                images += len(pixels)
        called = [observer for observer in observers if observer.seen]
        if not called:
            raise RetrofitError("the model calls none of its normalization layers on these images")
        lambdas = lambda_values(model, first)
        layers = [
            one.result(lambdas.get(one.probe.name))
            for one in _reported("statistics", called, progress)
        ]
        live = [observer.probe for observer in called]
        sources = [live[i * len(live) // _SOURCES] for i in range(min(_SOURCES, len(live)))]
        few = min(len(batches), -(-_NOISE_IMAGES // len(first)))
        pixels = torch.cat([batch for batch, _ in islice(batches, few)])[:_NOISE_IMAGES].to(device)
        noise = []
        for source in _reported("noise", sources, progress):
            followed = attenuation(model, live, source, pixels, seed)
            noise += [followed] if followed.errors else []
        answers = input_noise(model, passed_over("input noise"), clean, seed) if clean else []
        attacked = (
            under_attack(model, passed_over("attack"), clean, attack) if clean and attack else None
        )
    return Diagnosis(
        images, tuple(layers), tuple(noise), tuple(answers), (*unmeasured, *rowless), attacked
    )


def _reported(
    what: str, items: Sequence[Item] | DataLoader[Item], progress: Progress | None
) -> Iterator[Item]:
    for number, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(number, len(items), what)


def _follow_activations(model: nn.Module, observers: "list[_Observer]") -> None:
    """Give each observer the activation that directly follows its layer."""
    by_layer = {observer.probe.layer: observer for observer in observers}
    by_name = {observer.probe.name: observer for observer in observers}
    for site in find_sites(model, by_layer.__contains__).sites:
        observer = by_name.get(site.norm)
        if observer is not None and site.places == 1 and site.activation is not None:
            observer.activation = site.activation.module
    for module in model.modules():
        if isinstance(module, ProxyNorm) and module.norm in by_layer:
            by_layer[module.norm].activation = module


class _Observer:
    """Gathers what one layer makes of each batch."""

    def __init__(self, probe: Probe, channels: int, seed: int, every: int) -> None:
        self.probe = probe
        self.activation: nn.Module | None = None
        self.seen = 0
        self._channels, self._every = channels, every
        self._generator = torch.Generator().manual_seed(seed)
        self._power, self._linearity = PowerMeter(), LinearityMeter()
        self._plots: list[meters.QQ] = []
        self._before: list[float] = []
        self._pairs: list[meters.FloatArray] = []

    def observe(self, _layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Look at what the layer is given."""
        x = args[0]
        y = self.probe.normalized(x)
        self._power.update(y)
        if self.activation is not None:
            out = self.probe.output(x)
            z = self.activation(out.clone())
            before, after = self.probe.by_channel(out), self.probe.by_channel(z)
            step = 1 + (before.shape[2] - 1) // _POSITIONS
            self._linearity.update(before[..., ::step], after[..., ::step])
        if self.seen % self._every == 0:
            self._look_closely(x, y)
        self.seen += 1

    def _look_closely(self, x: Tensor, y: Tensor) -> None:
        drawn = torch.randperm(y.shape[1], generator=self._generator, device="cpu")
        channels = drawn[: self._channels].sort().values
        state = self._generator.get_state()
        values = meters.sample(y, channels, _VALUES, self._generator)
        self._plots += [plot for column in values.T if (plot := meters.qq(column)) is not None]
        if self.probe.transforms:
            self._generator.set_state(state)
            before = meters.sample(
                self.probe.normalized(x, transformed=False), channels, _VALUES, self._generator
            )
            self._before += [
                plot.r2 for column in before.T if (plot := meters.qq(column)) is not None
            ]
        if not self._pairs:
            enough = values[:_PAIR_VALUES].T if len(values) >= FEWEST else ()
            live = [column for column in enough if column.std() > 0]
            self._pairs = [np.stack(pair, 1) for pair in zip(live[0::2], live[1::2], strict=False)][
                :_PAIRS
            ]

    def result(self, lmbda: Tensor | None) -> Layer:
        """Return the layer's figures; `lmbda` are its estimates, if it has any."""
        quantiles = None
        if lmbda is not None:
            used = 1 + float(self.probe.layer.effective_alpha) * (lmbda.double() - 1)  # type: ignore[arg-type]
            quantiles = tuple(
                np.quantile(used.numpy(), [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1]).tolist()
            )
        ranked = sorted(self._plots, key=lambda plot: plot.r2)
        return Layer(
            name=self.probe.name,
            kind=self.probe.kind,
            r2=mean_of(plot.r2 for plot in ranked),
            r2_before=mean_of(self._before),
            power=self._power.result(),
            henze_zirkler=mean_of(map(meters.henze_zirkler, self._pairs)),
            dependence=mean_of(map(meters.dependence, self._pairs)),
            linearity=self._linearity.result() if self.activation is not None else None,
            lmbda=quantiles,
            plot=ranked[len(ranked) // 2] if ranked else None,
        )


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of those values that are there and finite; None if none is."""
    finite = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.mean(finite)) if finite else None


def attenuation(
    model: nn.Module, live: Sequence[Probe], source: Probe, pixels: Tensor, seed: int
) -> Attenuation:
    """Add Gaussian noise, `INJECTED` times each channel's standard deviation, to one layer's output
    and follow it.

    Eftekhari & Papyan (2025, section 2.1.2 and appendix A.1) follow the mean squared error between
    noisy and clean activations. Here it is its root, divided by the spread of the clean ones, so
    that layers of any scale compare. The batch goes through twice as one, its second half with
    noise; so nothing of the clean run is stored.
    """
    errors: dict[str, float] = {}
    generator = torch.Generator().manual_seed(seed)

    def perturb(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        clean, _ = out.chunk(2)
        shape = [1] * clean.ndim
        shape[source.channel_axis(clean)] = -1
        spread = source.by_channel(clean).std((0, 2), correction=0).to(clean).view(shape)
        drawn = torch.randn(clean.shape, generator=generator, dtype=torch.float32, device="cpu").to(
            clean
        )
        return torch.cat([clean, clean + INJECTED * spread * drawn])

    def compare(probe: Probe, _module: nn.Module, _args: Any, out: Tensor) -> None:
        if probe.name not in errors and (errors or probe is source):
            clean, noisy = (probe.by_channel(half) for half in out.chunk(2))
            scale = torch.linalg.vector_norm(clean - clean.mean((0, 2), keepdim=True))
            if scale > 0:
                errors[probe.name] = float(torch.linalg.vector_norm(noisy - clean) / scale)

    watched = hooked(probe.layer.register_forward_hook(partial(compare, probe)) for probe in live)
    with source.layer.register_forward_hook(perturb), watched:
        model(torch.cat([pixels, pixels]))
    return Attenuation(source.name, tuple(errors), tuple(errors.values()))


def input_noise(
    model: nn.Module, batches: Iterable[Batch], answers: Iterable[Tensor], seed: int
) -> list[InputNoise]:
    """Measure a classifier's answers on images with Gaussian noise, the same noise for every
    network.

    `answers` are the classes (N,) that it names for each batch without noise.
    """
    images, right, same = 0, [0] * len(NOISE_LEVELS), [0] * len(NOISE_LEVELS)
    labelled = True
    generator = torch.Generator().manual_seed(seed)
    for (pixels, labels), clean in zip(batches, answers, strict=True):
        drawn = torch.randn(
            pixels.shape, generator=generator, dtype=torch.float32, device="cpu"
        ).to(pixels)
        images += len(pixels)
        labelled &= labels is not None
        for place, level in enumerate(NOISE_LEVELS):
            noisy = model(pixels + level * drawn).argmax(1) if level else clean
            same[place] += int((noisy == clean).sum())
            right[place] += 0 if labels is None else int((noisy == labels.to(noisy)).sum())
    return [
        InputNoise(level, 100 * r / images if labelled else None, 100 * s / images)
        for level, r, s in zip(NOISE_LEVELS, right, same, strict=True)
    ]


def under_attack(
    model: nn.Module, batches: Iterable[Batch], answers: Iterable[Tensor], attack: Attack
) -> UnderAttack | None:
    """Attack what a classifier gets right, and count what stays right; None without labels.

    `answers` are the classes (N,) that it names for each batch without attack.
    """
    images = right = 0
    for (pixels, labels), clean in zip(batches, answers, strict=True):
        if labels is None:
            return None
        hit = clean == labels.to(clean)
        images += len(pixels)
        if hit.any():
            changed = attack(model, pixels[hit], clean[hit])
            right += int((model(changed).argmax(1) == clean[hit]).sum())
    return UnderAttack(str(attack), 100 * right / images)
