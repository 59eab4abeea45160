"""`retrofit.fold` and `retrofit.export_onnx`."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.fx import Node

import retrofit
from retrofit.compare import NO_NUMBERS, Comparison, ComparisonError, Reference
from retrofit.errors import RetrofitError, UsageError
from retrofit.export.approximation.choose import choose
from retrofit.export.capture import Fit, Polynomial, Program, capture, layer_of
from retrofit.export.fold_constants import fold as fold_program
from retrofit.export.onnx_file import OPSETS, HalfRun, to_float16, to_int8, to_onnx, written
from retrofit.export.request import (
    SCHEMA,
    ExportReport,
    Fold,
    FoldedLayer,
    Precision,
    Request,
    check_report,
)
from retrofit.inputs import Call, Inputs
from retrofit.layers.base import lambda_values
from retrofit.layers.strength import common_strength
from retrofit.record import record_of
from retrofit.utils.files import atomic_write, ensure_writable, writing
from retrofit.utils.onnx_runtimes import Runtime
from retrofit.utils.running import evaluating
from retrofit.utils.text import json_text

# tolerances
NARROW = {"float16": 0.02, "int8": 0.3}
CALIBRATED_AT_ONCE = (
    # images: ONNX Runtime holds every value of the network in memory to take its range
    4
)
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
    """Return a network for inference, with folded normalization layers: the computation that
    `export_onnx` writes.

    The network is captured with example inputs. The result accepts the same arguments, with any
    number of samples; other calls raise an error. Its outputs are compared with the network's on
    these inputs and on the images of `calibrate` (an approximation: on images not used to fit it,
    if any). If torch.export cannot capture the network, nothing is folded: a warning says so, and
    each layer of the returned copy uses plain torch operations.

    The network is not changed. The arguments are those of `export_onnx`; `tolerance` is the largest
    allowed difference.

    Returns:
        The folded network, in evaluation mode and float32, ready for torch.compile or AOTInductor.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network does not accept such inputs, no degree meets the tolerance, or
            the outputs of the folded network differ.
    """
    how = (
        fold,
        inputs,
        input_size,
        batch,
        runtime,
        degree,
        tolerance,
        calibrate,
        freeze_lambda,
        dynamic_size,
    )
    program, _, _, comparison = _checked_fold(Request(model, *how))
    if program.note:
        warnings.warn(f"nothing is fused: {program.note}", stacklevel=2)
    if comparison.not_checked:
        warnings.warn(str(comparison), stacklevel=2)
    module: nn.Module = program.module
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
    """Write a network as a folded ONNX file, checked against PyTorch; a file that fails the check
    is not written.

    An exact export is compared with the network on seeded random inputs (or `inputs`) and on the
    images of `calibrate`. An approximate one (fold "poly", or frozen lambdas) is compared with its
    own folded PyTorch form on the same inputs, at the tolerance of exact exports, and with the
    network on images not used to fit (without images, on those inputs).

    Args:
        model: Any network, converted or not; it is not changed.
        path: The file to write.
        fold: "exact" keeps the function, up to rounding; "poly" replaces power transforms with
            polynomials or lines.
        input_size: Shape of one sample, (C, H, W); by default, the network's own.
        opset: ONNX operator set, 18 to 22.
        inputs: Example inputs for the network, used instead of random images: a tensor, a tuple of
            positional arguments, or a dict of keyword arguments. If there are several, the file's
            inputs get the dict's names.
        batch: Fixed number of samples, for networks that cannot be captured with a variable number.
        runtime: The runtime that approximations are tuned for. "onnxruntime" (the default):
            polynomials. "openvino", which fuses elementwise operations: continuous piecewise-linear
            functions and polynomials. In INT8 both get polynomials; "onnxruntime" quantizes them up
            to degree 3, "openvino" leaves them in float32.
        degree: Degree of all polynomials, or number of lines, 2 to 8. By default, each layer gets
            the lowest that the tolerance allows, judged by how its error affects the output.
        tolerance: Largest allowed difference of an output, as a fraction of the largest output.
            Default: 1e-4; 0.05 for approximate exports; 0.02 in float16 and 0.3 in INT8. In these
            two, it applies to the file alone, and to an approximation only if it is larger than
            0.05.
        calibrate: Batches of preprocessed images to check on, with or without labels, as from a
            DataLoader. If anything is approximated, every second image is used for fitting and the
            others for checking.
        freeze_lambda: Whether layers that estimate lambda from their input (layer, group and
            instance normality normalization) get the mean of lambda over the images instead.
        dynamic_size: Whether height and width may vary, in addition to the number of samples.
        precision: "float16" halves the size of the file. It is checked in ONNX Runtime, and with
            arithmetic where each operation returns float16, so an overflow is refused. "int8"
            quantizes convolutions and matrix products per channel, with ranges measured on every
            second image of `calibrate`. Both are compared with the network in float32, on the other
            images.
        report: A .json file for the report (`ExportReport.to_dict`). It is written once the model
            has passed its check. Both files are complete before either is renamed into place, the
            model first.
        force: Whether to replace existing files.

    Returns:
        The report.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network cannot be exported, the check fails, or a file cannot be
            written.
    """
    if opset not in OPSETS:
        raise UsageError(
            f"`opset={opset}` is not supported; use {OPSETS.start} to {OPSETS.stop - 1}"
        )
    how = (
        fold,
        inputs,
        input_size,
        batch,
        runtime,
        degree,
        tolerance,
        calibrate,
        freeze_lambda,
        dynamic_size,
    )
    request = Request(model, *how, precision)
    file = ensure_writable(path, force)
    if report is not None:
        check_report(report, file, force)
    program, layers, reference, _ = _checked_fold(request)
    if program.note:
        raise RetrofitError(program.note)
    if (
        precision == "int8" and runtime != "openvino"
    ):  # which computes a polynomial in float32 in one pass
        for part in program.module.modules():
            if isinstance(part, Polynomial):
                part.to_convolutions()
    proto, exported = to_onnx(program, opset)
    checks = [(reference, _REPORT_IT)]
    if precision != "float32":
        maker = proto.producer_name, proto.producer_version
        proto, checks = _narrowed(request, proto, exported)
        proto.producer_name, proto.producer_version = maker
    elif request.approximates:
        checks.insert(0, (Reference(program.module, request.calls), _REPORT_IT))
    record, sample = record_of(model), [int(size) for size in request.sample]
    labels, shapes = (
        record.labels or None,
        [output.type.tensor_type.shape.dim for output in proto.graph.output],
    )
    if (
        labels
        and len(shapes) == 1
        and len(shapes[0]) == 2
        and shapes[0][1].dim_value != len(labels)
    ):
        # of a classifier that the network had before
        labels = None
    preprocess = (
        {} if record.preprocess is None else {**record.preprocess.to_dict(), "input_size": sample}
    )
    target = record.plans[-1].to if record.plans else None
    shared: Any = {
        "target": target,
        "strength": common_strength(model),
        "fold": fold,
        "precision": precision,
    }
    name = type(request.network).__name__ if record.source is None else str(record.source)
    facts = {"schema": SCHEMA, "retrofit": retrofit.__version__, "model": name, **shared}
    facts |= {"input_size": sample, "labels": labels, **preprocess}
    known = {key: value for key, value in facts.items() if value is not None}
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in known.items()
    }
    onnx.helper.set_model_props(proto, texts)
    beside = nullcontext() if report is None else atomic_write(report, force)
    with (
        beside as aside,
        written(proto, file, force, checks) as (parity, length),
    ):  # the model gets its name first
        result = ExportReport(
            **shared,
            model=None if record.source is None else record.source.name,
            weights=record.weights,
            opset=opset,
            output=str(path),
            bytes=length,
            parity=parity,
            judged_on=request.judged_on,
            nodes=dict(Counter(sorted(node.op_type for node in proto.graph.node)).most_common()),
            preprocess=preprocess or None,
            labels=None if labels is None else len(labels),
            layers=layers,
        )
        if aside is not None:
            with writing(str(report)):
                aside.write_text(json_text(result.to_dict()) + "\n", encoding="utf-8")
    return result


def _checked_fold(
    request: Request,
) -> tuple[Program, tuple[FoldedLayer, ...], Reference, Comparison]:
    """Capture a network, fold it, and compare the two; also return what became of its layers and
    what it answered.
    """
    network = request.network
    reference = Reference(network, request.judged, tolerance=request.allowed)
    if reference.not_checked == NO_NUMBERS:
        raise RetrofitError(NO_NUMBERS)
    for name, value in network.state_dict().items() if reference.holds_nan else ():
        if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
            raise RetrofitError(f"{name} holds NaN; export other weights")
    lambdas = _mean_lambdas(network, request.fitted) if request.freeze_lambda else {}
    call = request.calls[-1 if request.inputs is None else 0]
    program = capture(
        network, call, batch=request.batch, dynamic_size=request.dynamic_size, lambdas=lambdas
    )
    fits: dict[Node, Fit] = {}
    if not program.note:
        for other in [call for call in reference.calls[:3] if call.batch != program.call.batch]:
            try:
                with torch.no_grad():
                    other.on(program.module)
            # torch.export's guards, or the network's own code
            except Exception as error:
                what = f"captured with {program.call.batch} samples, the network does not take {other.batch}"
                raise RetrofitError(
                    f"{what}; fix their number, as `batch={request.calls[0].batch}`"
                ) from error
        if request.fold == "poly":
            # in INT8 what lies between lines would get a range of its own
            runtime = (request.precision != "int8" and request.runtime) or "onnxruntime"
            how = runtime, request.degree, request.allowed
            fits = choose(program.module, *how, request.fitted, request.unseen)
        fold_program(program, fits)
    elif request.batch is None:
        advice = (
            "leave out `dynamic_size`"
            if request.dynamic_size
            else "some networks need a fixed `batch=1`"
        )
        program.note += f"; {advice}"
    if program.note and request.fold == "poly":
        raise RetrofitError(f"{program.note}; `fold='exact'` may do")
    errors = {
        layer_of(node): (fit.size, fit.max_error, fit.rms_error) for node, fit in fits.items()
    }
    layers = tuple(
        FoldedLayer(name, form, *errors.get(name, ())) for name, form in program.layers.items()
    )
    comparison = reference.compare(program.module)
    if comparison.differs:
        what, advice = "the folded network differs from the given one", _REPORT_IT
        if request.freeze_lambda or request.degree is not None:
            what = "the approximation differs from the given network"
            way = (
                "leave out `freeze_lambda`"
                if request.freeze_lambda
                else "raise `degree` or leave it out"
            )
            advice = f"{way}, or raise `tolerance` if you can accept that"
        raise ComparisonError(comparison, what, advice)
    return program, layers, reference, comparison


def _mean_lambdas(network: nn.Module, calls: Sequence[Call]) -> dict[str, float]:
    """Return the mean lambda, strength included, of each layer that estimates it, over images."""
    with evaluating(network):
        batches = [lambda_values(network, call.args[0]) for call in calls]
    means = {}
    for name in dict.fromkeys(name for values in batches for name in values):
        layer: Any = network.get_submodule(name)
        if layer.channel_map() is None:
            mean = float(
                torch.cat([values[name].double() for values in batches if name in values]).mean()
            )
            means[name] = 1 + float(layer.effective_alpha) * (mean - 1)
    return means


def _narrowed(
    request: Request, proto: onnx.ModelProto, exported: torch.export.ExportedProgram
) -> tuple[onnx.ModelProto, list[tuple[Reference, str]]]:
    """Return a model in less than 32 bits, and what it has to answer."""
    reference = Reference(
        request.network, request.unseen, tolerance=request.tolerance or NARROW[request.precision]
    )
    if request.precision == "int8":
        few = request.batch or CALIBRATED_AT_ONCE
        fitted = [images for call in request.fitted for images in call.args[0].split(few)]
        advice = (
            "bake the network first, give other images, or raise `tolerance` if you can accept that"
        )
        return to_int8(proto, fitted), [(reference, advice)]
    advice = "use `fold='exact'`, keep float32, or raise `tolerance` if you can accept that"
    half = reference.compare(HalfRun(exported.module()))
    if half.differs:
        raise ComparisonError(half, "float16, which ends at 65504, differs from PyTorch", advice)
    return to_float16(proto), [(reference, advice)]
