"""Plan a conversion of every timm and torchvision architecture, and write what becomes of their
layers as a table.

    python benchmarks/zoo.py --to normal          every architecture, about ten minutes on 2 cores
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

COUNTS = ["layers", "converted", "kept", "unsupported", "proxied", "left"]
FIELDS = ["model", *COUNTS, "params", "seconds", "reasons", "error"]


def names() -> list[str]:
    """Every architecture, torchvision's as tv:NAME."""
    import timm
    import torchvision

    return [*timm.list_models(), *(f"tv:{name}" for name in torchvision.models.list_models())]


def build(name: str) -> Any:
    """The network with random weights, on the meta device if it builds there."""
    import torch

    from retrofit.networks.library import build, parse

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


def survey(name: str, to: str) -> dict[str, Any]:
    """One row of the table."""
    import torch

    from retrofit import RetrofitError
    from retrofit.surgery import LayerRow, Plan, plan
    from retrofit.surgery.families import find_norms

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: dict[str, Any] = dict.fromkeys(FIELDS, 0) | {"model": name, "reasons": "", "error": ""}
    start = time.perf_counter()
    try:
        model = build(name)
        found = list(find_norms(model))
        row["layers"] = len(found)
        row["params"] = sum(parameter.numel() for parameter in model.parameters())
        try:
            made = plan(model, to)
        except RetrofitError:  # nothing to convert
            left = [
                (norm, "unsupported" if norm.status == "unsupported" else "kept") for norm in found
            ]
            made = Plan(
                to,
                tuple(
                    LayerRow(norm.name, norm.label, None, status, norm.reason)
                    for norm, status in left
                ),
            )
        assert len(made.layers) == len(found), "a layer is unaccounted for"
        row |= made.counts
        statuses = Counter(edit.status for edit in made.edits if edit.kind == "activation")
        row |= {"proxied": statuses["converted"], "left": statuses["left"]}
        why = Counter(
            f"{x.source}: {x.reason or 'not of a family that is converted'}"
            for x in made.layers
            if not x.target
        )
        why += Counter(
            f"{x.source} left: {without_names(x.reason)}" for x in made.edits if x.status == "left"
        )
        row["reasons"] = "; ".join(f"{n} {reason}" for reason, n in why.most_common())
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def summary(rows: list[dict[str, Any]], to: str) -> str:
    """Totals, and the reasons for what is not converted, as Markdown."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update({key: row[key] for key in COUNTS})
    whole = sum(1 for row in rows if row["converted"] and not row["unsupported"])
    lines = [
        f"| to {to} | |",
        "|---|---|",
        f"| architectures planned | {len(rows)} |",
        f"| exceptions | {sum(1 for row in rows if row['error'])} |",
        f"| normalization layers | {total['layers']:,} |",
        f"| converted / kept / unsupported | {total['converted']:,} / {total['kept']:,} / {total['unsupported']:,} |",
        f"| architectures with a layer converted and none unsupported | {whole} |",
        f"| architectures without any normalization layer | {sum(1 for row in rows if not row['layers'])} |",
    ]
    if total["proxied"]:
        lines.append(f"| activations proxied / left | {total['proxied']:,} / {total['left']:,} |")
    models: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    for row in rows:
        for reason in filter(None, row["reasons"].split("; ")):
            count, _, text = reason.partition(" ")
            models[text] += 1
            layers[text] += int(count)
    lines += ["", "| not converted, and why | layers | architectures |", "|---|---|---|"]
    lines += [f"| {text} | {layers[text]:,} | {n} |" for text, n in models.most_common(25)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", default="normal", help="target")
    parser.add_argument("--match", default="", help="only architectures whose name contains this")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder of the tables"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    wanted = [name for name in names() if args.match in name]
    rows = []
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        jobs = [pool.submit(survey, name, args.to) for name in wanted]
        for job in as_completed(jobs):
            rows.append(job.result())
            if len(rows) % 50 == 0:
                print(f"{len(rows)} of {len(wanted)}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row["model"])
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"zoo-{args.to}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = summary(rows, args.to)
    (args.out / f"zoo-{args.to}.md").write_text(text)
    print(text)
    for row in rows:
        if row["error"]:
            print(f"{row['model']}: {row['error']}", file=sys.stderr)
    sys.exit(any(row["error"] for row in rows))


if __name__ == "__main__":
    main()
