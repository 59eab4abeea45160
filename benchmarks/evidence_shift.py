r"""What the trained networks of the evidence do on corrupted pictures, each against its best
baseline.

    uv run --script benchmarks/corrupt.py test.tar corrupted.npz
    python benchmarks/evidence_shift.py --checkpoint efficientnet-lite0.pth --keep DIR \
        --corrupted corrupted.npz

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed, at the
arm's learning rate, is measured on the pictures of the file: clean, and under the fifteen
corruptions at each severity. The lines go to evidence_shift.jsonl, the table to evidence_shift.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from evidence_arms import ARMS
from evidence_data import still
from evidence_kept import measured, of_arms, parser
from evidence_train import measure
from harness import Line, grouped, markdown, publish, with_error
from PIL import Image
from torch import Tensor, nn

AGAINST = {
    "bn-frozen-std": "bn-frozen",
    "ln": "bn-frozen",
    "ln-pn": "bn-frozen",
    "bnn-0.1": "bn-noise-0.1",
    "bnn": "bn",
}


def corrupted(path: Path, size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Read the pictures that corrupt.py made, as tensors and labels."""
    with np.load(path) as file:
        labels = file["labels"].tolist()
        return {
            name: still(list(zip(map(Image.fromarray, file[name]), labels, strict=True)), size)
            for name in file.files
            if name != "labels"
        }


def conditions(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the rows of the table: of which corruptions each is the mean."""
    every = [name for name in names if name != "clean"]
    kinds = sorted({name.rpartition(" ")[0] for name in every})
    severities = sorted({name.rpartition(" ")[2] for name in every})
    rows = {"clean": ["clean"]}
    for kind in kinds:
        rows[kind.replace("_", " ")] = [f"{kind} {severity}" for severity in severities]
    for severity in severities:
        rows[f"mean, severity {severity}"] = [f"{kind} {severity}" for kind in kinds]
    return {**rows, "mean of all": every}


def by_seed(lines: Sequence[Line], names: Sequence[str], figure: str) -> dict[int, float]:
    """Return the mean of a figure over corruptions, for each seed."""
    return {line["seed"]: statistics.fmean(line[figure][name] for name in names) for line in lines}


def cell(values: dict[int, float], baseline: dict[int, float]) -> str:
    """Return a mean, and in brackets the paired difference to a baseline if there is one."""
    text = f"{statistics.fmean(values.values()):.1f}"
    gains = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    return f"{text} ({with_error(gains, '+')})" if gains else text


def table(runs: dict[str, list[Line]], batch: int) -> list[str]:
    """Return top-1 of each arm under each corruption, and the calibration error, with the paired
    difference.
    """
    head = [f"batches of {batch}"]
    for arm in runs:
        against = f" (against {ARMS[AGAINST[arm]].label})" if arm in AGAINST else ""
        head.append(ARMS[arm].label + against)
    means = conditions(list(next(iter(runs.values()))[0]["top1"]))
    figures = [(title, names, "top1") for title, names in means.items()]
    for title in ("clean", "mean of all"):
        figures.append((f"calibration error, {title}", means[title], "ece"))
    rows = []
    for title, names, figure in figures:
        values = {arm: by_seed(lines, names, figure) for arm, lines in runs.items()}
        cells = [cell(values[arm], values.get(AGAINST.get(arm, ""), {})) for arm in runs]
        rows.append([title, *cells])
    return markdown(head, rows)


def main() -> None:
    arms = list(dict.fromkeys([*AGAINST.values(), *AGAINST]))
    options = parser(__doc__, arms, "evidence_shift.jsonl")
    options.add_argument("--corrupted", type=Path, metavar="NPZ", help="what corrupt.py made")
    args = options.parse_args()
    tensors = functools.cache(functools.partial(corrupted, args.corrupted))

    def corruptions(model: nn.Module, run: Line) -> Line:
        pictures = tensors(run["img_size"])
        results = {name: measure(model, *part) for name, part in pictures.items()}
        line: Line = {"images": len(pictures["clean"][1])}
        for figure in ("top1", "ece"):
            line[figure] = {name: round(result[figure], 2) for name, result in results.items()}
        return line

    lines = measured(args, corruptions)
    seeds = {len({line["seed"] for line in runs}) for runs in grouped(lines, ["arm"]).values()}
    images = max(line["images"] for line in lines)
    text = [
        f"Top-1 in percent, mean over {' or '.join(map(str, sorted(seeds)))} seeds, {images:,} test pictures under "
        "each corruption at each severity; a row of a corruption is the mean over the severities. "
        "In brackets the paired "
        "difference to the baseline, ± standard error over seeds."
    ]
    for batch in args.batch_sizes:
        text += ["", *table(of_arms(lines, args.arms, batch), batch)]
    publish(args.out, text)


if __name__ == "__main__":
    main()
