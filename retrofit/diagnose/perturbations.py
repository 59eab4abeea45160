"""What becomes of noise that is added inside a network or to its images, and of attacks on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.attack import Attack
from retrofit.diagnose.meters import Probe
from retrofit.utils.forward_pass import hooked, standard_normal

Batch = tuple[Tensor, "Tensor | None"]

NOISE_LEVELS = (0.0, 0.1, 0.25, 0.5, 1.0)
INJECTED = 0.1


@dataclass(frozen=True)
class Attenuation:
    """What is left, layer by layer, of noise added at one layer."""

    # The layer whose output got the noise.
    source: str
    # It and those after it whose output varies, in the order in which they are called.
    layers: tuple[str, ...]
    # Of each one's output: |noisy - clean| / |clean - its mean over images and positions|.
    errors: tuple[float, ...]


@dataclass(frozen=True)
class InputNoise:
    """Predictions under noise on the images."""

    # Standard deviation of the noise, in units of the normalized image
    level: float
    # Percent right; None without labels
    top1: float | None
    # Percent of predictions that are those without noise
    agreement: float


@dataclass(frozen=True)
class UnderAttack:
    """Predictions under attack: its kind and size, and the percentage that stays right."""

    attack: str
    top1: float


def attenuation(
    model: nn.Module, live: Sequence[Probe], source: Probe, pixels: Tensor, seed: int
) -> Attenuation:
    """Add Gaussian noise, `INJECTED` times each channel's standard deviation, to one layer's output
    and follow it.

    Eftekhari & Papyan (2025, section 2.1.2 and appendix A.1) follow the mean squared error between
    noisy and clean activations. Here it is its root, divided by the spread of the clean ones, so
    that layers of any scale compare. Clean and noisy images go through as two halves
    of one batch, so that nothing of the clean run is stored.
    """
    errors: dict[str, float] = {}
    generator = torch.Generator().manual_seed(seed)

    def perturb(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        clean, _ = out.chunk(2)
        channels = source.channel_axis(out)
        others = [dim for dim in range(out.ndim) if dim != channels]
        deviation = INJECTED * clean.std(others, correction=0, keepdim=True)
        noise = deviation * standard_normal(clean.shape, generator).to(clean)
        return torch.cat([clean, clean + noise])

    def compare(probe: Probe, _module: nn.Module, _args: Any, out: Tensor) -> None:
        is_reached = bool(errors) or probe is source
        if probe.name in errors or not is_reached:
            return
        clean, noisy = probe.by_channel(out).chunk(2)
        spread = torch.linalg.vector_norm(clean - clean.mean((0, 2), keepdim=True))
        if spread > 0:
            errors[probe.name] = float(torch.linalg.vector_norm(noisy - clean) / spread)

    watched = hooked(probe.layer.register_forward_hook(partial(compare, probe)) for probe in live)
    with source.layer.register_forward_hook(perturb), watched:
        model(torch.cat([pixels, pixels]))
    return Attenuation(source.name, tuple(errors), tuple(errors.values()))


def input_noise(
    model: nn.Module, batches: Iterable[Batch], predictions: Iterable[Tensor], seed: int
) -> list[InputNoise]:
    """Measure a classifier's predictions on images with Gaussian noise, the same for every network.

    `predictions` are the classes (N,) that it predicts for each batch without noise.
    """
    generator = torch.Generator().manual_seed(seed)
    answers: list[Tensor] = []
    labels: list[Any] = []
    for (pixels, of_batch), clean in zip(batches, predictions, strict=True):
        drawn = standard_normal(pixels.shape, generator).to(pixels)
        noisy = [model(pixels + level * drawn).argmax(1) for level in NOISE_LEVELS[1:]]
        answers.append(torch.stack([clean, *noisy]).cpu())
        labels.append(of_batch)
    # (levels, images)
    predicted = torch.cat(answers, 1)
    agreement = _percent(predicted == predicted[0])
    top1: list[Any] = [None] * len(NOISE_LEVELS)
    if labels[0] is not None:
        top1 = _percent(predicted == torch.cat(labels).cpu())
    return [InputNoise(*found) for found in zip(NOISE_LEVELS, top1, agreement, strict=True)]


def _percent(hits: Tensor) -> list[float]:
    """Return the percentage of hits, (levels, images), at each level."""
    percentages: list[float] = (100 * hits.double().mean(1)).tolist()
    return percentages


def under_attack(
    model: nn.Module, batches: Iterable[Batch], predictions: Iterable[Tensor], attack: Attack
) -> UnderAttack | None:
    """Attack what a classifier gets right, and count what stays right; None without labels.

    `predictions` are the classes (N,) that it predicts for each batch without attack.
    """
    images = 0
    right = 0
    for (pixels, labels), clean in zip(batches, predictions, strict=True):
        if labels is None:
            return None
        images += len(pixels)
        targets = labels.to(clean)
        hit = clean == targets
        attacked = pixels[hit]
        classes = clean[hit]
        right += attack.resisted(model, attacked, classes)
    name = str(attack)
    percentage = 100 * right / images
    return UnderAttack(name, percentage)
