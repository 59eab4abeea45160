"""`retrofit.export_onnx`: a network as a folded ONNX file, checked against PyTorch."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
from torch import nn

import retrofit
from retrofit.compare import Reference
from retrofit.comparison import TOLERANCE
from retrofit.errors import UsageError
from retrofit.export.checked_fold import REPORT_IT, FoldedNetwork, checked_fold
from retrofit.export.onnx_file import OPSETS, Check, to_onnx, written
from retrofit.export.other_sizes import at_other_sizes, refuse_other_functions
from retrofit.export.power_operator import Polynomial
from retrofit.export.precision import narrowed
from retrofit.export.report import SCHEMA, ExportReport, check_report
from retrofit.export.request import Fold, Precision, Request, warn_of_runtime
from retrofit.inputs import Inputs
from retrofit.layers.strength import common_strength
from retrofit.record import Record, record_of
from retrofit.utils.files import atomic_write, ensure_writable, writing
from retrofit.utils.text import json_text


def export_onnx(
    model: nn.Module,
    path: str | Path,
    fold: Fold = "exact",
    input_size: Sequence[int] | None = None,
    opset: int = 18,
    *,
    inputs: Inputs | None = None,
    batch: int | None = None,
    degree: int | None = None,
    tolerance: float | None = None,
    calibrate: Iterable[Any] | None = None,
    freeze_lambda: bool = False,
    dynamic_size: bool = False,
    precision: Precision = "float32",
    report: str | Path | None = None,
    force: bool = False,
    runtime: str | None = None,
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
            polynomials.
        input_size: Shape of one sample, (C, H, W); by default, the network's own.
        opset: ONNX operator set, 18 to 22.
        inputs: Example inputs for the network, used instead of random images: a tensor, a tuple of
            positional arguments, or a dict of keyword arguments. If there are several, the file's
            inputs get the dict's names.
        batch: Fixed number of samples, for networks that cannot be captured with a variable number.
        degree: Degree of all polynomials, 2 to 8. By default, each layer gets the lowest that the
            tolerance allows, judged by how its error affects the output.
        tolerance: Largest allowed difference of an output, as a fraction of its largest value: an
            output that holds boxes in pixels beside scores says little about the scores. Default:
            1e-4; 0.05 for approximate exports; 0.02 in float16 and 0.3 in INT8. In these two, it
            applies to the file alone, and to an approximation only if it is larger than 0.05.
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
        runtime: Deprecated; it has no effect.

    Returns:
        The report.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network cannot be exported, the check fails, or a file cannot be
            written.
    """
    warn_of_runtime(runtime)
    if opset not in OPSETS:
        raise UsageError(
            f"`opset={opset}` is not supported; use {OPSETS.start} to {OPSETS.stop - 1}"
        )
    request = Request(
        model=model,
        fold=fold,
        inputs=inputs,
        input_size=input_size,
        batch=batch,
        degree=degree,
        tolerance=tolerance,
        calibrate=calibrate,
        freeze_lambda=freeze_lambda,
        dynamic_size=dynamic_size,
        precision=precision,
    )
    file = ensure_writable(path, force)
    if report is not None:
        check_report(report, file, force)
    folded = checked_fold(request, must_capture=True)
    refuse_other_functions(request, folded.program)
    proto, checks = _onnx_model(request, folded, opset)
    record = record_of(model)
    labels = _labels_of(record, proto)
    preprocess = _preprocess_of(record, request)
    shared = _shared_facts(record, request)
    metadata = {
        "schema": SCHEMA,
        "retrofit": retrofit.__version__,
        "model": str(record.source or type(request.network).__name__),
        **shared,
        "input_size": list(request.sample),
        "labels": labels,
        **(preprocess or {}),
    }
    onnx.helper.set_model_props(proto, _as_texts(metadata))
    report_file = nullcontext() if report is None else atomic_write(report, force)
    operators = Counter(sorted(node.op_type for node in proto.graph.node))
    # The model gets its name first
    with report_file as report_draft, written(proto, file, force, checks) as (parity, size):
        result = ExportReport(
            **shared,
            model=None if record.source is None else record.source.name,
            weights=record.weights,
            opset=opset,
            output=str(path),
            bytes=size,
            parity=parity,
            judged_on=request.judged_on,
            nodes=dict(operators.most_common()),
            preprocess=preprocess,
            labels=None if labels is None else len(labels),
            layers=folded.layers,
        )
        if report_draft is not None:
            with writing(str(report)):
                report_draft.write_text(json_text(result.to_dict()) + "\n", encoding="utf-8")
    return result


def _onnx_model(
    request: Request, folded: FoldedNetwork, opset: int
) -> tuple[onnx.ModelProto, list[Check]]:
    """Return the model in the requested precision, and the checks that it has to pass."""
    program = folded.program
    network = program.module
    if request.precision == "int8":
        parts = network.modules()
        for part in parts:
            if isinstance(part, Polynomial):
                part.to_convolutions()
    proto, exported = to_onnx(program, opset)
    checks = []
    tolerance = TOLERANCE
    # The last comparison is the one that is reported
    last = Check(folded.reference, REPORT_IT)
    if request.precision != "float32":
        proto, last = narrowed(request, proto, exported)
        tolerance = last.reference.tolerance
    if request.dynamic_size:
        reference = at_other_sizes(request, program, tolerance)
        checks.append(Check(reference, "leave out `dynamic_size`"))
    if request.approximates and request.precision == "float32":
        reference = Reference(network, request.calls)
        checks.append(Check(reference, REPORT_IT))
    return proto, [*checks, last]


def _labels_of(record: Record, proto: onnx.ModelProto) -> list[str] | None:
    """Return the names of the outputs; None if they are unknown, or if the outputs are scores
    (N, classes) of another number of classes.
    """
    labels = record.labels or None
    shapes = [output.type.tensor_type.shape.dim for output in proto.graph.output]
    are_scores = len(shapes) == 1 and len(shapes[0]) == 2
    if labels and are_scores and shapes[0][1].dim_value != len(labels):
        return None
    return labels


def _preprocess_of(record: Record, request: Request) -> dict[str, Any] | None:
    if record.preprocess is None:
        return None
    return {**record.preprocess.to_dict(), "input_size": list(request.sample)}


def _shared_facts(record: Record, request: Request) -> dict[str, Any]:
    """Return what metadata and report both say."""
    return {
        "target": record.plans[-1].to if record.plans else None,
        "strength": common_strength(request.model),
        "fold": request.fold,
        "precision": request.precision,
    }


def _as_texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what is known as a file's metadata: text, or JSON for what is none."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in facts.items()
        if value is not None
    }
