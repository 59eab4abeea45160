"""`retrofit convert`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli.console import emit, say, waiting
from retrofit.cli.options import (
    architecture_options,
    json_option,
    model_argument,
    plan_options,
    take_plan_options,
    target_completion,
    weights_options,
)
from retrofit.cli.tables import show_plan
from retrofit.conversion_options import CONVERTERS
from retrofit.errors import RetrofitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from retrofit.layers import StrengthMixin
    from retrofit.networks.library import ModelSource
    from retrofit.surgery import Report
    from retrofit.surgery.identity_check import CheckResult


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
@click.option("--force", is_flag=True, help="Replace an existing output file.")
@json_option
def command(
    model: str, to: str, output: Path | None, strength: float | None, force: bool, as_json: bool, **options: Any
) -> None:
    """Run `retrofit convert`."""
    from retrofit import surgery
    from retrofit.cli.network import file_stem, open_network, output_file
    from retrofit.evaluation.accuracy import predictions
    from retrofit.images.dataset import sample_batches
    from retrofit.surgery.identity_check import IdentityCheck

    converter = surgery.converter_for(to)
    if strength is not None and not converter.has_strength:
        raise UsageError(f"--strength means nothing to {to}, whose layers have none; leave it out")
    output = output_file(output, f"{file_stem(model)}-{to}.safetensors", force)
    choices = take_plan_options(options)
    network = open_network(model, **options)
    if choices["calibrate"] is not None:
        choices["calibrate"] = sample_batches(choices["calibrate"], network.preprocess)
    plan = surgery.plan(network.model, to, **choices)
    earlier = surgery.strength_layers(network.model)
    with waiting("running the source network"):
        check = IdentityCheck(network.model, network.preprocess.input_size)
        expected = predictions(network.model, choices["calibrate"]) if choices["calibrate"] else None
    network.model, report = surgery.apply(plan, network.model)
    converted = [layer for layer in surgery.strength_layers(network.model) if layer not in earlier]
    notes = [*report.notes, *_kept_strength(earlier)]
    _show(report, notes)
    with waiting("running the converted network"):
        result = check.compare(network.model, layers=converter.identity)
    complaint = _judge(result, to, converter.identity)
    answer = {
        "schema": 1,
        "model": network.source.name,
        "library": network.source.library,
        "weights": network.weights,
        **report.to_dict(),
        "notes": notes,
        "check": {**result.to_dict(), "identity": converter.identity},
        "strength": (strength or 0.0) if converter.has_strength else None,
        "output": None if complaint else str(output),
    }
    if complaint:
        if as_json:
            emit(answer)
        raise RetrofitError(complaint)
    if expected is not None:
        answer["agreement"] = _agreement(network.model, converted, choices["calibrate"], expected)
    if converter.has_strength:
        for layer in converted:  # not what is inside: a layer's activation may have been converted before
            layer.set_strength(strength or 0.0)
    if strength:
        change = check.compare(network.model, layers=False)
        answer["change"] = {"max_abs_diff": change.max_abs_diff, "scale": change.scale}
        say(f"at strength {strength:g} the output changes: {change}")
    network.save(output, force)
    _show_artifact(output, network.source, check.classifies)
    if as_json:
        emit(answer)


def _show_artifact(output: Path, source: ModelSource, classifies: bool) -> None:
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


def _show(report: Report, notes: list[str]) -> None:
    """Write what became of the network to stderr."""
    show_plan(report.plan)
    for note in notes:
        say(f"note: {note}")
    growth = report.params_after - report.params_before
    say(f"parameters: {report.params_before:,} before, {report.params_after:,} after ({growth:+,})")


NOT_FINITE = "the converted network's outputs are not finite, or of another shape"


def _judge(result: CheckResult, to: str, identity: bool) -> str:
    """Tell how the converted network compares with its source; return what is wrong with it, or nothing."""
    at = f" (in {result.where})" if result.where else ""
    if identity:
        verdict = "passed" if result.passed else "FAILED"
        say(f"check {verdict}: {result}, tolerance {result.tolerance * result.scale:.3g}{at}")
    else:
        say(f"{to} does not start as its source: {result}", style="bold")
    problem = result.problem()
    if not identity:
        problem = "" if math.isfinite(result.max_abs_diff) else NOT_FINITE
    return f"{problem}; nothing was written, keep the layers concerned with --skip REGEX" if problem else ""


def _kept_strength(earlier: Sequence[StrengthMixin]) -> list[str]:
    """Say that layers which were converted before stay as they are."""
    if not earlier:
        return []
    values = [float(layer.strength) for layer in earlier]
    low, high = min(values), max(values)
    span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return [f"{len(values)} layers converted before keep their strength, {span}; --strength sets the new ones alone"]


def _agreement(
    model: nn.Module, converted: Sequence[StrengthMixin], images: list[Tensor], expected: list[int]
) -> dict[str, int]:
    """Count the images whose predicted class is the source's; at strength 1, which stays, where there is a strength."""
    from retrofit.evaluation.accuracy import predictions

    at = "untrained"
    if converted:
        for layer in converted:
            layer.set_strength(1.0)
        at = "at strength 1, untrained"
    same = sum(a == b for a, b in zip(predictions(model, images), expected, strict=True))
    share = 100 * same / len(expected)
    say(f"{at}, {share:.1f}% of the predictions are the source's ({same} of {len(expected)} images)")
    return {"images": len(expected), "same": same}
