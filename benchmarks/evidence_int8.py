r"""What the trained networks of the evidence keep as ONNX files in float16 and INT8.

    python benchmarks/evidence_int8.py --checkpoint efficientnet-lite0.pth --keep DIR \
        --train train.tar --test test.tar

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed, at the
arm's learning rate, is exported in each precision and run by ONNX Runtime on all test pictures; of
500 pictures that no network trained on every second one gives the ranges. The power transforms of
bnn are polynomials of degree 3. The lines go to evidence_int8.jsonl, the table to evidence_int8.md.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from evidence_arms import ARMS
from evidence_kept import logits, measured, parser, percent, publish_tables, unseen
from harness import ANY_DEVIATION, Line, machine, markdown, mean, with_error
from torch import Tensor, nn

import retrofit
from retrofit.export.request import Precision
from retrofit.utils.onnx_runtimes import open_onnx

PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "int8")
POLYNOMIALS: dict[str, Any] = {"fold": "poly", "degree": 3}
NOTE = (
    "Top-1 in percent on the test pictures; agreement: the same top-1 as the network in PyTorch. Means over n seeds; "
    "the loss with its standard error over seeds. MB: float32, float16, INT8."
)


def precisions(model: nn.Module, arm: str, images: Tensor, test: Tensor, labels: Tensor) -> Line:
    """Export a network in every precision; return top-1, agreement with the network itself and size
    of each file.
    """
    expected = logits(model, test).argmax(1)
    line: Line = {"network": percent(expected == labels)}
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
                tolerance=ANY_DEVIATION,
                **fold,
            )
            run = open_onnx(file, threads=1)
            outputs = [run(batch.numpy())[0] for batch in test.contiguous().split(100)]
            chosen = torch.cat([torch.from_numpy(output) for output in outputs]).argmax(1)
            line[precision] = {
                "top1": percent(chosen == labels),
                "agreement": percent(chosen == expected),
                "megabytes": round(file.stat().st_size / 1e6, 1),
            }
    return line


def table(runs: dict[str, list[Line]]) -> list[str]:
    """Return each arm's top-1 and agreement in every precision, means over seeds."""
    head = ["network", "n", "top-1 in PyTorch", "float16: top-1, agreement"]
    return markdown(
        [*head, "INT8: top-1, agreement", "INT8 loses", "MB"],
        [[ARMS[arm].label, *cells(lines)] for arm, lines in runs.items()],
    )


def cells(lines: list[Line]) -> list[str]:
    """Return what the table says of an arm."""
    text = [str(len(lines)), f"{mean(lines, 'network'):.1f}"]
    for precision in PRECISIONS[1:]:
        files = [line[precision] for line in lines]
        text.append(f"{mean(files, 'top1'):.1f}, {mean(files, 'agreement'):.1f}%")
    text.append(with_error([line["network"] - line["int8"]["top1"] for line in lines]))
    text.append(", ".join(f"{lines[0][precision]['megabytes']}" for precision in PRECISIONS))
    return text


def main() -> None:
    arms = ["bn-frozen", "bn", "bn-noise-0.1", "bnn-0.1", "ln", "ln-baked"]
    options = parser(__doc__, arms, "evidence_int8.jsonl")
    options.add_argument("--images", type=int, default=500, help="half of them for the ranges")
    args = options.parse_args()
    pictures = functools.cache(functools.partial(unseen, args))

    def measure(model: nn.Module, run: Line) -> Line:
        return {**precisions(model, run["arm"], *pictures(run["img_size"])), "machine": machine()}

    publish_tables(args, NOTE, measured(args, measure), table)


if __name__ == "__main__":
    main()
