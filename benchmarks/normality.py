r"""The script of appendix/normality-script.md with more seeds: digits, until the network fits them.

    python benchmarks/normality.py
    python benchmarks/normality.py --table

The page's Python block trains a small network on 200 digits: BatchNorm, BatchNorm with the same
noise, bnn without noise, bnn; here BatchNorm with dropout before the classifier too. Each finished
run is a line of normality.jsonl; started again, the script goes on with what is missing.
`--table` writes normality.md from the lines.

Written before the first run: a gain of the transform is bnn above the same noise in test top-1 by
more than two standard errors of the difference, paired over 24 seeds. No seed is left out, and
their number does not depend on what comes out.
"""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import torch
from evidence_train import measure
from harness import (
    Line,
    Recorded,
    command_line,
    grouped,
    machine,
    machines,
    markdown,
    mean,
    paired,
    publish,
    with_error,
)
from torch import nn

PAGE = Path(__file__).parents[1] / "docs" / "appendix" / "normality-script.md"
DROPOUT = {f"BatchNorm, dropout {rate}": rate for rate in (0.1, 0.3, 0.5)}


def page(rate: float = 0.0) -> dict[str, Any]:
    """Return the names that the page's block defines, up to its loop over seeds; its network has
    dropout before the classifier.
    """
    block = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block[: block.index("scores = ")], PAGE.name, "exec"), names)
    network = names["network"]

    def with_dropout() -> nn.Sequential:
        *features, classifier = network()
        return nn.Sequential(*features, nn.Dropout(rate), classifier)

    if rate:
        names["network"] = with_dropout
    return names


def run(key: Line) -> Line:
    """Train one network as the page does, and return the line of the run."""
    names = page(DROPOUT.get(key["arm"], 0.0))
    options = {**names["networks"], **dict.fromkeys(DROPOUT)}[key["arm"]]
    start = time.process_time()
    model = names["train"](options, key["seed"])
    seconds = time.process_time() - start
    images, labels = names["images"], names["labels"]
    test = measure(model, images[800:], labels[800:])
    return {
        **key,
        "test": round(test["top1"], 3),
        "fit_loss": round(measure(model, images[:200], labels[:200])["loss"], 5),
        "test_images": len(labels[800:]),
        "cpu_seconds": round(seconds, 1),
        "machine": machine(),
        "correct": test["correct"],
    }


def tables(lines: list[Line]) -> list[str]:
    """Return the table: each network, and how far bnn is above it."""
    runs = {arm: same for (arm,), same in grouped(lines, ["arm"]).items()}
    rows = []
    for arm, same in runs.items():
        test = with_error([line["test"] for line in same])
        gain = "" if arm == "bnn" else paired(runs["bnn"], same)
        rows.append((arm, len(same), test, gain, f"{mean(same, 'fit_loss'):.4f}"))
    head = ["trained with", "seeds", "top-1", "bnn is above it by", "loss on the 200 digits"]
    return markdown(head, rows)


def main() -> None:
    parser = command_line(__doc__, "--table", "--until", out="normality.jsonl")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(24)))
    args = parser.parse_args()
    recorded = Recorded(args.out)
    if not args.table:
        torch.set_num_threads(1)
        arms = [*page()["networks"], *DROPOUT]
        for seed, arm in itertools.product(args.seeds, arms):
            key = {"arm": arm, "seed": seed}
            recorded.done(key, lambda key=key: [run(key)], args.until)
    note = (
        "The guide's code on one core: top-1 in percent of 997 digits, mean ± standard error over seeds, and the "
        "difference paired by seed: its error over seeds, and that over test pictures."
    )
    publish(args.out, [note, "", *machines(recorded.lines()), "", *tables(recorded.lines())])


if __name__ == "__main__":
    main()
