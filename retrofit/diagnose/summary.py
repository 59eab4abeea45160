"""What a diagnosis says, in a few sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from retrofit.diagnose.diagnosis import FEWEST, Diagnosis, Layer
from retrofit.utils.text import shortlist

_COLLAPSED = 0.5
_LINEAR = 0.95


def sentences(networks: Mapping[str, Diagnosis]) -> list[str]:
    """Put the main figures of one or two diagnoses into words.

    Args:
        networks: Diagnoses by the name to show.
    """
    return [f"{name}: {text}" for name, diagnosis in networks.items() for text in _about(diagnosis)]


def _about(diagnosis: Diagnosis) -> list[str]:
    layers = diagnosis.layers
    texts = []
    r2 = _mean(layers, lambda layer: layer.r2)
    if r2 is not None:
        worst = min((layer for layer in layers if layer.r2 is not None), key=lambda layer: layer.r2 or 0.0)
        before = _mean(layers, lambda layer: layer.r2_before)
        gained = "" if before is None else f" ({before:.3f} before the transform)"
        texts.append(f"mean R² to normal {r2:.3f}{gained}; furthest from normal: {worst.name} ({worst.r2:.3f})")
    collapsed = [layer.name for layer in layers if layer.power.p1 > _COLLAPSED]
    deepest = layers[-1]
    texts.append(
        f"{len(collapsed)} of {len(layers)} layers have most of their power in a constant (P1 above {_COLLAPSED:g})"
        f"{': ' + collapsed[0] + ' is the first' if collapsed else ''}; P1 of the last layer {deepest.power.p1:.2f}"
    )
    linear = [layer for layer in layers if layer.linearity is not None]
    if linear:
        count = sum(1 for layer in linear if (layer.linearity or 0.0) > _LINEAR)
        texts.append(f"{count} of {len(linear)} activations act almost linearly (above {_LINEAR:g})")
    if few := sum(1 for layer in layers if layer.henze_zirkler is None):
        texts.append(
            f"joint normality and dependence are left out for {few} of {len(layers)} layers: a batch has fewer than "
            f"{FEWEST} values of a channel there, or its channels do not vary"
        )
    if left := diagnosis.unmeasured:
        texts.append(
            f"{len(left)} normalization layers subtract no mean, are one with their activation or do not hold the "
            f"images in their first dimension, and are not measured ({shortlist(left)})"
        )
    if diagnosis.noise:
        first = diagnosis.noise[0]
        ratio = first.errors[-1] / max(first.errors[0], 1e-30)
        texts.append(
            f"noise added at {first.source} {'grows' if ratio > 1 else 'shrinks'} on its way: "
            f"relative to the signal it is {ratio:.2f} times as large at {first.layers[-1]}"
        )
    if diagnosis.input_noise:
        clean, noisy = diagnosis.input_noise[0], diagnosis.input_noise[-2]
        if clean.top1 is not None and noisy.top1 is not None:
            texts.append(f"top-1 {clean.top1:.1f}%; {noisy.top1:.1f}% with noise of {noisy.level:g} on the images")
        else:
            texts.append(
                f"{noisy.agreement:.1f}% of the answers stay the same with noise of {noisy.level:g} on the images"
            )
    if (attacked := diagnosis.under_attack) is not None:
        texts.append(f"top-1 {attacked.top1:.1f}% under {attacked.attack}")
    return texts


def _mean(layers: tuple[Layer, ...], value: Callable[[Layer], float | None]) -> float | None:
    values = [v for layer in layers if (v := value(layer)) is not None]
    return fmean(values) if values else None
