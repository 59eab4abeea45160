"""List the normalization layers of MODEL and, with --to, what each would become; write nothing.

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
    $ retrofit inspect resnet18 --json 2>/dev/null | jq -c .counts
    {"BatchNorm2d":20}
"""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from retrofit.cli import options
from retrofit.cli.console import emit, names, say, show_lines, show_plan, show_table
from retrofit.errors import UsageError
from retrofit.registry import TARGETS
from retrofit.utils.text import ROOT, plural

if TYPE_CHECKING:
    from torch import nn

    from retrofit.surgery.norm_layers import NormLayer


@options.command("inspect", __doc__, to="The conversion", full="Output")
@options.model
@options.option(
    "--to", "Show what a conversion to this target would do.", tuple(TARGETS), metavar="TARGET"
)
@options.plan
@options.architecture
@options.option("--full", "List every layer on its own line.", bool)
@options.json
def command(model: str, to: str | None, full: bool, **arguments: Any) -> None:
    """List the normalization layers, and what a conversion would do to them.

    Raises:
        UsageError: If options of a conversion are given without a target.
    """
    from retrofit import surgery
    from retrofit.cli.network import read_calibration, taken
    from retrofit.networks.open_model import open_model
    from retrofit.surgery.norm_layers import normalizations_in

    opening = taken(arguments, open_model)
    # What is left are the options of a conversion.
    flags = [name for name, value in arguments.items() if value not in (None, ())]
    if to is None and flags:
        raise UsageError(f"`{flags[0]}` belongs to a conversion; give --to TARGET too")
    network = open_model(model, **opening)
    source = normalizations_in(network.model)
    rows = [_row(norm) for norm in source.norms]
    counts = Counter(row["source"] for row in rows)
    answer: dict[str, Any] = {
        "model": network.source.name,
        "library": network.source.library,
        "layers": rows,
        "counts": dict(counts),
        "functional": source.functions,
    }
    if to is None:
        _show_layers(rows, full)
    else:
        read_calibration(arguments, network)
        plan = surgery.plan(network.model, to, **arguments)
        show_plan(plan, full)
        statuses = ", ".join(f"{count} {status}" for status, count in plan.counts.items())
        say(statuses)
        answer["plan"] = {**plan.to_dict(), "counts": plan.counts}
    for sentence in source.functions:
        say(f"note: {sentence}")
    emit(answer)


def _show_layers(rows: list[dict[str, Any]], full: bool) -> None:
    if full:
        show_lines(
            [
                (row["name"] or ROOT, row["source"], row["family"] or "", row["reason"])
                for row in rows
            ]
        )
    else:
        _show_census(rows)
    total = plural(len(rows), "normalization layer")
    say(f"{total}; add --to TARGET to see what becomes of them")


def _row(layer: "NormLayer") -> dict[str, Any]:
    """Return what --json says about a layer; `channels` is the size of the axis that affine
    parameters run along.
    """
    row: dict[str, Any] = {
        "name": layer.name,
        "source": layer.label,
        "family": layer.family,
        "channels": _channels(layer.module),
        "status": layer.status,
        "reason": layer.reason,
    }
    strength = getattr(layer.module, "strength", None)
    if strength is not None:
        row["strength"] = float(strength)
    return row


def _channels(module: "nn.Module") -> int | None:
    for name in ("num_features", "num_channels", "normalized_shape"):
        size = getattr(module, name, None)
        if isinstance(size, int):
            return size
        if size is not None:
            return int(size[-1])
    return None


def _span(sizes: list[int | None]) -> str:
    """Return "64" or "64-512"; empty where no size is known."""
    known = {size for size in sizes if size is not None}
    if len(known) > 1:
        return f"{min(known)}-{max(known)}"
    return "".join(map(str, known))


def _show_census(rows: list[dict[str, Any]]) -> None:
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["source"], row["family"], row.get("strength"), row["reason"]].append(row)
    lines = []
    for (source, family, strength, reason), alike in groups.items():
        count = str(len(alike))
        channels = _span([row["channels"] for row in alike])
        listed = names(row["name"] or ROOT for row in alike)
        stands = ""
        if strength is not None:
            stands = f"{strength:.3g}"
        lines.append((count, source, family or "", channels, stands, listed, reason))
    show_table(("count", "class", "family", "channels", "strength", "names", "remark"), lines)
