"""What the trained networks of the evidence do on corrupted pictures, each against its best
baseline.

    uv run --script benchmarks/corrupt.py test.tar corrupted.npz
    python benchmarks/evidence_shift.py --checkpoint efficientnet-lite0.pth --keep DIR --corrupted
    corrupted.npz

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed, at the
arm's learning rate, is measured on the pictures of the file: clean, and under the fifteen
corruptions at each severity. The lines go to evidence_shift.jsonl, the table to evidence_shift.md.
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from evidence_arms import ARMS
from evidence_data import still
from evidence_kept import measured, parser
from evidence_table import Line, error
from evidence_train import measure
from PIL import Image
from torch import Tensor, nn

AGAINST = {
    "bn-frozen-std": "bn-frozen",
    "ln": "bn-frozen",
    "ln-pn": "bn-frozen",
    "bnn-0.1": "bn-noise-0.1",
    "bnn": "bn",
}


def table(lines: list[Line], arms: list[str], batch: int) -> list[str]:
    """Return top-1 of each arm under each corruption, and the calibration error, with the paired
    difference.
    """
    names = [name for name in arms if any(line["arm"] == name for line in lines)]
    heads = [
        ARMS[name].label + (f" (against {ARMS[AGAINST[name]].label})" if name in AGAINST else "")
        for name in names
    ]
    text = [f"| batches of {batch} | {' | '.join(heads)} |", "|---|" + "---|" * len(names)]
    keys = list(lines[0]["top1"])
    corrupted = [key for key in keys if key != "clean"]
    kinds = sorted({key.rpartition(" ")[0] for key in corrupted})
    severities = sorted({key.rpartition(" ")[2] for key in corrupted})
    rows = {"clean": ["clean"]}
    rows |= {kind.replace("_", " "): [f"{kind} {one}" for one in severities] for kind in kinds}
    rows |= {f"mean, severity {one}": [f"{kind} {one}" for kind in kinds] for one in severities}
    rows |= {"mean of all": corrupted}
    wanted = [(what, part, "top1") for what, part in rows.items()]
    wanted += [
        (f"calibration error, {what}", rows[what], "ece") for what in ("clean", "mean of all")
    ]
    for what, part, measured_as in wanted:
        cells = []
        for name in names:
            own, theirs = (
                {
                    line["seed"]: statistics.fmean(line[measured_as][key] for key in part)
                    for line in lines
                    if (line["arm"], line["batch"]) == (one, batch)
                }
                for one in (name, AGAINST.get(name))
            )
            gains = [own[seed] - theirs[seed] for seed in sorted(own.keys() & theirs.keys())]
            gain = f" ({statistics.fmean(gains):+.1f} ± {error(gains)})" if gains else ""
            cells.append(f"{statistics.fmean(own.values()):.1f}{gain}")
        text.append(f"| {what} | {' | '.join(cells)} |")
    return text


def main() -> None:
    options = parser(
        __doc__, list(dict.fromkeys([*AGAINST.values(), *AGAINST])), "evidence_shift.jsonl"
    )
    options.add_argument("--corrupted", type=Path, metavar="NPZ", help="what corrupt.py made")
    args = options.parse_args()

    @functools.cache
    def tensors(size: int) -> dict[str, tuple[Tensor, Tensor]]:
        with np.load(args.corrupted) as file:
            labels = file["labels"].tolist()
            return {
                name: still(list(zip(map(Image.fromarray, file[name]), labels, strict=True)), size)
                for name in file.files
                if name != "labels"
            }

    def corruptions(model: nn.Module, run: Line) -> dict[str, Any]:
        found = {name: measure(model, *given) for name, given in tensors(run["img_size"]).items()}
        made = {
            part: {name: round(value[part], 2) for name, value in found.items()}
            for part in ("top1", "ece")
        }
        return {"images": len(tensors(run["img_size"])["clean"][1]), **made}

    lines = measured(args, corruptions)
    seeds = sorted(
        {len({line["seed"] for line in lines if line["arm"] == arm}) for arm in args.arms}
    )
    counts = {line["images"] for line in lines}
    text = [
        f"Top-1 in percent, mean over {' or '.join(map(str, seeds))} seeds, {max(counts):,} test pictures under each "
        "corruption at each severity; a row of a corruption is the mean over the severities. In brackets the paired "
        "difference to the baseline, ± standard error over seeds."
    ]
    for batch in args.batch_sizes:
        text += ["", *table(lines, args.arms, batch)]
    args.out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
