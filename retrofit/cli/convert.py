"""`retrofit convert`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli.console import emit, say, waiting
from retrofit.cli.options import (
    architecture_options,
    inputs_option,
    json_option,
    model_argument,
    plan_options,
    take_plan_options,
    target_completion,
    weights_options,
)
from retrofit.cli.tables import show_plan
from retrofit.conversion_options import CONVERTERS
from retrofit.errors import RetrofitError

if TYPE_CHECKING:
    from retrofit.networks.models import Network
    from retrofit.record import ModelSource
    from retrofit.surgery import Report


HELP = """Convert MODEL: a timm name, tv:NAME, py:MODULE:CALLABLE (a network of your own), or a .safetensors file.

At strength 0 the converted network gives the same outputs as its source; this is checked before anything is
written. Layers that were converted before keep their strength. (The layers of evonorm-s0 and frn-tlu have no
strength: there it is only said how much the outputs change.) A summary goes to stderr, and with --json one object to
stdout.

\b
$ retrofit convert resnet50 --to bnn
weights: RANDOM (pass --pretrained or --checkpoint FILE for trained ones)
\b
 count   found         becomes             names
 -------------------------------------------------------------------------
    53   BatchNorm2d   BatchNormalNorm2d   bn1, layer1.0.bn1, ... (51 more)
\b
parameters: 25,557,032 before, 25,557,032 after (+0)
check passed: largest difference 0 at a scale of 0.158, tolerance 1.58e-05
wrote resnet50-bnn.safetensors (102.6 MB)
next: retrofit evaluate resnet50-bnn.safetensors --data-dir DIR

\b
$ retrofit convert tv:convnext_tiny --to lnn --only 'features\\.[67]' -o tiny.safetensors
...
wrote tiny.safetensors (114.4 MB)

\b
$ retrofit convert resnet50 --to bnn --json 2>/dev/null | jq -c .counts
{"converted":53,"kept":0,"unsupported":0}
"""


@click.command("convert", help=HELP)
@model_argument
@click.option(
    "--to",
    required=True,
    metavar="TARGET",
    shell_complete=target_completion,
    help=f"{', '.join(CONVERTERS)}.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="NAME-TARGET.safetensors if left out."
)
@weights_options
@plan_options
@click.option(
    "--strength",
    type=click.FloatRange(0, 1),
    metavar="F",
    help="Of the layers converted now: from 0, the source's function, to 1, the target's (default: 0).",
)
@architecture_options
@inputs_option
@click.option("--force", is_flag=True, help="Replace an existing output file.")
@json_option
def command(
    model: str,
    to: str,
    output: Path | None,
    strength: float | None,
    inputs: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `retrofit convert`."""
    import retrofit
    from retrofit.cli.network import file_stem, open_network, output_file
    from retrofit.images.dataset import sample_batches
    from retrofit.inputs import read_inputs
    from retrofit.surgery import CheckError, converter_for

    identity = converter_for(to).identity
    output = output_file(output, f"{file_stem(model)}-{to}.safetensors", force)
    choices = take_plan_options(options)
    tensors = None if inputs is None else read_inputs(inputs)
    network = open_network(model, **options)
    if choices["calibrate"] is not None:
        choices["calibrate"] = sample_batches(choices["calibrate"], network.preprocess)
    try:
        with waiting("converting, and running the network before and after"):
            network.model, report = retrofit.convert(network.model, to, strength=strength, inputs=tensors, **choices)
    except CheckError as error:
        _show(error.report, identity)
        if as_json:
            emit(_answer(network, error.report, identity, None))
        raise RetrofitError(
            f"{error.problem}; nothing was written, keep the layers concerned with --skip REGEX"
        ) from error
    _show(report, identity, strength)
    network.save(output, force)
    _show_artifact(output, network.source, report.classifies)
    if as_json:
        emit(_answer(network, report, identity, output))


def _answer(network: Network, report: Report, identity: bool, output: Path | None) -> dict[str, Any]:
    """Return what the command writes to stdout."""
    values = report.to_dict()
    if values["check"] is not None:
        values["check"]["identity"] = identity
    return {
        "schema": 1,
        "model": network.source.name,
        "library": network.source.library,
        "weights": network.weights,
        **values,
        "output": None if output is None else str(output),
    }


def _show_artifact(output: Path, source: ModelSource, classifies: bool | None) -> None:
    """Write what was written, and what to do with it, to stderr."""
    from retrofit.networks.manifest import Manifest

    if note := Manifest.read(output).not_checked:
        say(f"note: the file is {note}")
    say(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)", style="bold")
    own = source.library == "own"
    if classifies:
        whose = f" --network {source}" if own else ""
        say(f"next: retrofit evaluate {shlex.quote(str(output))}{whose} --data-dir DIR")
    else:  # evaluate and finetune know classes alone
        into = ", into=YOUR_NETWORK" if own else ""
        say(f"next: model = retrofit.load({str(output)!r}{into}), in the code that trains and evaluates such networks")


def _show(report: Report, identity: bool, strength: float | None = None) -> None:
    """Write what became of the network to stderr."""
    show_plan(report.plan)
    for note in report.notes:
        say(note if note.startswith("not checked:") else f"note: {note}")
    growth = report.params_after - report.params_before
    say(f"parameters: {report.params_before:,} before, {report.params_after:,} after ({growth:+,})")
    if (result := report.check) is not None:
        if identity:
            at = f" (in {result.where})" if result.where else ""
            verdict = "passed" if result.passed else "FAILED"
            say(f"check {verdict}: {result}, tolerance {result.tolerance * result.scale:.3g}{at}")
        else:
            say(f"{report.plan.to} does not start as its source: {result}", style="bold")
    if report.agreement is not None:
        same, images = report.agreement["same"], report.agreement["images"]
        at = "untrained" if report.strength is None else "at strength 1, untrained"
        share = 100 * same / images
        say(f"{at}, {share:.1f}% of the predictions are the source's ({same} of {images} images)")
    if report.change is not None:
        say(f"at strength {strength:g} the output changes: {report.change}")
