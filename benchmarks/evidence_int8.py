"""What the trained networks of the evidence keep as ONNX files in float16 and INT8.

    python benchmarks/evidence_int8.py --checkpoint efficientnet-lite0.pth --keep DIR --train train.tar --test test.tar

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed, at the arm's learning rate,
is exported in each precision and run by ONNX Runtime on all test pictures; 512 pictures that no network trained on give
the ranges. The power transforms of bnn are polynomials of degree 4. The lines go to evidence_int8.jsonl, the table to
evidence_int8.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence_arms import ARMS, convert, trained_network
from evidence_data import cifar, still
from evidence_shift import in_order
from evidence_table import SETUP, Line, Setup, error
from evidence_train import file_name, machine
from torch import Tensor, nn

import retrofit
from retrofit.export.onnx.precision import Precision
from retrofit.utils.onnx_runtimes import open_onnx

RESULTS = Path(__file__).parent / "results"
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "int8")
POLYNOMIALS: dict[str, Any] = {"fold": "poly", "degree": 4}


def measured(model: nn.Module, arm: str, images: Tensor, test: Tensor, labels: Tensor) -> dict[str, Any]:
    """Export a network in every precision; return top-1, agreement with the network itself and size of each file."""
    with torch.inference_mode():
        own = torch.cat([model(batch) for batch in test.split(100)])
    found: dict[str, Any] = {"network": round(100 * (own.argmax(1) == labels).float().mean().item(), 2)}
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
            logits = np.concatenate([run(batch.numpy())[0] for batch in test.contiguous().split(100)])
            same = logits.argmax(1) == own.argmax(1).numpy()
            found[precision] = {
                "top1": round(100 * float((logits.argmax(1) == labels.numpy()).mean()), 2),
                "agreement": round(100 * float(same.mean()), 2),
                "megabytes": round(file.stat().st_size / 1e6, 1),
            }
    return found


def table(lines: list[Line], arms: list[str]) -> list[str]:
    """Return each arm's top-1 and agreement in every precision, means over seeds."""
    text = ["| network | n | top-1 in PyTorch | float16: top-1, agreement | INT8: top-1, agreement | INT8 loses | MB |"]
    text.append("|---|---|---|---|---|---|---|")
    for name in arms:
        own = [line for line in lines if line["arm"] == name]
        if not own:
            continue
        cells = [f"{statistics.fmean(line['network'] for line in own):.1f}"]
        for precision in PRECISIONS[1:]:
            means = [statistics.fmean(line[precision][key] for line in own) for key in ("top1", "agreement")]
            cells.append(f"{means[0]:.1f}, {means[1]:.1f}%")
        lost = [line["network"] - line["int8"]["top1"] for line in own]
        cells.append(f"{statistics.fmean(lost):.1f} ± {error(lost)}")
        cells.append(", ".join(f"{own[0][precision]['megabytes']}" for precision in PRECISIONS))
        text.append(f"| {ARMS[name].label} | {len(own)} | {' | '.join(cells)} |")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="folder of trained weights")
    parser.add_argument("--checkpoint", required=True, help="of the source network")
    parser.add_argument("--train", required=True, metavar="TAR")
    parser.add_argument("--test", required=True, metavar="TAR")
    parser.add_argument("--images", type=int, default=512, help="pictures for the ranges")
    parser.add_argument("--arms", nargs="+", default=["bn-frozen", "bnn-0.1", "ln", "ln-baked"], choices=list(ARMS))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--runs", type=Path, default=RESULTS / "evidence.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_int8.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    every = [json.loads(line) for line in args.runs.read_text().splitlines()]
    done: list[Line] = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    setup = Setup([line for line in every if line["data"] == "cifar10" and line["images"] == 500])
    pictures = cifar(args.train, args.test, 100)
    for name in args.arms:
        for line in setup.of(name, args.batch_size):
            key: dict[str, Any] = {one: line[one] for one in (*SETUP, "arm", "batch", "lr", "seed")}
            weights = args.keep / f"{file_name(in_order(line))}.pth"
            if any(all(one[part] == value for part, value in key.items()) for one in done) or not weights.exists():
                continue
            model = convert(trained_network(line["model"], args.checkpoint, 10, line["seed"]), ARMS[name])
            model.load_state_dict(torch.load(weights, weights_only=True))
            images = still(pictures.val[:: max(1, len(pictures.val) // args.images)], line["img_size"])[0]
            test, labels = still(pictures.test, line["img_size"])
            done.append({**key, **measured(model.eval(), name, images, test, labels), "machine": machine()})
            with args.out.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(name, line["seed"], {part: done[-1][part] for part in ("network", *PRECISIONS)}, flush=True)
    head = "Top-1 in percent on the test pictures; agreement: the same top-1 as the network in PyTorch. "
    text = [f"{head}Means over n seeds; the loss with its standard error over seeds. MB: float32, float16, INT8.", ""]
    text += table(done, args.arms)
    text += ["", *sorted({line["machine"] for line in done})]
    args.out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
