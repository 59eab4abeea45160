"""Convert the normalization layers of MODEL to a target.

At strength 0 the converted network gives the same outputs as its source; this is checked before
anything is written. Layers that have already been converted keep their strength. A summary goes to
stderr and, with --json, one object to stdout.

Targets: {targets}.

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
    $ retrofit convert resnet50 --to frozen --checkpoint yours.pth --num-classes 10
    $ retrofit convert tv:convnext_tiny --to lnn --only 'features\\.[67]' -o tiny.safetensors
    $ retrofit convert resnet50 --to bnn --json 2>/dev/null | jq -c .counts
    {"converted":53,"kept":0,"unsupported":0}
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli import options
from retrofit.cli.console import emit, say, say_written, show_plan, waiting
from retrofit.errors import RetrofitError
from retrofit.registry import TARGETS, listed_targets

if TYPE_CHECKING:
    from retrofit.comparison import Comparison
    from retrofit.surgery import Report


_HELP = (__doc__ or "").replace("{targets}", listed_targets())
_ADVICE = (
    "fine-tuning in small batches, private or federated training: --to frozen (or bn.eval() in "
    "your loop)",
    "half of the network new and batches of 2: compare --to ln and --to frozen; from scratch "
    "without batch statistics: --to gn",
    "large batches: keep BatchNorm; research on normality: --to bnn, lnn, gnn, inn or normal",
)
"""Which target for which situation."""


@options.command("convert", _HELP, to="The conversion")
@options.model
# Not `required` for click, whose error would list the targets on a line each.
@options.option("--to", f"{', '.join(TARGETS)}.  [required]", tuple(TARGETS), metavar="TARGET")
@options.option("-o --output", "File to write (default: NAME-TARGET.safetensors).", Path)
@options.option(
    "--strength",
    "Strength of the new layers: 0 is the source, 1 the target (default: 0).",
    click.FloatRange(0, 1),
)
@options.weights
@options.plan
@options.architecture
@options.inputs
@options.force
@options.json
def command(model: str, to: str | None, output: Path | None, force: bool, **arguments: Any) -> None:
    """Convert a network and write the artifact.

    Raises:
        RetrofitError: If the converted network is not the same function.
        UsageError: If no target is given.
    """
    if to is None:
        for line in _ADVICE:
            say(line)
        raise click.UsageError("Missing option '--to'", click.get_current_context())
    import retrofit
    from retrofit.cli.network import file_stem, open_network, output_file, read_calibration
    from retrofit.networks.manifest import Manifest
    from retrofit.surgery import CheckError

    output = output_file(output, f"{file_stem(model)}-{to}.safetensors", force)
    network = open_network(model, arguments)
    read_calibration(arguments, network)
    source = network.source
    facts = {
        "model": source.name,
        "library": source.library,
        "weights": network.weights,
    }
    try:
        with waiting("converting, and running the network before and after"):
            network.model, report = retrofit.convert(network.model, to, **arguments)
    except CheckError as error:
        _show(error.report)
        emit({**facts, **error.report.to_dict(), "output": None})
        raise RetrofitError(
            f"{error.problem}; nothing was written, keep the layers concerned with --skip REGEX"
        ) from error
    _show(report)
    retrofit.save(network.model, output, force=force)
    if note := Manifest.read(output).not_checked:
        say(f"note: the file is {note}")
    say_written(output)
    is_own = source.library == "own"
    # `evaluate` and `finetune` take networks that classify, no others.
    if report.classifies:
        advice = f"retrofit evaluate {shlex.quote(str(output))}"
        if is_own:
            advice += f" --network {source}"
        say(f"next: {advice} --data-dir DIR")
    else:
        into = ""
        if is_own:
            into = ", into=YOUR_NETWORK"
        say(
            f"next: model = retrofit.load({str(output)!r}{into}), in the code that trains and "
            "evaluates such networks"
        )
    emit({**facts, **report.to_dict(), "output": str(output)})


def _show_check(result: Comparison, at_0: bool) -> None:
    verdict = "FAILED"
    if result.passed:
        verdict = "passed"
    if at_0:
        verdict += " at strength 0"
    sentence = f"check {verdict}: {result}, tolerance {result.tolerance * result.scale:.3g}"
    if result.where:
        sentence += f" (in {result.where})"
    say(sentence)


def _show(report: Report) -> None:
    plan = report.plan
    show_plan(plan)
    if plan.settings:
        say(f"options: {plan.settings}")
    for note in report.notes:
        say(f"note: {note}")
    growth = report.params_after - report.params_before
    say(f"parameters: {report.params_before:,} before, {report.params_after:,} after ({growth:+,})")
    if report.check is not None and report.identity:
        _show_check(report.check, at_0=report.change is not None)
    elif report.check is not None:
        say(f"{plan.to} does not start as its source: {report.check}", "bold")
    if report.agreement is not None:
        same = report.agreement["same"]
        images = report.agreement["images"]
        at = "at strength 1, untrained"
        if report.strength is None:
            at = "untrained"
        say(
            f"{at}, {same / images:.1%} of the predictions are the source's ({same} of {images} "
            "images)"
        )
    if report.change is not None:
        effect = f"changes: {report.change}"
        if not report.change.max_abs_diff:
            effect = "is still the source's"
        say(f"at strength {report.strength:g} the output on the example inputs {effect}")
