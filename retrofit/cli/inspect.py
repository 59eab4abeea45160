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
    from retrofit.surgery.families import NormLayer


@options.command("inspect", __doc__, to="The conversion", full="Output")
@options.model
@options.option(
    "--to", "Show what a conversion to this target would do.", tuple(TARGETS), metavar="TARGET"
)
@options.plan
@options.architecture
@options.option("--full", "List every layer on its own line.", bool)
@options.json
def command(model: str, to: str | None, full: bool, **given: Any) -> None:
    from retrofit import surgery
    from retrofit.cli.network import read_calibration, taken
    from retrofit.networks.models import open_model
    from retrofit.surgery.families import find_norms, functional_norms

    # the others are a conversion's
    own = taken(given, open_model)
    if to is None and (flags := [name for name, value in given.items() if value not in (None, ())]):
        raise UsageError(f"`{flags[0]}` belongs to a conversion; give --to TARGET too")
    network = open_model(model, **own)
    norms = list(find_norms(network.model))
    rows = [_row(norm) for norm in norms]
    counts = dict(Counter(row["source"] for row in rows))
    functional = functional_norms(network.model, norms)
    answer: dict[str, Any] = {
        "schema": 1,
        "model": network.source.name,
        "library": network.source.library,
    }
    answer |= {"layers": rows, "counts": counts, "functional": functional}
    if to is not None:
        read_calibration(given, network)
        plan = surgery.plan(network.model, to, **given)
        show_plan(plan, full)
        say(", ".join(f"{count} {status}" for status, count in plan.counts.items()))
        answer["plan"] = {**plan.to_dict(), "counts": plan.counts}
    else:
        if full:
            show_lines(
                [
                    (row["name"] or ROOT, row["source"], row["family"] or "", row["reason"])
                    for row in rows
                ]
            )
        else:
            _show_census(rows)
        say(
            f"{plural(len(rows), 'normalization layer')}; add --to TARGET to see what becomes of them"
        )
    for sentence in functional:
        say(f"note: {sentence}")
    emit(answer)


def _row(layer: "NormLayer") -> dict[str, Any]:
    """Return what --json says about a layer; `channels` is the size of the axis that affine
    parameters run along.
    """
    sizes = (
        getattr(layer.module, name, None)
        for name in ("num_features", "num_channels", "normalized_shape")
    )
    size = next((size for size in sizes if size is not None), None)
    channels = size if size is None or isinstance(size, int) else int(size[-1])
    row = {"name": layer.name, "source": layer.label, "family": layer.family, "channels": channels}
    strength = getattr(layer.module, "strength", None)
    stands = {} if strength is None else {"strength": float(strength)}
    return {**row, "status": layer.status, "reason": layer.reason, **stands}


def _show_census(rows: list[dict[str, Any]]) -> None:
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        strength = f"{row['strength']:.3g}" if "strength" in row else ""
        kinds[row["source"], row["family"] or "", strength, row["reason"]].append(row)
    lines = []
    for (source, family, strength, reason), alike in kinds.items():
        sizes = sorted({row["channels"] for row in alike if row["channels"] is not None})
        span = "-".join(map(str, sizes if len(sizes) < 2 else (sizes[0], sizes[-1])))
        listed = names(row["name"] or ROOT for row in alike)
        lines.append((str(len(alike)), source, family, span, strength, listed, reason))
    show_table(("count", "class", "family", "channels", "strength", "names", "remark"), lines)
