"""The main figures of a diagnosis in words."""

from collections.abc import Iterator, Mapping, Sequence

from retrofit.diagnose.diagnosis import FEWEST, Diagnosis, Layer, mean_of
from retrofit.diagnose.perturbations import Attenuation, InputNoise
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
    yield from _gaussianity_findings(diagnosis.layers)
    yield from _layer_findings(diagnosis.layers)
    yield from _omissions(diagnosis.layers)
    unmeasured = diagnosis.unmeasured
    if unmeasured:
        yield (
            f"{len(unmeasured)} normalization layers subtract no mean, are one with their "
            "activation or do not hold the images in their first dimension, and are not measured "
            f"({shortlist(unmeasured)})"
        )
    for noise in diagnosis.noise[:1]:
        yield _course_of(noise)
    yield from _input_noise_findings(diagnosis.input_noise)
    if diagnosis.attack is not None:
        yield f"top-1 {diagnosis.attack.top1:.1f}% under {diagnosis.attack.attack}"


def _gaussianity_findings(layers: Sequence[Layer]) -> Iterator[str]:
    r2 = mean_of(layer.r2 for layer in layers)
    if r2 is None:
        return
    text = f"mean R² to normal {r2:.3f}"
    before = mean_of(layer.r2_before for layer in layers)
    if before is not None:
        text += f" ({before:.3f} before the transform)"
    measured = [(layer.r2, layer.name) for layer in layers if layer.r2 is not None]
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


def _omissions(layers: Sequence[Layer]) -> Iterator[str]:
    few = sum(layer.henze_zirkler is None for layer in layers)
    if few:
        yield (
            f"joint normality and dependence are left out for {few} of {len(layers)} layers: a "
            f"batch has fewer than {FEWEST} values of a channel there, or its channels do not vary"
        )


def _course_of(noise: Attenuation) -> str:
    ratio = noise.errors[-1] / max(noise.errors[0], 1e-30)
    course = "shrinks"
    if ratio > 1:
        course = "grows"
    return (
        f"noise added at {noise.source} {course} on its way: relative to the signal it is "
        f"{ratio:.2f} times as large at {noise.layers[-1]}"
    )


def _input_noise_findings(answers: Sequence[InputNoise]) -> Iterator[str]:
    if not answers:
        return
    clean = answers[0]
    noisy = answers[-2]
    noise = f"with noise of {noisy.level:g} on the images"
    if clean.top1 is None or noisy.top1 is None:
        yield f"{noisy.agreement:.1f}% of the answers are the same {noise}"
    else:
        yield f"top-1 {clean.top1:.1f}%; {noisy.top1:.1f}% {noise}"
