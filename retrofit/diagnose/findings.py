"""The main figures of a diagnosis in words."""

from collections.abc import Iterator, Mapping, Sequence

from retrofit.diagnose.diagnosis import FEWEST, Diagnosis, Layer, mean_of
from retrofit.diagnose.perturbations import InputNoise
from retrofit.utils.text import shortlist

# A layer with a larger P1 has collapsed.
_COLLAPSED = 0.5
# An activation of a larger linearity acts almost linearly.
_LINEAR = 0.95


def sentences(networks: Mapping[str, Diagnosis]) -> list[str]:
    """Put the main figures of one or two diagnoses, by the name to show, into words."""
    return [
        f"{name}: {text}" for name, diagnosis in networks.items() for text in _findings(diagnosis)
    ]


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    layers = diagnosis.layers
    yield from _gaussianity_findings(layers)
    yield from _layer_findings(layers)
    few = sum(layer.henze_zirkler is None for layer in layers)
    if few:
        yield (
            f"joint normality and dependence are left out for {few} of {len(layers)} layers: a "
            f"batch has fewer than {FEWEST} values of a channel there, or its channels do not vary"
        )
    unmeasured = diagnosis.unmeasured
    if unmeasured:
        yield (
            f"{len(unmeasured)} normalization layers subtract no mean, are one with their "
            "activation, are not called or do not hold the images in their first dimension, and are not measured "
            f"({shortlist(unmeasured)})"
        )
    for noise in diagnosis.noise[:1]:
        ratio = noise.errors[-1] / max(noise.errors[0], 1e-30)
        yield (
            f"noise added at {noise.source}, relative to the signal, is {ratio:.2f} times as "
            f"large at {noise.layers[-1]}"
        )
    if diagnosis.input_noise:
        yield _on_noisy_images(diagnosis.input_noise)
    if diagnosis.attack is not None:
        yield f"top-1 {diagnosis.attack.top1:.1f}% under {diagnosis.attack.attack}"


def _gaussianity_findings(layers: Sequence[Layer]) -> Iterator[str]:
    measured = [(layer.r2, layer.name) for layer in layers if layer.r2 is not None]
    if not measured:
        return
    text = f"mean R² to normal {mean_of(r2 for r2, _ in measured):.3f}"
    before = mean_of(layer.r2_before for layer in layers)
    if before is not None:
        text += f" ({before:.3f} before the transform)"
    lowest, name = min(measured)
    yield f"{text}; furthest from normal: {name} ({lowest:.3f})"


def _layer_findings(layers: Sequence[Layer]) -> Iterator[str]:
    collapsed = [layer.name for layer in layers if layer.power.p1 > _COLLAPSED]
    text = (
        f"{len(collapsed)} of {len(layers)} layers have most of their power in a constant "
        f"(P1 above {_COLLAPSED:g})"
    )
    if collapsed:
        text += f": {collapsed[0]} is the first"
    yield f"{text}; P1 of the last layer {layers[-1].power.p1:.2f}"
    linearities = [layer.linearity for layer in layers if layer.linearity is not None]
    if linearities:
        linear = sum(linearity > _LINEAR for linearity in linearities)
        yield f"{linear} of {len(linearities)} activations act almost linearly (above {_LINEAR:g})"


def _on_noisy_images(levels: Sequence[InputNoise]) -> str:
    clean = levels[0]
    noisy = levels[-2]
    noise = f"with noise of {noisy.level:g} on the images"
    if clean.top1 is None:
        return f"{noisy.agreement:.1f}% of the answers are the same {noise}"
    return f"top-1 {clean.top1:.1f}%; {noisy.top1:.1f}% {noise}"
