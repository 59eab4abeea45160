"""What becomes of noise that is added inside a network or to its images, and of attacks on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.attack import Attack
from retrofit.diagnose.meters import Probe
from retrofit.utils.running import hooked

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
    """Answers under noise on the images."""

    # Standard deviation of the noise, in units of the normalized image
    level: float
    # Percent right; None without labels
    top1: float | None
    # Percent of answers that are those without noise
    agreement: float


@dataclass(frozen=True)
class UnderAttack:
    """Answers under attack: its kind and size, and the percentage of answers that stay right."""

    attack: str
    top1: float


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
        deviation = source.by_channel(clean).std((0, 2), correction=0)
        spread = deviation.to(clean).view(shape)
        noise = INJECTED * spread * _noise_like(clean, generator)
        return torch.cat([clean, clean + noise])

    def compare(probe: Probe, _module: nn.Module, _args: Any, out: Tensor) -> None:
        if probe.name in errors or not (errors or probe is source):
            return
        clean, noisy = (probe.by_channel(half) for half in out.chunk(2))
        signal = clean - clean.mean((0, 2), keepdim=True)
        scale = torch.linalg.vector_norm(signal)
        if scale > 0:
            error = torch.linalg.vector_norm(noisy - clean)
            errors[probe.name] = float(error / scale)

    watched = hooked(probe.layer.register_forward_hook(partial(compare, probe)) for probe in live)
    with source.layer.register_forward_hook(perturb), watched:
        model(torch.cat([pixels, pixels]))
    return Attenuation(source.name, tuple(errors), tuple(errors.values()))


def _noise_like(values: Tensor, generator: torch.Generator) -> Tensor:
    """Draw normal noise on the CPU, the same for every device."""
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float32, device="cpu")
    return noise.to(values)


def input_noise(
    model: nn.Module, batches: Iterable[Batch], answers: Iterable[Tensor], seed: int
) -> list[InputNoise]:
    """Measure a classifier's answers on images with Gaussian noise, the same noise for every
    network.

    `answers` are the classes (N,) that it names for each batch without noise.
    """
    images = 0
    right = [0] * len(NOISE_LEVELS)
    same = [0] * len(NOISE_LEVELS)
    labelled = True
    generator = torch.Generator().manual_seed(seed)
    for (pixels, labels), clean in zip(batches, answers, strict=True):
        drawn = _noise_like(pixels, generator)
        images += len(pixels)
        labelled &= labels is not None
        for place, level in enumerate(NOISE_LEVELS):
            noisy = clean
            if level:
                noisy = model(pixels + level * drawn).argmax(1)
            same[place] += int((noisy == clean).sum())
            if labels is not None:
                right[place] += int((noisy == labels.to(noisy)).sum())
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
        images += len(pixels)
        hit = clean == labels.to(clean)
        if hit.any():
            classes = clean[hit]
            changed = attack(model, pixels[hit], classes)
            predicted = model(changed).argmax(1)
            right += int((predicted == classes).sum())
    return UnderAttack(str(attack), 100 * right / images)
