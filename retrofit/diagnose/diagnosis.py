"""Measure what the papers measure, layer by layer, on a network and images; the network is left as
it was.

Images pass batch by batch: moments are gathered as they go, quantiles from a few thousand values a
channel, so memory does not grow with their number.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from retrofit.attack import Attack
from retrofit.compare import Reference
from retrofit.diagnose import meters
from retrofit.diagnose.meters import LinearityMeter, Power, PowerMeter, Probe, probes
from retrofit.diagnose.perturbations import (
    Attenuation,
    Batch,
    InputNoise,
    UnderAttack,
    attenuation,
    input_noise,
    under_attack,
)
from retrofit.errors import RetrofitError
from retrofit.evaluation import are_scores
from retrofit.graph.norm_sites import find_sites
from retrofit.images.dataset import ImageData
from retrofit.images.samples import evenly_spread, sample_loader
from retrofit.inputs import Call
from retrofit.layers import ProxyNorm
from retrofit.layers.normality_mixin import lambda_values
from retrofit.networks.open_model import Network
from retrofit.utils.forward_pass import device_of, evaluating, hooked

Batches = Sequence[Batch] | DataLoader[Any]
Progress = Callable[[int, int, str], None]
Item = TypeVar("Item")

# Values of a channel in a batch, for a Q-Q plot.
_VALUES = 2048
# Pairs of channels of a layer, and values of each.
_PAIRS = 8
_PAIR_VALUES = 400
# Values of a channel, below which statistics of pairs say nothing.
FEWEST = 50
# Values of a channel in an image, evenly spread, for the activation's linearity.
_POSITIONS = 4096
# Layers that get noise.
_SOURCES = 4
# Images on which lambda is estimated, and which are followed through the layers with noise.
_FEW = 16
_QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)


@dataclass(frozen=True)
class Layer:
    """What was found about one normalization layer."""

    name: str
    # Class name.
    kind: str
    # Mean R^2 of the Q-Q plots of what the affine gets: after the power transform, where there is
    # one.
    r2: float | None
    # The same before the transform; None where there is none.
    r2_before: float | None
    power: Power
    # Mean over pairs of channels; None where no pair varies, or a batch has too few values.
    henze_zirkler: float | None
    # Mean adjusted mutual information over the same pairs.
    dependence: float | None
    # How close to linear the activation that directly follows acts; None without one.
    linearity: float | None
    # Quantiles 0, 5, 25, 50, 75, 95 and 100% of lambda, strength included: over channels where a
    # running average is used, else over the normalized sets of the first images; None without a
    # transform.
    lmbda: tuple[float, ...] | None
    # Q-Q plot of the channel whose R^2 is the median one.
    plot: meters.QQ | None = field(repr=False, compare=False)


@dataclass(frozen=True)
class Diagnosis:
    """What was found about a network."""

    # Number of images that were measured.
    images: int
    # The layers that were called, in the model's order.
    layers: tuple[Layer, ...]
    # Where noise injected at some layers went.
    noise: tuple[Attenuation, ...]
    # Empty where the model gives no class scores.
    input_noise: tuple[InputNoise, ...]
    # Layers that subtract no mean, are one with their activation, are not called, or do not hold
    # the images in their first dimension.
    unmeasured: tuple[str, ...] = ()
    # None where none was asked for, or there are no labels.
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
    pixels, _ = next(iter(sample_loader(data, network.preprocess, images=1)))
    with evaluating(network.model):
        scores = network.model(pixels.to(device_of(network.model)))
    classes = None
    if are_scores(scores):
        classes = scores.shape[1]
    labelled = data.classes is not None and not data.doubt(classes, network.labels)
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

    Args:
        model: The network.
        batches: Preprocessed images, (N, C, H, W), and their labels or None. All are passed over at
            least twice, so a loader that reads them when asked for (`sample_loader`) keeps memory
            small.
        channels: Q-Q plots are of so many channels of each layer, as in figure 6.
        plotted: Batches that Q-Q plots are made of, evenly spread, as in figure 6.
        seed: Chooses channels, values and noise.
        attack: A change of the images, to count the predictions that stay right.
        progress: Gets (done, in all, what).

    Raises:
        RetrofitError: If the network calls no normalization layer or gives scores that are not
            finite, or there are no images.
    """
    if not len(batches):
        raise RetrofitError("there are no images to measure on; give some")
    device = device_of(model)
    few = _first_images(batches, _FEW).to(device)

    def passing(stage: str) -> Iterator[Batch]:
        """Pass over all batches, on the network's device."""
        for pixels, labels in _reported(stage, batches, progress):
            yield pixels.to(device), labels

    with evaluating(model):
        measured, unmeasured = _measurable(model, few[:1])
        every = math.ceil(len(batches) / plotted)
        observers = [_Observer(probe, channels, seed, every) for probe in measured]
        _follow_activations(model, observers)
        images, predictions = _observe(model, observers, passing("layers"))
        called = _called(observers)
        unmeasured += tuple(each.probe.name for each in observers if each not in called)
        lambdas = lambda_values(model, few)
        layers = [
            observer.result(lambdas.get(observer.probe.name))
            for observer in _reported("statistics", called, progress)
        ]
        noise = _follow_noise(model, [each.probe for each in called], few, seed, progress)
        under_noise: list[InputNoise] = []
        attacked = None
        if predictions:
            under_noise = input_noise(model, passing("input noise"), predictions, seed)
            if attack is not None:
                attacked = under_attack(model, passing("attack"), predictions, attack)
    return Diagnosis(
        images=images,
        layers=tuple(layers),
        noise=noise,
        input_noise=tuple(under_noise),
        unmeasured=unmeasured,
        attack=attacked,
    )


def _called(observers: "Iterable[_Observer]") -> "list[_Observer]":
    """Return the observers of the layers that the batches called: a network may call others for one
    image.
    """
    called = [observer for observer in observers if observer.seen]
    if not called:
        raise RetrofitError("the model calls none of its normalization layers on these images")
    return called


def _follow_noise(
    model: nn.Module, probes: list[Probe], pixels: Tensor, seed: int, progress: Progress | None
) -> tuple[Attenuation, ...]:
    """Return where noise goes that is injected at some of the layers, evenly spread."""
    sources = [probes[rank] for rank in evenly_spread(len(probes), _SOURCES)]
    followed = [
        attenuation(model, probes, source, pixels, seed)
        for source in _reported("noise", sources, progress)
    ]
    return tuple(noise for noise in followed if noise.errors)


def _first_images(batches: Batches, most: int) -> Tensor:
    """Return the first images of all, (N, C, H, W)."""
    images: list[Tensor] = []
    for pixels, _ in batches:
        images += pixels
        if len(images) >= most:
            break
    return torch.stack(images[:most])


def _measurable(model: nn.Module, image: Tensor) -> tuple[list[Probe], tuple[str, ...]]:
    """Return the probes of layers that hold the images in their first dimension, and the names of
    the layers that are not measured.
    """
    standardizing, others = probes(model)
    calls = [Call((image,)), Call((torch.cat([image, image]),))]
    shapes = Reference(model, calls, layers=[probe.name for probe in standardizing]).shapes
    measured = [probe for probe in standardizing if _double(shapes[probe.name])]
    if not measured:
        raise RetrofitError(
            "the model calls no normalization layer that holds the images in its first dimension, "
            "to diagnose; `retrofit inspect` lists what a model has"
        )
    apart = [probe.name for probe in standardizing if probe not in measured]
    return measured, (*others, *apart)


def _double(shapes: Sequence[torch.Size]) -> bool:
    """Whether the last output has twice the rows of the first; there may be none."""
    return bool(shapes) and shapes[-1][0] == 2 * shapes[0][0]


def _observe(
    model: nn.Module, observers: "list[_Observer]", batches: Iterable[Batch]
) -> tuple[int, list[Tensor]]:
    """Have observers look at all images.

    Returns:
        The number of images, and the predicted classes, (N,) for each batch; none if the network
        gives no class scores.
    """
    images = 0
    predictions: list[Tensor] = []
    hooks = (
        observer.probe.layer.register_forward_pre_hook(observer.observe) for observer in observers
    )
    with hooked(hooks):
        for pixels, _ in batches:
            images += len(pixels)
            scores = model(pixels)
            if not are_scores(scores):
                continue
            if not scores.isfinite().all():
                raise RetrofitError(
                    "the network gives scores that are not finite; check its weights"
                )
            predictions.append(scores.argmax(1))
    return images, predictions


def _reported(
    stage: str, items: Sequence[Item] | DataLoader[Item], progress: Progress | None
) -> Iterator[Item]:
    for number, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(number, len(items), stage)


def _follow_activations(model: nn.Module, observers: "list[_Observer]") -> None:
    """Give each observer the activation that directly follows its layer."""
    by_layer = {observer.probe.layer: observer for observer in observers}
    for site in find_sites(model, by_layer.__contains__).sites:
        if site.call_count == 1 and site.activation is not None:
            norm = model.get_submodule(site.norm)
            by_layer[norm].activation = site.activation.module
    for module in model.modules():
        if isinstance(module, ProxyNorm) and module.norm in by_layer:
            by_layer[module.norm].activation = module


class _Observer:
    """Gathers what one layer makes of each batch."""

    def __init__(self, probe: Probe, channels: int, seed: int, every: int) -> None:
        self.probe = probe
        self.activation: nn.Module | None = None
        self.seen = 0
        self._channels = channels
        # One in so many batches is plotted.
        self._every = every
        self._generator = torch.Generator().manual_seed(seed)
        self._power = PowerMeter()
        self._linearity = LinearityMeter()
        self._plots: list[meters.QQ] = []
        self._before: list[float] = []
        self._pairs: list[meters.FloatArray] = []

    def observe(self, _layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Look at what the layer is given."""
        x = args[0]
        probe = self.probe
        y = probe.normalized(x)
        self._power.update(y)
        activation = self.activation
        if activation is not None:
            self._measure_linearity(activation, probe.output(x))
        is_plotted = self.seen % self._every == 0
        if is_plotted:
            self._look_closely(x, y)
        self.seen += 1

    def _measure_linearity(self, activation: nn.Module, out: Tensor) -> None:
        activated = self.probe.by_channel(activation(out.clone()))
        before = self.probe.by_channel(out)
        positions = before.shape[2]
        step = 1 + (positions - 1) // _POSITIONS
        self._linearity.update(before[..., ::step], activated[..., ::step])

    def _look_closely(self, x: Tensor, y: Tensor) -> None:
        """Plot channels of what the layer passes on, and of what its transform gets."""
        drawn = torch.randperm(y.shape[1], generator=self._generator, device="cpu")
        channels = drawn[: self._channels].sort().values.to(y.device)
        plotted = y[:, channels]
        if self.probe.transforms:
            before = self.probe.normalized(x, transformed=False)
            plotted = torch.cat([plotted, before[:, channels]], 1)
        sample = meters.sample(plotted, _VALUES, self._generator)
        values, values_before = np.split(sample, [len(channels)], axis=1)
        self._plots += _plots(values)
        self._before += [plot.r2 for plot in _plots(values_before)]
        if not self._pairs and len(values) >= FEWEST:
            self._pairs = _pairs(values[:_PAIR_VALUES])

    def result(self, lmbda: Tensor | None) -> Layer:
        """Return the layer's figures; `lmbda` are its estimates, if it has any."""
        quantiles = None
        if lmbda is not None:
            layer: Any = self.probe.layer
            used = 1 + float(layer.effective_alpha) * (lmbda.double() - 1)
            quantiles = tuple(np.quantile(used.numpy(), _QUANTILES).tolist())
        linearity = None
        if self.activation is not None:
            linearity = self._linearity.result()
        ranked = sorted(self._plots, key=lambda plot: plot.r2)
        median_plot = None
        if ranked:
            median_plot = ranked[len(ranked) // 2]
        return Layer(
            name=self.probe.name,
            kind=self.probe.kind,
            r2=mean_of(plot.r2 for plot in ranked),
            r2_before=mean_of(self._before),
            power=self._power.result(),
            henze_zirkler=mean_of(map(meters.henze_zirkler, self._pairs)),
            dependence=mean_of(map(meters.dependence, self._pairs)),
            linearity=linearity,
            lmbda=quantiles,
            plot=median_plot,
        )


def _plots(values: meters.FloatArray) -> list[meters.QQ]:
    """Return the Q-Q plots of the columns of (values, channels) that vary."""
    every = [meters.qq(column) for column in values.T]
    return [plot for plot in every if plot is not None]


def _pairs(values: meters.FloatArray) -> list[meters.FloatArray]:
    """Return (values, 2) of neighbouring columns that vary, of (values, channels)."""
    live = [column for column in values.T if column.std() > 0]
    pairs = zip(live[0::2], live[1::2], strict=False)
    return [np.stack(pair, 1) for pair in islice(pairs, _PAIRS)]


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of those values that are there and finite; None if none is."""
    finite = [value for value in values if value is not None and np.isfinite(value)]
    if finite:
        return float(np.mean(finite))
    return None
