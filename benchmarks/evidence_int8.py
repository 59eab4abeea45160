"""What the trained networks of the evidence keep as ONNX files in float16 and INT8.

    python benchmarks/evidence_int8.py --checkpoint efficientnet-lite0.pth --keep DIR --train
    train.tar --test test.tar

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed, at the
arm's learning rate, is exported in each precision and run by ONNX Runtime on all test pictures; of
500 pictures that no network trained on every second one gives the ranges. The power transforms of
bnn are polynomials of degree 3. The lines go to evidence_int8.jsonl, the table to evidence_int8.md.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence_arms import ARMS
from evidence_data import cifar, draw, still
from evidence_kept import measured, parser
from evidence_table import Line, error
from evidence_train import machine
from torch import Tensor, nn

import retrofit
from retrofit.export.request import Precision
from retrofit.utils.onnx_runtimes import open_onnx

PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "int8")
POLYNOMIALS: dict[str, Any] = {"fold": "poly", "degree": 3}


def precisions(
    model: nn.Module, arm: str, images: Tensor, test: Tensor, labels: Tensor
) -> dict[str, Any]:
    """Export a network in every precision; return top-1, agreement with the network itself and size
    of each file.
    """
    with torch.inference_mode():
        own = torch.cat([model(batch) for batch in test.split(100)])
    found: dict[str, Any] = {
        "network": round(100 * (own.argmax(1) == labels).float().mean().item(), 2)
    }
    fold: dict[str, Any] = POLYNOMIALS if ARMS[arm].to == "bnn" else {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            file = Path(folder) / f"{precision}.onnx"
            retrofit.export_onnx(
                model,
                file,
                input_size=tuple(images.shape[1:]),
                calibrate=images.split(64),
                precision=precision,
                tolerance=math.inf,
                **fold,
            )
            run = open_onnx(file, threads=1)
            logits = np.concatenate(
                [run(batch.numpy())[0] for batch in test.contiguous().split(100)]
            )
            same = logits.argmax(1) == own.argmax(1).numpy()
            found[precision] = {
                "top1": round(100 * float((logits.argmax(1) == labels.numpy()).mean()), 2),
                "agreement": round(100 * float(same.mean()), 2),
                "megabytes": round(file.stat().st_size / 1e6, 1),
            }
    return found


def table(lines: list[Line], arms: list[str], batch: int) -> list[str]:
    """Return each arm's top-1 and agreement in every precision, means over seeds."""
    text = [
        "| network | n | top-1 in PyTorch | float16: top-1, agreement | INT8: top-1, agreement | INT8 loses | MB |"
    ]
    text.append("|---|---|---|---|---|---|---|")
    for name in arms:
        own = [line for line in lines if (line["arm"], line["batch"]) == (name, batch)]
        if not own:
            continue
        cells = [f"{statistics.fmean(line['network'] for line in own):.1f}"]
        for precision in PRECISIONS[1:]:
            means = [
                statistics.fmean(line[precision][key] for line in own)
                for key in ("top1", "agreement")
            ]
            cells.append(f"{means[0]:.1f}, {means[1]:.1f}%")
        lost = [line["network"] - line["int8"]["top1"] for line in own]
        cells.append(f"{statistics.fmean(lost):.1f} ± {error(lost)}")
        cells.append(", ".join(f"{own[0][precision]['megabytes']}" for precision in PRECISIONS))
        text.append(f"| {ARMS[name].label} | {len(own)} | {' | '.join(cells)} |")
    return text


def main() -> None:
    options = parser(
        __doc__,
        ["bn-frozen", "bn", "bn-noise-0.1", "bnn-0.1", "ln", "ln-baked"],
        "evidence_int8.jsonl",
    )
    options.add_argument("--images", type=int, default=500, help="half of them for the ranges")
    args = options.parse_args()

    @functools.cache
    def pictures(size: int) -> tuple[Tensor, Tensor, Tensor]:
        every = cifar(args.train, args.test, 100)
        return still(draw(every.val, args.images, seed=0), size)[0], *still(every.test, size)

    def measure(model: nn.Module, run: Line) -> dict[str, Any]:
        return {**precisions(model, run["arm"], *pictures(run["img_size"])), "machine": machine()}

    lines = measured(args, measure)
    head = "Top-1 in percent on the test pictures; agreement: the same top-1 as the network in PyTorch. "
    text = [
        f"{head}Means over n seeds; the loss with its standard error over seeds. MB: float32, float16, INT8.",
        "",
    ]
    for batch in args.batch_sizes:
        text += [f"Trained with batches of {batch}:", "", *table(lines, args.arms, batch), ""]
    text += sorted({line["machine"] for line in lines})
    args.out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
