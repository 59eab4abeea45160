"""`retrofit export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli.console import emit, names, say, show_table, waiting
from retrofit.cli.options import architecture_options, inputs_option, json_option, model_argument, weights_options
from retrofit.errors import UsageError

if TYPE_CHECKING:
    from retrofit.export import ExportReport
    from retrofit.export.onnx.precision import Precision
    from retrofit.export.report import FoldedLayer


_IMAGES = 256  # to fit on, and to check on: half each

HELP = """Export MODEL to ONNX, its normalization folded, and check the file against PyTorch.

The batch is dynamic unless --batch fixes it. What differs from the network by more than the tolerance is not written.

\b
$ retrofit export resnet50-bnn.safetensors -o resnet50.onnx
$ retrofit export resnet50-bnn.safetensors --fold poly --calibrate photos.tar
"""


@click.command("export", help=HELP)
@model_argument
@click.option("-o", "--output", "path", type=click.Path(path_type=Path), metavar="FILE", help="NAME.onnx if left out.")
@click.option(
    "--fold",
    type=click.Choice(["exact", "poly"]),
    default="exact",
    help="The transform itself (default), or an approximation in its place.",
)
@click.option(
    "--for",
    "runtime",
    type=click.Choice(["onnxruntime", "openvino"]),
    help="Approximate by polynomials (onnxruntime, default), or by lines that fuse into convolutions (openvino).",
)
@click.option(
    "--degree", type=int, metavar="N", help="Of all polynomials, or lines, 2 to 8; as few as will do if left out."
)
@click.option(
    "--tolerance",
    type=float,
    metavar="F",
    help="Largest difference, as a share of the output's scale (default: 1e-4; 0.05 with --fold poly, 0.02 with "
    "--half, 0.3 with --int8).",
)
@click.option("--opset", type=int, default=18, metavar="N", help="18 to 22 (default: 18).")
@click.option(
    "--calibrate",
    type=click.Path(),
    metavar="DIR",
    help=f"Folder or .tar of images; {_IMAGES} of them to fit and check on.",
)
@click.option("--freeze-lambda", is_flag=True, help="Use the images' mean lambda where a layer estimates it.")
@click.option("--half", is_flag=True, help="Write float16: half the size.")
@click.option("--int8", is_flag=True, help="Quantize to INT8, with ranges from the --calibrate images.")
@click.option("--batch", type=int, metavar="N", help="Fix the number of images, for networks that fix it themselves.")
@click.option("--dynamic-size", is_flag=True, help="Let height and width vary, besides the batch.")
@weights_options
@architecture_options
@inputs_option
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write what --json says to a .json file.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@json_option
def command(
    model: str,
    path: Path | None,
    fold: Any,
    runtime: Any,
    degree: int | None,
    tolerance: float | None,
    opset: int,
    calibrate: str | None,
    freeze_lambda: bool,
    half: bool,
    int8: bool,
    batch: int | None,
    dynamic_size: bool,
    inputs: Path | None,
    report: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `retrofit export`."""
    from retrofit.cli.network import file_stem, open_network, output_file
    from retrofit.export import export_onnx
    from retrofit.export.onnx.model import check_opset
    from retrofit.export.report import ComparisonError, check_report
    from retrofit.images.dataset import sample_batches
    from retrofit.inputs import read_inputs

    if half and int8:
        raise UsageError("--half and --int8 are two precisions; choose one")
    precision: Precision = "float16" if half else "int8" if int8 else "float32"
    check_opset(opset)
    path = output_file(path, f"{file_stem(model)}.onnx", force)
    if report is not None:
        check_report(report, path, force)
    network = open_network(model, **options)
    batches = None if calibrate is None else sample_batches(calibrate, network.preprocess, images=_IMAGES)
    try:
        with waiting("exporting"):
            found = export_onnx(
                network.model,
                path,
                fold,
                opset=opset,
                runtime=runtime,
                degree=degree,
                tolerance=tolerance,
                calibrate=batches,
                freeze_lambda=freeze_lambda,
                batch=batch,
                dynamic_size=dynamic_size,
                inputs=None if inputs is None else read_inputs(inputs),
                precision=precision,
                report=report,
                force=force,
            )
    except ComparisonError as failed:
        if as_json:
            emit({"schema": 1, "model": network.source.name, **network.conversion, "fold": fold,
                  "precision": precision, "opset": opset, "output": None, "bytes": 0,
                  "parity": failed.comparison.to_dict(), "nodes": {}})  # fmt: skip
        raise
    _show(found)
    if report is not None:
        say(f"wrote {report}", style="bold")
    if as_json:
        emit(found.to_dict())


def _show(report: ExportReport) -> None:
    """Write what became of the layers, the check and the file to stderr."""
    kinds: dict[str, list[FoldedLayer]] = {}
    for layer in report.layers:
        kinds.setdefault(layer.kind, []).append(layer)
    rows = [
        (
            str(len(found)),
            kind,
            _largest(found, "max_error"),
            _largest(found, "rms_error"),
            names(x.name for x in found),
        )
        for kind, found in kinds.items()
    ]
    if rows:
        show_table(("count", "normalization became", "largest error", "rms error", "names"), rows)
    parity = report.parity
    agreement = (
        "" if parity.top1_agreement is None else f", the same top-1 for {parity.top1_agreement:.1%} of {report.judged}"
    )
    say(
        f"check passed: largest difference {parity.max_abs_diff:.3g} at a scale of {parity.scale:.3g}, "
        f"tolerance {parity.tolerance * parity.scale:.3g}{agreement}"
    )
    if report.guessed:
        say(
            f"warning: judged on {report.judged}, which are unlike pictures; give pictures with --calibrate DIR",
            style="yellow",
        )
    say(f"wrote {report.output} ({report.bytes / 1e6:.1f} MB, {sum(report.nodes.values())} nodes)", style="bold")


def _largest(found: Sequence[FoldedLayer], error: str) -> str:
    """Return the largest error of some layers, as a share of their outputs' standard deviation; empty if exact."""
    known = [value for value in (getattr(layer, error) for layer in found) if value is not None]
    return f"{max(known):.2g}" if known else ""
