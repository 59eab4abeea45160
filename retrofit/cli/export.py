"""`retrofit export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli.console import emit, names, say, show_table, waiting
from retrofit.cli.options import architecture_options, json_option, model_argument, weights_options

if TYPE_CHECKING:
    from retrofit.export import ExportReport


HELP = """Export MODEL to ONNX, its normalization folded, and check the file against PyTorch.

The batch is dynamic. What differs from the network by more than the tolerance is not written.

\b
$ retrofit export resnet50-bnn.safetensors -o resnet50.onnx
$ retrofit export resnet50-bnn.safetensors --fold poly --calibrate photos.tar
"""


@click.command("export", help=HELP)
@model_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="NAME.onnx if left out.")
@click.option(
    "--fold",
    type=click.Choice(["exact", "poly"]),
    default="exact",
    help="The transform itself (default), or a polynomial in its place.",
)
@click.option("--tolerance", type=float, metavar="F", help="Largest difference, as a share of the output's scale.")
@click.option("--opset", type=int, default=18, metavar="N", help="18 to 22 (default: 18).")
@click.option("--calibrate", type=click.Path(), metavar="DIR", help="Folder or .tar of images to check on.")
@click.option("--dynamic-size", is_flag=True, help="Let height and width vary, besides the batch.")
@weights_options
@architecture_options
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def command(
    model: str,
    output: Path | None,
    fold: Any,
    tolerance: float | None,
    opset: int,
    calibrate: str | None,
    dynamic_size: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `retrofit export`."""
    from retrofit import files
    from retrofit.cli.network import file_stem, open_network
    from retrofit.data import sample_batches
    from retrofit.export import export_onnx
    from retrofit.export.onnx_model import check_opset
    from retrofit.export.save import ParityError

    output = output or Path(f"{file_stem(model)}.onnx")
    check_opset(opset)
    files.ensure_writable(output, force)
    network = open_network(model, **options)
    batches = None if calibrate is None else sample_batches(calibrate, network.preprocess)
    try:
        with waiting("exporting"):
            report = export_onnx(
                network.model,
                output,
                fold,
                opset=opset,
                tolerance=tolerance,
                calibrate=batches,
                dynamic_size=dynamic_size,
                force=force,
            )
    except ParityError as failed:
        if as_json:
            emit({"schema": 1, "model": network.source.name, "fold": fold, "opset": opset, "output": None,
                  "bytes": 0, "parity": failed.parity.to_dict(), "nodes": {}})  # fmt: skip
        raise
    _show(report)
    if as_json:
        emit(report.to_dict())


def _show(report: ExportReport) -> None:
    """Write what became of the layers, the check and the file to stderr."""
    kinds: dict[str, list[str]] = {}
    for layer in report.layers:
        kinds.setdefault(layer.form, []).append(layer.name)
    if kinds:
        rows = [(str(len(found)), form, names(found)) for form, found in kinds.items()]
        show_table(("count", "normalization became", "names"), rows)
    parity = report.parity
    agreement = "" if parity.top1_agreement is None else f", the same top-1 for {parity.top1_agreement:.1%}"
    say(
        f"check passed: largest difference {parity.max_abs_diff:.3g} at a scale of {parity.scale:.3g}, "
        f"tolerance {parity.tolerance * parity.scale:.3g}{agreement}"
    )
    say(f"wrote {report.output} ({report.bytes / 1e6:.1f} MB, {sum(report.nodes.values())} nodes)", style="bold")
