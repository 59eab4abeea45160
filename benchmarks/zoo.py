"""Plan a conversion of every timm and torchvision architecture, and write what becomes of their
layers as a table.

Every architecture takes about ten minutes on 2 cores:

    python benchmarks/zoo.py --to normal
    python benchmarks/zoo.py --to gn-pn --match resnet

Networks are built on the meta device where they build there, else on the CPU with random weights;
nothing is run.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from harness import RESULTS, markdown, publish

COUNTS = ["layers", "converted", "kept", "unsupported", "proxied", "left"]
FIELDS = ["model", *COUNTS, "params", "seconds", "reasons", "error"]


# Why activations are left, in the words of docs/coverage.md, by what their reasons say
WHY_LEFT = {
    "inside a squeeze-excite": "inside a squeeze-excite",
    "after a residual": "after a residual addition",
    "no norm before": "no norm before it",
    "not directly after its norm": "the norm feeds more than the activation, or a gate",
    "after a product|after a concatenation": "after a product or a concatenation",
    "never called": "never called by the model",
    "behind a norm, past": "its channels are moved in between",
    "holds none of the norms": "in a part without BatchNorm",
    "its norm, .* is not one of those": "after a norm that is not converted",
}


def names() -> list[str]:
    """Every architecture, torchvision's as tv:NAME."""
    import timm
    import torchvision

    return [*timm.list_models(), *(f"tv:{name}" for name in torchvision.models.list_models())]


def build(name: str) -> Any:
    """The network with random weights, on the meta device if it builds there."""
    import torch

    from retrofit.networks.model_sources import build, parse

    source = parse(name)
    try:
        with torch.device("meta"):
            return build(source)
    except Exception:  # some constructors compute with their tensors
        return build(source)


def without_names(reason: str) -> str:
    """Leave out which module it is, so that equal reasons count together."""
    reason = re.sub(r"not directly after \S+:", "not directly after its norm:", reason)
    return re.sub(r"((?:fed by|its norm,|a gate:) \w+) [\w.]+", r"\1", reason)


def in_one_part(reason: str) -> str:
    """Return a reason without the mark that parts the reasons of a row."""
    return reason.replace("; ", ", ")


def survey(name: str, to: str) -> dict[str, Any]:
    """Return one row of the table."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: dict[str, Any] = dict.fromkeys(FIELDS, 0) | {"model": name, "reasons": "", "error": ""}
    start = time.perf_counter()
    try:
        row |= planned(build(name), to)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def planned(model: Any, to: str) -> dict[str, Any]:
    """Plan a network's conversion; return what becomes of its layers."""
    from retrofit.surgery.norm_layers import find_norms

    norms = list(find_norms(model))
    plan = plan_of(model, norms, to)
    assert len(plan.layers) == len(norms), "a layer is unaccounted for"
    statuses = Counter(edit.status for edit in plan.edits if edit.kind == "activation")
    reasons = Counter(
        f"{layer.source}: {in_one_part(layer.reason) or 'not of a family that is converted'}"
        for layer in plan.layers
        if not layer.target
    )
    reasons += Counter(
        f"{edit.source} left: {in_one_part(without_names(edit.reason))}"
        for edit in plan.edits
        if edit.status == "left"
    )
    return {
        "layers": len(norms),
        "params": sum(parameter.numel() for parameter in model.parameters()),
        **plan.counts,
        "proxied": statuses["converted"],
        "left": statuses["left"],
        "reasons": "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()),
    }


def plan_of(model: Any, norms: list[Any], to: str) -> Any:
    """Return the plan of a conversion; one that converts nothing where there is nothing to
    convert.
    """
    from retrofit import RetrofitError
    from retrofit.surgery import LayerRow, Plan, plan

    try:
        return plan(model, to)
    except RetrofitError:
        rows = [
            LayerRow(
                norm.name,
                norm.label,
                None,
                "unsupported" if norm.status == "unsupported" else "kept",
                norm.reason,
            )
            for norm in norms
        ]
        return Plan(to, tuple(rows))


def summary(rows: list[dict[str, Any]], to: str) -> list[str]:
    """Return totals, and the reasons for what is not converted, as Markdown."""
    total = {key: sum(row[key] for row in rows) for key in COUNTS}
    whole = sum(1 for row in rows if row["converted"] and not row["unsupported"])
    fates = " / ".join(f"{total[key]:,}" for key in ("converted", "kept", "unsupported"))
    table: list[tuple[str, object]] = [
        ("architectures planned", len(rows)),
        ("exceptions", sum(1 for row in rows if row["error"])),
        ("normalization layers", f"{total['layers']:,}"),
        ("converted / kept / unsupported", fates),
        ("architectures with a layer converted and none unsupported", whole),
        (
            "architectures without any normalization layer",
            sum(1 for row in rows if not row["layers"]),
        ),
    ]
    if total["proxied"]:
        table.append(("activations proxied / left", f"{total['proxied']:,} / {total['left']:,}"))
    models: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    for row in rows:
        for reason in filter(None, row["reasons"].split("; ")):
            count, _, text = reason.partition(" ")
            models[text] += 1
            layers[text] += int(count)
    reasons = [(text, f"{layers[text]:,}", n) for text, n in models.most_common(25)]
    lines = [
        *markdown([f"to {to}", ""], table),
        "",
        *markdown(["not converted, and why", "layers", "architectures"], reasons),
    ]
    if total["left"]:
        lines += ["", *markdown(["activations left, and why", ""], left(layers))]
    return lines


def left(reasons: Counter[str]) -> list[tuple[object, ...]]:
    """Return how many activations are left for which kind of reason, most first."""
    kinds: Counter[str] = Counter()
    for text, count in reasons.items():
        _, mark, reason = text.partition(" left: ")
        if mark:
            kind = next((why for part, why in WHY_LEFT.items() if re.search(part, reason)), reason)
            kinds[kind] += count
    return [(kind, f"{count:,}") for kind, count in kinds.most_common()]


def surveyed(names: list[str], to: str, workers: int | None) -> list[dict[str, Any]]:
    """Return the rows of all architectures, by name."""
    rows = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for job in as_completed([pool.submit(survey, name, to) for name in names]):
            rows.append(job.result())
            if len(rows) % 50 == 0:
                print(f"{len(rows)} of {len(names)}", file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row["model"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", default="normal", help="target")
    parser.add_argument("--match", default="", help="only architectures whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    rows = surveyed([name for name in names() if args.match in name], args.to, args.workers)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"zoo-{args.to}.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    publish(file, summary(rows, args.to))
    failed = [row for row in rows if row["error"]]
    for row in failed:
        print(f"{row['model']}: {row['error']}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
