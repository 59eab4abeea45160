"""Export MODEL to ONNX at its current strength: fold its normalization, and check the file against
PyTorch.

The batch size is dynamic unless --batch fixes it. A file that differs by more than the tolerance is
not written.

\b
    $ retrofit export resnet50-ln.safetensors -o resnet50.onnx
    $ retrofit export resnet50-bnn.safetensors --fold poly --calibrate photos.tar
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofit.cli import options
from retrofit.cli.console import emit, names, say, show_table, waiting, warn
from retrofit.errors import UsageError

if TYPE_CHECKING:
    from retrofit.export import ExportReport
    from retrofit.export.request import Precision


# Half of these images fit the approximation, the other half check it.
_IMAGES = 256


@options.command(
    "export", __doc__, path="The file", fold="Approximation and precision", report="Output"
)
@options.model
@options.option("-o --output path", "File to write (default: NAME.onnx).", Path)
@options.option("--opset", "ONNX opset, 18 to 22.", int, default=18)
@options.option("--batch", "Fix the batch size, as some networks require.", int)
@options.option("--dynamic-size", "Let height and width vary as well as the batch size.", bool)
@options.option(
    "--fold",
    "Keep the power transform exact, or approximate it.",
    ("exact", "poly"),
    default="exact",
)
@options.option("--for runtime", "Deprecated: no effect.", options.RUNTIMES, hidden=True)
@options.option("--degree", "Degree of all polynomials, 2 to 8 (default: as low as possible).", int)
@options.option(
    "--tolerance",
    "Largest difference, as a fraction of the output's scale (default: 1e-4; 0.05 with --fold "
    "poly, 0.02 with --half, 0.3 with --int8).",
    float,
)
@options.option(
    "--calibrate",
    f"Folder or .tar of images; {_IMAGES} are used to fit and check.",
    Path,
    metavar="DIR",
)
@options.option(
    "--freeze-lambda", "Fix estimated lambdas at their mean over the --calibrate images.", bool
)
@options.option("--half", "Write float16, which halves the size.", bool)
@options.option("--int8", "Quantize to INT8, with ranges from the --calibrate images.", bool)
@options.weights
@options.architecture
@options.inputs
@options.option("--report", "Also write the --json output to a .json file.", Path)
@options.force
@options.json
def command(
    model: str,
    path: Path | None,
    half: bool,
    int8: bool,
    report: Path | None,
    force: bool,
    runtime: str | None,
    **requested: Any,
) -> None:
    """Write a network as ONNX.

    Raises:
        UsageError: If two precisions are asked for.
        ComparisonError: If the exported network is not the same function.
    """
    import retrofit
    from retrofit.cli.network import file_stem, open_network, output_file, read_calibration
    from retrofit.comparison import ComparisonError
    from retrofit.export.report import check_report

    if runtime is not None:
        warn(
            "--for has no effect and will go: approximations are polynomials in every runtime; "
            "leave it out"
        )
    if half and int8:
        raise UsageError("--half and --int8 are two precisions; choose one")
    precision: Precision = "float32"
    if half:
        precision = "float16"
    if int8:
        precision = "int8"
    path = output_file(path, f"{file_stem(model)}.onnx", force)
    if report is not None:
        check_report(report, path, force)
    network = open_network(model, requested)
    read_calibration(requested, network, _IMAGES)
    try:
        with waiting("exporting"):
            result = retrofit.export_onnx(
                network.model, path, precision=precision, report=report, force=force, **requested
            )
    except ComparisonError as failed:
        emit({**network.facts, "output": None, "parity": failed.comparison.to_dict()})
        raise
    _show(result)
    if report is not None:
        say(f"wrote {report}", "bold")
    emit(result.to_dict())


def _show(report: ExportReport) -> None:
    rows = []
    for label in dict.fromkeys(layer.form_label for layer in report.layers):
        layers = [layer for layer in report.layers if layer.form_label == label]
        largest = _largest(layer.max_error for layer in layers)
        rms = _largest(layer.rms_error for layer in layers)
        rows.append((str(len(layers)), label, largest, rms, names(layer.name for layer in layers)))
    show_table(("count", "normalization became", "largest error", "rms error", "names"), rows)
    parity = report.parity
    agreement = ""
    if parity.top1_agreement is not None:
        agreement = f", the same top-1 for {parity.top1_agreement:.1%} of {report.judged}"
    say(f"check passed: {parity}, tolerance {parity.tolerance * parity.scale:.3g}{agreement}")
    if report.guessed:
        warn(
            f"judged on {report.judged}, which are unlike photographs; give images with "
            "--calibrate DIR"
        )
    say(
        f"wrote {report.output} ({report.bytes / 1e6:.1f} MB, {sum(report.nodes.values())} nodes)",
        "bold",
    )


def _largest(errors: Iterable[float | None]) -> str:
    """Return the largest error, as a share of the layers' standard deviation; empty if all are
    exact.
    """
    known = [error for error in errors if error is not None]
    if known:
        return f"{max(known):.2g}"
    return ""
