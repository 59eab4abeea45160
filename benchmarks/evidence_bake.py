"""What baking without training keeps of the evidence's networks, by its tolerance.

    python benchmarks/evidence_bake.py --checkpoint efficientnet-lite0.pth --keep DIR --train
    train.tar --test test.tar

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed is baked
at each tolerance, on pictures that no network trained on and without their labels, and compared
with itself before on all test pictures. The lines go to evidence_bake.jsonl, the table to
evidence_bake.md.
"""

from __future__ import annotations

import copy
import functools
import statistics
from typing import Any

import torch
from evidence_arms import ARMS
from evidence_data import cifar, draw, still
from evidence_kept import measured, parser
from evidence_table import Line, error
from evidence_train import machine
from torch import Tensor, nn

import retrofit
from retrofit.export.bake import bake

TOLERANCES = (0.05, 0.1, 0.2, 0.4, 10.0)
"""The last one bakes whatever can be."""
WORST = 0.01


def answers(model: nn.Module, images: Tensor) -> Tensor:
    """Return a network's logits."""
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in images.split(100)])


def curve(model: nn.Module, images: Tensor, test: Tensor, labels: Tensor) -> dict[str, Any]:
    """Bake a network at every tolerance; return what each does on the test pictures."""
    own = answers(model, test)
    right = own.argmax(1) == labels
    spread = float((own - own.mean(0)).square().mean())
    stages: list[dict[str, Any]] = []
    for tolerance in TOLERANCES:
        network = copy.deepcopy(model)
        try:
            _, report = bake(network, images.split(64), tolerance=tolerance)
        except retrofit.RetrofitError as refused:
            if "raise `tolerance`" not in str(refused):
                raise
            stages.append({"tolerance": tolerance, "layers": 0, "of": 0})
            continue
        got = answers(network, test)
        squares = (got - own).square().mean(1) / spread
        worst = squares.sort(descending=True).values[: round(WORST * len(squares))]
        stages.append(
            {
                "tolerance": tolerance,
                "layers": report.chosen.layers,
                "of": sum(layer.error is not None for layer in report.layers),
                "error": round(float(squares.mean().sqrt()), 4),
                "worst": round(float(worst.mean().sqrt()), 4),
                "agreement": round(100 * float((got.argmax(1) == own.argmax(1)).float().mean()), 2),
                "top1": round(100 * float((got.argmax(1) == labels).float().mean()), 2),
            }
        )
    return {"network": round(100 * float(right.float().mean()), 2), "stages": stages}


def table(lines: list[Line], arms: list[str], batch: int) -> list[str]:
    """Return a row for each arm and tolerance, means over seeds."""
    text = [
        "| network | tolerance | n | layers baked | change of the logits | of the worst 1% | same top-1 | loses |"
    ]
    text.append("|---|---|---|---|---|---|---|---|")
    for name in arms:
        own = [line for line in lines if (line["arm"], line["batch"]) == (name, batch)]
        for place, tolerance in enumerate(TOLERANCES if own else ()):
            stages = [line["stages"][place] for line in own]
            head = f"| {ARMS[name].label} | {tolerance if tolerance < 1 else 'none'} | {len(own)}"
            if not all(stage["layers"] for stage in stages):
                text.append(
                    f"{head} | none in {sum(not stage['layers'] for stage in stages)} of {len(own)} | | | | |"
                )
                continue
            layers = " / ".join(str(stage["layers"]) for stage in stages)
            change, worst, same = (
                statistics.fmean(stage[key] for stage in stages)
                for key in ("error", "worst", "agreement")
            )
            lost = [
                line["network"] - stage["top1"] for line, stage in zip(own, stages, strict=True)
            ]
            loss = f"{statistics.fmean(lost):.1f} ± {error(lost)}"
            text.append(
                f"{head} | {layers} of {stages[0]['of']} | {change:.2f} | {worst:.2f} | {same:.1f}% | {loss} |"
            )
    return text


def main() -> None:
    options = parser(__doc__, ["ln", "ln-pn", "bnn-0.1"], "evidence_bake.jsonl")
    options.add_argument(
        "--images", type=int, default=250, help="pictures to bake on, half of them to judge on"
    )
    args = options.parse_args()

    @functools.cache
    def pictures(size: int) -> tuple[Tensor, Tensor, Tensor]:
        every = cifar(args.train, args.test, 100)
        return still(draw(every.val, args.images, seed=0), size)[0], *still(every.test, size)

    def measure(model: nn.Module, run: Line) -> dict[str, Any]:
        return {**curve(model, *pictures(run["img_size"])), "machine": machine()}

    lines = measured(args, measure)
    text = [
        "Baked without training, against the same network before. Change: root mean square of the change of the "
        "logits, as a share of their standard deviation, over the test pictures and over the 1% with the largest. "
        "Loses: points of top-1, ± standard error over the n seeds.",
        "",
    ]
    for batch in args.batch_sizes:
        text += [f"Trained with batches of {batch}:", "", *table(lines, args.arms, batch), ""]
    text += sorted({line["machine"] for line in lines})
    args.out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
