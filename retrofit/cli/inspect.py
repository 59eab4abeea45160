"""`retrofit inspect`."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli.console import emit, names, say, show_lines, show_table
from retrofit.cli.options import (
    architecture_options,
    json_option,
    model_argument,
    plan_options,
    take_plan_options,
    target_completion,
)
from retrofit.errors import UsageError
from retrofit.utils.text import ROOT

if TYPE_CHECKING:
    from retrofit.surgery.families import NormLayer


HELP = """List the normalization layers of MODEL, and with --to what would become of each; write nothing.

\b
$ retrofit inspect resnet18
 count   class         family   channels   names
 -----------------------------------------------------------------
    20   BatchNorm2d   bn       64-512     bn1, layer1.0.bn1, ... (18 more)
\b
20 normalization layers; add --to TARGET to see what becomes of them

\b
$ retrofit inspect resnet18 --to bnn --skip layer4
 count   found         becomes             names                               why
 ------------------------------------------------------------------------------------------------------
    15   BatchNorm2d   BatchNormalNorm2d   bn1, layer1.0.bn1, ... (13 more)
     5   BatchNorm2d   (kept)              layer4.0.bn1, ... (4 more)          matched by --skip layer4
\b
15 converted, 5 kept, 0 unsupported

\b
$ retrofit inspect resnet18 --json 2>/dev/null | jq -c .counts
{"BatchNorm2d":20}
"""


@click.command("inspect", help=HELP)
@model_argument
@click.option(
    "--to", metavar="TARGET", shell_complete=target_completion, help="Show what a conversion to this target would do."
)
@plan_options
@architecture_options
@click.option("--full", is_flag=True, help="List every layer on a line of its own.")
@json_option
def command(model: str, to: str | None, full: bool, as_json: bool, **options: Any) -> None:
    """Run `retrofit inspect`."""
    from retrofit import surgery
    from retrofit.cli.tables import list_plan, show_plan
    from retrofit.images.dataset import sample_batches
    from retrofit.networks import models
    from retrofit.surgery.families import find_norms
    from retrofit.surgery.functional_norms import functional_norms

    choices = take_plan_options(options)
    given = [name for name, value in choices.items() if value is not None]
    if given and to is None:
        flag = given[0].replace("source", "from").replace("_", "-")
        raise UsageError(f"--{flag} belongs to a conversion; give --to TARGET too")
    network = models.open_model(model, **options)
    found = list(find_norms(network.model))
    answer: dict[str, Any] = {
        "schema": 1,
        "model": network.source.name,
        "library": network.source.library,
        "layers": [_row(layer) for layer in found],
        "counts": dict(Counter(layer.label for layer in found)),
        "functional": functional_norms(network.model),
    }
    if to is None:
        if full:
            show_lines([(layer.name or ROOT, layer.label, layer.family or "", layer.reason) for layer in found])
        elif found:
            _show_census(found)
        say(f"{len(found)} normalization layers; add --to TARGET to see what becomes of them")
    else:
        if choices["calibrate"] is not None:
            choices["calibrate"] = sample_batches(choices["calibrate"], network.preprocess)
        plan = surgery.plan(network.model, to, **choices)
        (list_plan if full else show_plan)(plan)
        say(", ".join(f"{count} {status}" for status, count in plan.counts.items()))
        answer["plan"] = {**plan.to_dict(), "counts": plan.counts}
    for sentence in answer["functional"]:
        say(f"note: {sentence}")
    if as_json:
        emit(answer)


def _row(found: NormLayer) -> dict[str, Any]:
    strength = _strength(found)
    return {
        "name": found.name,
        "source": found.label,
        "family": found.family,
        "channels": _channels(found),
        "status": found.status,
        "reason": found.reason,
        **({} if strength is None else {"strength": strength}),
    }


def _strength(found: NormLayer) -> float | None:
    """Return where a converted layer stands between its source and its target; None for others."""
    strength = getattr(found.module, "strength", None)
    return None if strength is None else float(strength)


def _channels(found: NormLayer) -> int | None:
    """Return the size of the axis that a layer's affine parameters run along; None if it does not say."""
    for attribute in ("num_features", "num_channels", "normalized_shape"):
        size = getattr(found.module, attribute, None)
        if size is not None:
            return size if isinstance(size, int) else int(size[-1])
    return None


def _show_census(found: list[NormLayer]) -> None:
    kinds: dict[tuple[str, str, str, str], list[NormLayer]] = defaultdict(list)
    for layer in found:
        t = _strength(layer)
        kinds[layer.label, layer.family or "", "" if t is None else f"{t:.3g}", layer.reason].append(layer)
    rows = []
    for (label, family, strength, reason), layers in kinds.items():
        sizes = sorted({size for layer in layers if (size := _channels(layer)) is not None})
        span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}" if sizes else ""
        listed = names(layer.name or ROOT for layer in layers)
        rows.append((str(len(layers)), label, family, span, strength, listed, reason))
    show_table(("count", "class", "family", "channels", "strength", "names", "remark"), rows)
