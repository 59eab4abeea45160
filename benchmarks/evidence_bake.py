r"""What baking without training keeps of the evidence's networks, by its tolerance.

    python benchmarks/evidence_bake.py --checkpoint efficientnet-lite0.pth --keep DIR \
        --train train.tar --test test.tar

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed is baked
at each tolerance, on pictures that no network trained on and without their labels, and compared
with itself before on all test pictures. The lines go to evidence_bake.jsonl, the table to
evidence_bake.md.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from evidence_arms import ARMS
from evidence_kept import logits, measured, parser, percent, publish_tables, unseen
from harness import Line, machine, markdown, mean, with_error
from torch import Tensor, nn

import retrofit
from retrofit.baking import bake

TOLERANCES = (0.05, 0.1, 0.2, 0.4, 10.0)
"""The last one bakes whatever can be."""
WORST = 0.01
NOTE = (
    "Baked without training, against the same network before. Change: root mean square of the change of the "
    "logits, as a share of their standard deviation, over the test pictures and over the 1% with the largest. "
    "Loses: points of top-1, ± standard error over the n seeds."
)


def curve(model: nn.Module, images: Tensor, test: Tensor, labels: Tensor) -> Line:
    """Bake a network at every tolerance; return what each does on the test pictures."""
    before = logits(model, test)
    stages = [stage(model, tolerance, images, test, labels, before) for tolerance in TOLERANCES]
    return {"network": percent(before.argmax(1) == labels), "stages": stages}


def stage(
    model: nn.Module, tolerance: float, images: Tensor, test: Tensor, labels: Tensor, before: Tensor
) -> dict[str, Any]:
    """Bake a copy of a network, and compare it with the network; no layers if that is refused."""
    network = copy.deepcopy(model)
    try:
        _, report = bake(network, images.split(64), tolerance=tolerance)
    except retrofit.RetrofitError as refused:
        if "raise `tolerance`" not in str(refused):
            raise
        return {"tolerance": tolerance, "layers": 0, "of": 0}
    after = logits(network, test)
    spread = float((before - before.mean(0)).square().mean())
    squares = (after - before).square().mean(1) / spread
    worst = squares.sort(descending=True).values[: round(WORST * len(squares))]
    return {
        "tolerance": tolerance,
        "layers": report.chosen.layers,
        "of": sum(layer.error is not None for layer in report.layers),
        "error": round(float(squares.mean().sqrt()), 4),
        "worst": round(float(worst.mean().sqrt()), 4),
        "agreement": percent(after.argmax(1) == before.argmax(1)),
        "top1": percent(after.argmax(1) == labels),
    }


def table(runs: dict[str, list[Line]]) -> list[str]:
    """Return a row for each arm and tolerance, means over seeds."""
    head = ["network", "tolerance", "n", "layers baked", "change of the logits"]
    rows = [
        [ARMS[arm].label, tolerance if tolerance < 1 else "none", len(lines), *cells(lines, place)]
        for arm, lines in runs.items()
        for place, tolerance in enumerate(TOLERANCES)
    ]
    return markdown([*head, "of the worst 1%", "same top-1", "loses"], rows)


def cells(lines: list[Line], place: int) -> list[str]:
    """Return what the table says of an arm at the tolerance of a place."""
    stages = [line["stages"][place] for line in lines]
    refused = sum(not stage["layers"] for stage in stages)
    if refused:
        return [f"none in {refused} of {len(lines)}", "", "", "", ""]
    layers = " / ".join(str(stage["layers"]) for stage in stages)
    lost = [line["network"] - stage["top1"] for line, stage in zip(lines, stages, strict=True)]
    return [
        f"{layers} of {stages[0]['of']}",
        f"{mean(stages, 'error'):.2f}",
        f"{mean(stages, 'worst'):.2f}",
        f"{mean(stages, 'agreement'):.1f}%",
        with_error(lost),
    ]


def main() -> None:
    options = parser(__doc__, ["ln", "ln-pn", "bnn-0.1"], "evidence_bake.jsonl")
    options.add_argument(
        "--images", type=int, default=250, help="pictures to bake on, half of them to judge on"
    )
    args = options.parse_args()
    pictures = functools.cache(functools.partial(unseen, args))

    def measure(model: nn.Module, run: Line) -> Line:
        return {**curve(model, *pictures(run["img_size"])), "machine": machine()}

    publish_tables(args, NOTE, measured(args, measure), table)


if __name__ == "__main__":
    main()
