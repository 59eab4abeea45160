"""`retrofit.fold` and `retrofit.export_onnx`."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import onnx
import torch
from torch import Tensor, nn
from torch.fx import Node

import retrofit
from retrofit.compare import Comparison, Reference, tensors_of
from retrofit.errors import RetrofitError, UsageError
from retrofit.export.approximation.choose import choose
from retrofit.export.approximation.fit import Fit
from retrofit.export.capture import Program, capture
from retrofit.export.fold_constants import fold as fold_program
from retrofit.export.nodes import Transform, calls_of, layer_of
from retrofit.export.onnx.model import check_opset, node_counts, to_onnx
from retrofit.export.onnx.precision import HalfRun, Precision, to_float16, to_int8
from retrofit.export.onnx.write import Check, written
from retrofit.export.power_forms import POWER
from retrofit.export.report import SCHEMA, ComparisonError, ExportReport, FoldedLayer, check_report, report_beside
from retrofit.export.request import Job, Wanted, wanted_fold
from retrofit.inputs import Call, Inputs
from retrofit.layers.lambdas import lambda_values
from retrofit.record import record_of
from retrofit.surgery.execute import strength_of
from retrofit.utils.evaluating import evaluating
from retrofit.utils.files import ensure_writable
from retrofit.utils.onnx_runtimes import Runtime

NARROW = {"float16": 0.02, "int8": 0.3}  # what passes
Fold = Literal["exact", "poly"]
_REPORT_IT = "please report it, or raise `tolerance` if you can accept that"


def fold(
    model: nn.Module,
    fold: Fold = "exact",
    *,
    inputs: Inputs | None = None,
    input_size: Sequence[int] | None = None,
    batch: int | None = None,
    runtime: Runtime | None = None,
    degree: int | None = None,
    tolerance: float | None = None,
    calibrate: Iterable[Any] | None = None,
    freeze_lambda: bool = False,
    dynamic_size: bool = False,
) -> nn.Module:
    """Return a network for inference, its normalization layers folded: the computation that is exported.

    It is captured with example inputs and takes the same arguments, with any number of samples; another call ends in an
    error. It is compared with the network on these inputs and on the images given; an approximate one on images that
    it was not fitted on, if there are any. A network that torch.export cannot capture is not folded: a warning says so,
    and a copy comes back in which each layer computes by plain torch operations.

    Args:
        model: Any network, converted or not; it is not changed.
        fold: "exact", the same function to rounding, or "poly", polynomials or lines in place of the power transform.
        inputs: Example inputs as the network takes them, in place of random images: one tensor, a tuple of positional
            arguments, or a dict of keyword arguments.
        input_size: Shape of one sample, (C, H, W); the model's own if None.
        batch: The number of samples, fixed, for networks that cannot be captured with any number.
        runtime: As `export_onnx` takes it, as are those that follow.
        degree: Of all, or the number of lines.
        tolerance: Largest difference of an output that passes; the choice of degrees has to meet it.
        calibrate: Images to fit and judge on.
        freeze_lambda: Whether to freeze lambda.
        dynamic_size: Whether height and width may vary too.

    Returns:
        The folded network, in evaluation mode and float32: for torch.compile or AOTInductor.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network does not take such inputs, no degree meets the tolerance, or the folded network is
            not the same function.
    """
    job = Job.of(model, inputs, input_size, batch, dynamic_size, calibrate)
    folded = _checked_fold(job, wanted_fold(job, fold, runtime, degree, tolerance, freeze_lambda, "float32"))
    if folded.program.note:
        warnings.warn(f"nothing is fused: {folded.program.note}", stacklevel=2)
    if folded.comparison.not_checked:
        warnings.warn(str(folded.comparison), stacklevel=2)
    module: nn.Module = folded.program.module
    return module


def export_onnx(
    model: nn.Module,
    path: str | Path,
    fold: Fold = "exact",
    input_size: Sequence[int] | None = None,
    opset: int = 18,
    *,
    inputs: Inputs | None = None,
    batch: int | None = None,
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
        model: Any network, converted or not; it is not changed.
        path: The file.
        fold: "exact", the same function to rounding, or "poly", polynomials or lines in place of the power transform.
        input_size: Shape of one sample, (C, H, W); the model's own if None.
        opset: ONNX operator set, 18 to 22.
        inputs: Example inputs as the network takes them, in place of random images: one tensor, a tuple of positional
            arguments, or a dict of keyword arguments, by which several inputs of the file are named.
        batch: The number of samples, fixed, for networks that cannot be captured with any number.
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
        precision: "float16" halves the file; it is judged in ONNX Runtime and by arithmetic in which each operation
            gives float16, so that what overflows there is refused. "int8" quantizes convolutions and matrix products,
            per channel, with the ranges that every second image of `calibrate` shows. Either is compared with the
            network in its own precision, on the other images.
        report: A .json file for the report, `ExportReport.to_dict`. It is written when the model has passed its check,
            and complete before either file gets its name: the model's first, then the report's.
        force: Whether existing files may be replaced.

    Returns:
        The report.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network cannot be exported, the check fails, or the file cannot be written.
    """
    check_opset(opset)
    job = Job.of(model, inputs, input_size, batch, dynamic_size, calibrate)
    if precision not in get_args(Precision):
        raise UsageError(f"there is no precision {precision!r}; use {', '.join(get_args(Precision))}")
    if precision == "int8" and len(job.images) < 2:
        raise UsageError(
            "INT8 takes its ranges from images and is judged on others; give `calibrate` images, 2 or more"
        )
    wanted = wanted_fold(job, fold, runtime, degree, tolerance, freeze_lambda, precision)
    file = ensure_writable(path, force)
    if report is not None:
        check_report(report, file, force)
    folded = _checked_fold(job, wanted)
    program = folded.program
    if program.note:
        advice = "leave out `dynamic_size`" if dynamic_size else "some networks need a fixed `batch=1`"
        raise RetrofitError(program.note if batch is not None else f"{program.note}; {advice}")
    record, sample = record_of(model), [int(n) for n in job.sample]
    preprocess = {} if record.preprocess is None else {**record.preprocess.to_dict(), "input_size": sample}
    target, strength = record.plans[-1].to if record.plans else None, _strength(model)
    labels = record.labels if _has_labels(program, record.labels) else None
    facts = {
        "schema": SCHEMA,
        "retrofit": retrofit.__version__,
        "model": type(job.network).__name__ if record.source is None else str(record.source),
        **{"target": target, "strength": strength},
        **{"fold": fold, "precision": precision, "input_size": sample, "labels": labels},
        **preprocess,
    }
    proto, exported = to_onnx(program, opset, {key: _text(value) for key, value in facts.items() if value is not None})
    checks: list[Check] = [(folded.reference, _REPORT_IT)]
    if precision != "float32":
        proto, checks = _narrowed(job, proto, exported, precision, runtime, tolerance)
    elif wanted.approximates:
        checks.insert(0, (Reference(program.module, job.calls), _REPORT_IT))
    with report_beside(report, force) as keep, written(proto, file, force, checks) as (parity, length):
        found = ExportReport(
            model=None if record.source is None else record.source.name,
            target=target,
            strength=strength,
            weights=record.weights,
            fold=fold,
            precision=precision,
            opset=opset,
            output=str(path),
            bytes=length,
            parity=parity,
            judged_on=job.judged_on(mixed=precision == "float32" and not wanted.approximates),
            nodes=node_counts(proto),
            preprocess=preprocess or None,
            labels=None if labels is None else len(labels),
            layers=tuple(folded.layers),
        )
        keep(found)
    return found


@dataclass(frozen=True)
class _Folded:
    """A folded network, what became of its layers, and what the given network answered."""

    program: Program
    layers: list[FoldedLayer]
    reference: Reference
    comparison: Comparison


def _checked_fold(job: Job, wanted: Wanted) -> _Folded:
    """Capture a network, fold it, and compare the two."""
    reference = Reference(job.network, wanted.check, tolerance=wanted.tolerance)
    if "NaN" in reference.not_checked:
        raise RetrofitError(reference.not_checked)
    lambdas = _mean_lambdas(job.network, wanted.fit) if wanted.freeze_lambda else {}
    call = job.calls[0 if job.are_given else -1]
    program = capture(job.network, call, batch=job.batch, dynamic_size=job.dynamic_size, lambdas=lambdas)
    layers: list[FoldedLayer]
    fits: dict[Node, Fit] = {}
    if not program.note:
        if wanted.approximation is not None:
            powers = [Transform.of(program.module, node) for node in calls_of(program.module.graph, POWER)]
            fits = choose(program.module, [one for one in powers if one.lmbda.numel() > 1], wanted.approximation)
        errors = {layer_of(node): (fit.size, fit.max_error, fit.rms_error) for node, fit in fits.items()}
        fold_program(program, fits)
        layers = [FoldedLayer(name, form, *errors.get(name, ())) for name, form in program.layers.items()]
    elif wanted.approximation is not None:
        raise RetrofitError(f"{program.note}; use `fold='exact'`")
    else:
        layers = [FoldedLayer(name, form) for name, form in program.layers.items()]
    found = reference.compare(program.module)
    if found.differs:
        what, advice = "the folded network differs from the given one", _REPORT_IT
        if wanted.freeze_lambda:
            what = "the network with constant lambdas differs from the given one"
            advice = "raise `tolerance` if you can accept that, or leave out `freeze_lambda`"
        elif wanted.approximation is not None and wanted.approximation.degree is not None:
            what = "the approximation differs from the given network"
            advice = "raise `degree` or leave it out, or raise `tolerance` if you can accept that"
        raise ComparisonError(found, what, advice)
    return _Folded(program, layers, reference, found)


def _mean_lambdas(network: nn.Module, calls: Sequence[Call]) -> dict[str, float]:
    """Return the mean lambda, strength included, of each layer that estimates it, over images."""
    found: dict[str, list[Tensor]] = {}
    with evaluating(network):
        for call in calls:
            for name, values in lambda_values(network, call.args[0]).items():
                found.setdefault(name, []).append(values.double())
    layers: dict[str, Any] = {name: network.get_submodule(name) for name in found}
    means = {name: float(torch.cat(values).mean()) for name, values in found.items()}
    return {
        name: 1 + float(layer.effective_alpha) * (means[name] - 1)
        for name, layer in layers.items()
        if layer.channel_map() is None
    }


def _narrowed(
    job: Job,
    proto: onnx.ModelProto,
    exported: torch.export.ExportedProgram,
    precision: Precision,
    runtime: Runtime | None,
    tolerance: float | None,
) -> tuple[onnx.ModelProto, list[Check]]:
    """Return a model in less than 32 bits, and what it has to answer."""
    judged = job.batches(job.images[1::2]) if len(job.images) > 1 else job.calls
    reference = Reference(job.network, judged, tolerance=tolerance or NARROW[precision])
    if precision == "int8":
        fitted = [call.args[0] for call in job.batches(job.images[::2])]
        advice = "bake the network first, give other images, or raise `tolerance` if you can accept that"
        return to_int8(proto, fitted, runtime or "onnxruntime"), [(reference, advice)]
    advice = "use `fold='exact'`, keep float32, or raise `tolerance` if you can accept that"
    half = reference.compare(HalfRun(exported))
    if half.share == math.inf:
        raise ComparisonError(half, "values of the network overflow float16", "keep float32")
    if half.differs:
        raise ComparisonError(half, "float16 differs from PyTorch", advice)
    return to_float16(proto), [(reference, advice)]


def _has_labels(program: Program, labels: Sequence[str] | None) -> bool:
    """Whether names of outputs are known, and not of a classifier that the network had before."""
    if not labels:
        return False
    with torch.no_grad():
        outputs = list(tensors_of(program.call.on(program.module)))
    return len(outputs) != 1 or outputs[0].ndim != 2 or outputs[0].shape[1] == len(labels)


def _strength(model: nn.Module) -> float | None:
    try:
        return strength_of(model)
    except RetrofitError:
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
