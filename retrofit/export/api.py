"""`retrofit.fold` and `retrofit.export_onnx`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export.approximation.choose import Approximation
from retrofit.export.approximation.fit import MAX_SIZE
from retrofit.export.export_report import SCHEMA, ExportReport
from retrofit.export.folding.network import Folded, fold_network
from retrofit.export.onnx.model import check_opset, node_counts, to_onnx
from retrofit.export.onnx.precision import Precision, to_float16, to_int8
from retrofit.export.onnx.write import written
from retrofit.export.parity import BATCHES, Check, Parity, ParityError, answer, compare, reference, sample_inputs
from retrofit.export.report_beside import check_report, report_beside
from retrofit.record import Preprocess, record_of
from retrofit.surgery import identity_check
from retrofit.surgery.execute import strength_of
from retrofit.surgery.identity_check import IdentityCheck, is_detector, own_input_size
from retrofit.utils.batches import images_of
from retrofit.utils.files import ensure_writable
from retrofit.utils.onnx_runtimes import RUNTIMES, Runtime

EXACT_TOLERANCE = 1e-4
APPROXIMATE_TOLERANCE = 0.05
NARROW = {  # what passes, and what to do about what does not
    "float16": (0.02, "use `fold='exact'`, keep float32, or raise `tolerance` if you can accept that"),
    "int8": (0.3, "bake the network first, give other images, or raise `tolerance` if you can accept that"),
}
BATCH = 32  # images at a time
Fold = Literal["exact", "poly"]


def fold(
    model: nn.Module,
    fold: Fold = "exact",
    *,
    input_size: Sequence[int] | None = None,
    runtime: Runtime | None = None,
    degree: int | None = None,
    tolerance: float | None = None,
    calibrate: Iterable[Any] | None = None,
    freeze_lambda: bool = False,
) -> nn.Module:
    """Return a copy of a network for inference, its normalization layers folded: the network that is exported.

    The copy is compared with the network on seeded random input, and on the images given; an approximate one on images
    that it was not fitted on (on seeded input without images).

    Args:
        model: Any network, converted or not; it is not changed.
        fold: "exact", the same function to rounding, or "poly", polynomials or lines in place of the power transform.
        input_size: Shape of one sample, (C, H, W); the model's own if None.
        runtime: As `export_onnx` takes it, as are those that follow.
        degree: Of all, or the number of lines.
        tolerance: Largest difference of an output that passes; the choice of degrees has to meet it.
        calibrate: Images to fit and judge on.
        freeze_lambda: Whether to freeze lambda.

    Returns:
        The copy, in evaluation mode and float32: for torch.compile or AOTInductor.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network does not take an input of that size, no degree meets the tolerance, or the copy is
            not the same function.
    """
    size = _size(model, input_size)
    wanted = _approximation(fold, runtime, degree, tolerance, _images(calibrate, size), freeze_lambda, size, "float32")
    folded, _ = _checked_fold(model, size, *wanted)
    return folded.model


def export_onnx(
    model: nn.Module,
    path: str | Path,
    fold: Fold = "exact",
    input_size: Sequence[int] | None = None,
    opset: int = 18,
    *,
    runtime: Runtime | None = None,
    degree: int | None = None,
    tolerance: float | None = None,
    calibrate: Iterable[Any] | None = None,
    freeze_lambda: bool = False,
    dynamic_size: bool = False,
    precision: Precision = "float32",
    report: str | Path | None = None,
    force: bool = False,
) -> ExportReport:
    """Write a network as ONNX, folded, and checked against PyTorch; a model that fails the check is not written.

    An exact export is compared with the network on seeded random input, and on the images given. An approximate one
    (fold "poly", or frozen lambdas) is compared with its own folded PyTorch form on seeded input, at the tolerance of
    exact ones, and with the network on images that it was not fitted on (on seeded input without images).

    Args:
        model: Any network of one image input, converted or not; it is not changed.
        path: The file.
        fold: "exact", the same function to rounding, or "poly", polynomials or lines in place of the power transform.
        input_size: Shape of one sample, (C, H, W); the model's own if None.
        opset: ONNX operator set, 18 to 22.
        runtime: What an approximation is for: "onnxruntime" (None is the same), polynomials, or "openvino", continuous
            piecewise-linear functions and polynomials, for runtimes that fuse elementwise operations. In INT8 both are
            polynomials: for "onnxruntime" quantized up to degree 3, for "openvino" left in float32.
        degree: Of all polynomials, or the number of lines, 2 to 8; if None, each layer gets one by what its error does
            to the output, as low as the tolerance allows.
        tolerance: Largest difference of an output that passes, as a share of the largest output; if None 1e-4, 0.05 for
            approximate exports, 0.02 in float16 and 0.3 in INT8. With those two it judges the file; folding is
            judged by its own, and an approximation by the larger of its own and this.
        calibrate: Batches of preprocessed images to check on, with labels or without, as a loader gives them. Where
            something is approximated, every second image is fitted on and the others are checked on.
        freeze_lambda: Give layers that estimate lambda from their input (layer, group and instance normality
            normalization) its mean over the images instead.
        dynamic_size: Whether height and width may vary, besides the batch.
        precision: "float16" halves the file. "int8" quantizes convolutions and matrix products, per channel, with the
            ranges that every second image of `calibrate` shows. Either is compared with the network in its own
            precision, on the other images.
        report: A file for the report: a page (.html), or `ExportReport.to_dict` (.json). It is written when the model
            has passed its check, and complete before either file gets its name: the model's first, then the report's.
        force: Whether existing files may be replaced.

    Returns:
        The report.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network cannot be exported, the check fails, or the file cannot be written.
    """
    check_opset(opset)
    size = _size(model, input_size)
    images = _images(calibrate, size)
    fitted, judged = _narrow_images(precision, images, size)
    own = tolerance
    if precision != "float32":  # the tolerance judges the file; what is approximated must not be further off than that
        approximated = fold == "poly" or freeze_lambda
        own = max(tolerance, APPROXIMATE_TOLERANCE) if approximated and tolerance is not None else None
    wanted = _approximation(fold, runtime, degree, own, images, freeze_lambda, size, precision)
    approximation = wanted[0]
    target = ensure_writable(path, force)
    if report is not None:
        check_report(report, target, force)
    folded, check = _checked_fold(model, size, *wanted)
    labels = _labels(model, check)
    proto = to_onnx(folded.model, size, opset, dynamic_size, _metadata(model, fold, precision, size, labels))
    checks = [check]
    if precision != "float32":
        proto = to_int8(proto, fitted, runtime or "onnxruntime") if precision == "int8" else to_float16(proto)
        allowed, advice = NARROW[precision]
        checks = [Check(judged, reference(model, judged), tolerance or allowed, advice)]
    elif approximation is not None:
        seeded = sample_inputs(size)
        checks.insert(0, Check(seeded, reference(folded.model, seeded), EXACT_TOLERANCE))
    with report_beside(report, force) as keep, written(proto, target, force, checks) as (parity, length):
        source, preprocess = _known(model, "source"), _preprocess(model, size)
        found = ExportReport(
            model=None if source is None else source.name,
            **_conversion(model),
            weights=_known(model, "weights"),
            fold=fold,
            precision=precision,
            opset=opset,
            output=str(path),
            bytes=length,
            parity=parity,
            judged_on=_judged_on(images, mixed=precision == "float32" and approximation is None),
            nodes=node_counts(proto),
            preprocess=preprocess or None,
            labels=None if labels is None else len(labels),
            layers=tuple(folded.layers),
        )
        keep(found)
    return found


def _checked_fold(
    model: nn.Module,
    size: tuple[int, ...],
    approximation: Approximation | None,
    inputs: Sequence[Tensor],
    tolerance: float,
) -> tuple[Folded, Check]:
    """Fold a copy of a network, compare the two, and return the copy and what it was compared on."""
    folded = fold_network(model, size, approximation)
    check = Check(inputs, reference(model, inputs), tolerance)
    if is_detector(model):  # what is sorted and suppressed may be another box for a rounding error
        result = IdentityCheck(model, size).compare(folded.model, layers=False)
        found = Parity(identity_check.BATCHES, result.max_abs_diff, result.scale, None, tolerance)
    else:
        found = compare(lambda batch: answer(folded.model, batch), check)
    if found.share > tolerance:
        if approximation is not None and approximation.freeze_lambda:
            advice = "raise `tolerance` if you can accept that, or leave out `freeze_lambda`"
            raise ParityError(found, "the network with constant lambdas differs from the given one", advice)
        if approximation is not None and approximation.degree is not None:
            advice = "raise `degree` or leave it out, or raise `tolerance` if you can accept that"
            raise ParityError(found, "the approximation differs from the given network", advice)
        raise ParityError(found, "the folded network differs from the given one")
    return folded, check


def _size(model: nn.Module, input_size: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(input_size or own_input_size(model))


def _images(calibrate: Iterable[Any] | None, size: Sequence[int]) -> list[Tensor]:
    images = [] if calibrate is None else [image for batch in images_of(calibrate) for image in batch]
    for image in images:
        if image.ndim != len(size) or image.shape[0] != size[0]:
            raise UsageError(
                f"`calibrate` takes batches of images, (N, {', '.join(map(str, size))}); got images of "
                f"{tuple(image.shape)}"
            )
    return images


def _approximation(
    fold: str,
    runtime: Runtime | None,
    degree: int | None,
    tolerance: float | None,
    images: Sequence[Tensor],
    freeze_lambda: bool,
    size: Sequence[int],
    precision: Precision,
) -> tuple[Approximation | None, list[Tensor], float]:
    """Check arguments; return what may be approximated, the batches to compare on, and the tolerance."""
    if fold not in ("exact", "poly"):
        raise UsageError(f"there is no fold {fold!r}; use exact or poly")
    if runtime is not None and runtime not in RUNTIMES:
        raise UsageError(f"nothing is known of a runtime {runtime!r}; use {' or '.join(RUNTIMES)}")
    for name, value in (("degree", degree), ("runtime", runtime)):
        if value is not None and fold != "poly":
            raise UsageError(f"`{name}` matters to approximations only; use `fold='poly'` with it")
    if degree is not None and not 2 <= degree <= MAX_SIZE:
        raise UsageError(f"`degree={degree}` is not supported; use 2 to {MAX_SIZE}, or leave it out")
    if tolerance is not None and not tolerance > 0:
        raise UsageError(f"`tolerance` must be more than 0, not {tolerance}; {EXACT_TOLERANCE:g} is usual")
    if freeze_lambda and not images:
        raise UsageError("`freeze_lambda` takes the mean of lambda over images; give `calibrate` images too")
    if fold == "exact" and not freeze_lambda:
        return None, [*sample_inputs(size), *_batches(images)], tolerance or EXACT_TOLERANCE
    if len(images) == 1:
        raise UsageError("one image cannot be fitted on and checked on; give `calibrate` more")
    tolerance = tolerance or APPROXIMATE_TOLERANCE
    check = _batches(images[1::2]) if images else sample_inputs(size)
    family: Runtime | None = (runtime or "onnxruntime") if fold == "poly" else None
    if family == "openvino" and precision == "int8":
        family = "onnxruntime"  # what lies between lines would be quantized, in its own range and not in the sum's
    wanted = Approximation(family, degree, freeze_lambda, tolerance, _batches(images[::2]), check)
    return wanted, check, tolerance


def _narrow_images(
    precision: Precision, images: Sequence[Tensor], size: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the images to take ranges from, and those to judge a narrow file on."""
    if precision not in get_args(Precision):
        raise UsageError(f"there is no precision {precision!r}; use {', '.join(get_args(Precision))}")
    if precision == "int8" and len(images) < 2:
        raise UsageError("INT8 takes its ranges from images and is judged on others; give `calibrate` images")
    return _batches(images[::2]), _batches(images[1::2]) if len(images) > 1 else sample_inputs(size)


def _batches(images: Sequence[Tensor]) -> list[Tensor]:
    """Return images as a batch of 1, one of 3 and larger ones, as far as they go."""
    ends = [0, *BATCHES, *range(sum(BATCHES) + BATCH, len(images) + BATCH, BATCH)]
    ends[2] += ends[1]
    return [torch.stack(list(images[a:b])) for a, b in pairwise(ends) if a < len(images)]


def _known(model: nn.Module, name: str, attribute: str | None = None) -> Any:
    """Return what the command line or `retrofit.load` noted about a network; None if nothing."""
    found = getattr(record_of(model), name)
    return found if attribute is None or found is None else getattr(found, attribute)


def _preprocess(model: nn.Module, size: Sequence[int]) -> dict[str, Any]:
    """Return how to make the network's input of an image, at the size of the file; nothing if that is not known."""
    known: Preprocess | None = _known(model, "preprocess")
    return {} if known is None else {**known.to_dict(), "input_size": list(size)}


def _judged_on(images: Sequence[Tensor], mixed: bool) -> str:
    """Say what a file was compared on: random inputs, and images if `mixed`; else on images that no fit has seen."""
    if mixed:
        return "random inputs and images" if images else "random inputs"
    return "images" if len(images) > 1 else "random inputs"


def _labels(model: nn.Module, check: Check) -> list[str] | None:
    """Return the names of the outputs; None if they are unknown, or of a classifier that the network had before."""
    labels: list[str] | None = _known(model, "labels")
    outputs = check.expected[0]
    if not labels or (len(outputs) == 1 and outputs[0].ndim == 2 and len(labels) != outputs[0].shape[1]):
        return None
    return labels


def _conversion(model: nn.Module) -> dict[str, Any]:
    """Return what a network was converted to last, and the strength of its layers; None where they differ."""
    plans = record_of(model).plans
    try:
        strength = strength_of(model)
    except RetrofitError:
        strength = None
    return {"target": plans[-1].to if plans else None, "strength": strength}


def _metadata(
    model: nn.Module, fold: str, precision: str, size: Sequence[int], labels: list[str] | None
) -> Mapping[str, str]:
    """Return what a user of the file may need to know, each value a string or JSON."""
    source = _known(model, "source")
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "retrofit": retrofit.__version__,
        "model": type(model).__name__ if source is None else str(source),
        **_conversion(model),
        "fold": fold,
        "precision": precision,
        "input_size": list(size),
        "labels": labels,
    }
    found |= _preprocess(model, size)
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items() if value is not None
    }
