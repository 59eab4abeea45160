"""Replace a converted network's per-image statistics with constants, so that it runs faster.

Layers are baked in network order on half of the images and checked on the other half. A layer is
left as it is if constants would cost more than the tolerance. The artifact can be exported,
evaluated and trained like any other.

\b
    $ retrofit bake runs/lite0-ln/best.safetensors --calibrate photos.tar --tolerance 0.2
    $ retrofit bake lite0-ln.safetensors --calibrate photos.tar --tolerance 0.3 -o baked.safetensors
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli import options
from retrofit.cli.console import emit, names, say, say_written, show_table, waiting

if TYPE_CHECKING:
    from retrofit.baking import BakeReport


@options.command("bake", __doc__, calibrate="The fit", output="Output")
@options.model
@options.option(
    "--calibrate",
    "Image folder or .tar: half to fit, half to check.",
    Path,
    metavar="DIR",
    required=True,
)
@options.option("--images", "Maximum number of images.", click.IntRange(4), default=128)
@options.option(
    "--tolerance", "Largest change in the output, in its standard deviations.", float, default=0.1
)
@options.architecture
@options.option("-o --output", "File to write (default: NAME-baked.safetensors).", Path)
@options.force
@options.json
def command(
    model: str, output: Path | None, force: bool, images: int, tolerance: float, **requested: Any
) -> None:
    import retrofit
    from retrofit.cli.network import file_stem, open_network, output_file, read_calibration

    default = f"{file_stem(model)}-baked.safetensors"
    output = output_file(output, default, force)
    network = open_network(model, requested)
    read_calibration(requested, network, images)
    with waiting("baking"):
        network.model, report = retrofit.bake(
            network.model, requested["calibrate"], tolerance=tolerance
        )
    _show_stages(report)
    _show_kept(report)
    _show_chosen(report)
    retrofit.save(network.model, output, force=force)
    say_written(output)
    say(f"next: retrofit export {output}")
    emit({"model": network.source.name, "output": str(output), **report.to_dict()})


def _show_stages(report: BakeReport) -> None:
    rows = []
    for stage in report.stages:
        error = f"{stage.error:.3g}"
        worst = f"{stage.worst:.3g}"
        same = ""
        if stage.top1_agreement is not None:
            same = f"{stage.top1_agreement:.1%}"
        rows.append((str(stage.layers), error, worst, same))
    show_table(
        ("layers", "output changes by", "in the worst 1%", "same top-1"), list(dict.fromkeys(rows))
    )


def _show_kept(report: BakeReport) -> None:
    kept: dict[str, list[str]] = defaultdict(list)
    for layer in report.layers:
        if not layer.baked:
            kept[layer.reason].append(layer.name)
    for reason, layers in kept.items():
        say(f"kept: {names(layers)}: {reason}")


def _show_chosen(report: BakeReport) -> None:
    chosen = report.chosen
    fitted, judged = report.images
    same = chosen.top1_agreement
    agreement = ""
    if same is not None:
        agreement = f", the same top-1 for {same:.1%}"
    say(
        f"baked {chosen.layers} of {len(report.layers)} layers on {fitted} images: the output "
        f"changes by {chosen.error:.3g} of its standard deviation on {judged} others{agreement}",
        "bold",
    )
