"""`retrofit bake`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli.console import emit, names, say, show_table, waiting
from retrofit.cli.options import architecture_options, json_option, model_argument

if TYPE_CHECKING:
    from retrofit.export.bake import BakeReport, Stage

HELP = """Turn what a converted network estimates from each image into constants, so that it runs at its source's cost.

Layers are baked in the order of the network, on half of the images; the other half judges. A layer stays as it is where
constants would cost more than the tolerance. The artifact that is written is exported, evaluated and trained as any.

\b
$ retrofit bake runs/lite0-ln/best.safetensors --calibrate photos.tar
$ retrofit bake lite0-ln.safetensors --calibrate photos.tar --tolerance 0.3 -o baked.safetensors
"""


@click.command("bake", help=HELP)
@model_argument
@click.option(
    "--calibrate", type=click.Path(), required=True, metavar="DIR", help="Folder or .tar of images to fit and judge on."
)
@click.option("--images", type=click.IntRange(min=4), metavar="N", help="How many of them at most (default: 128).")
@click.option(
    "--tolerance",
    type=float,
    metavar="F",
    help="Largest change of the output, as a share of its standard deviation (default: 0.1).",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="NAME-baked.safetensors if left out."
)
@architecture_options
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def command(
    model: str,
    calibrate: str,
    images: int | None,
    tolerance: float | None,
    output: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `retrofit bake`."""
    from retrofit.cli.network import file_stem, open_network, output_file
    from retrofit.export.bake import IMAGES, TOLERANCE, bake
    from retrofit.images.dataset import sample_batches

    output = output_file(output, f"{file_stem(model)}-baked.safetensors", force)
    network = open_network(model, **options)
    batches = sample_batches(calibrate, network.preprocess, images=images or IMAGES)
    with waiting("baking"):
        _, report = bake(network.model, batches, tolerance=TOLERANCE if tolerance is None else tolerance)
    _show(report)
    with waiting(f"writing {output}"):
        network.save(output, force)
    say(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)", style="bold")
    say(f"next: retrofit export {output}")
    if as_json:
        emit({"model": network.source.name, "output": str(output), **report.to_dict()})


def _show(report: BakeReport) -> None:
    """Write what was tried, what was taken, and what stays."""
    rows = [(str(one.layers), f"{one.error:.3g}", f"{one.worst:.3g}", _share(one)) for one in report.stages]
    show_table(("layers", "output changes by", "in the worst 1%", "same top-1"), list(dict.fromkeys(rows)))
    kept: dict[str, list[str]] = {}
    for layer in report.layers:
        if not layer.baked:
            kept.setdefault(layer.reason, []).append(layer.name)
    for reason, found in kept.items():
        say(f"kept: {names(found)}: {reason}")
    chosen, (fitted, judged) = report.chosen, report.images
    agreement = "" if chosen.top1_agreement is None else f", the same top-1 for {_share(chosen)}"
    say(
        f"baked {chosen.layers} of {len(report.layers)} layers on {fitted} images: the output changes by "
        f"{chosen.error:.3g} of its standard deviation on {judged} others{agreement}",
        style="bold",
    )


def _share(stage: Stage) -> str:
    return "" if stage.top1_agreement is None else f"{stage.top1_agreement:.1%}"
