"""Images a second of `retrofit finetune` beside timm's own train.py, on one core.

    python benchmarks/finetune_speed.py --timm-train train.py [--model resnet18] [--size 64]
    [--batch 32] [--rounds 3]

train.py is in timm's repository (github.com/huggingface/pytorch-image-models), not in its package.
Both commands train the same network, which is not converted, with the same settings on the same
JPEGs, and take turns. A figure is the difference between a run of four epochs and one of a single
epoch, so that imports and set-up do not count; validation and checkpoints do. CPU seconds of a
command and its decoder are measured beside wall seconds: on one core they are the same when nothing
else runs, and what else runs changes them little.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from evidence_train import machine
from PIL import Image

EPOCHS = (1, 4)
RESULT = Path(__file__).parent / "results" / "finetune_speed.md"


def write_images(root: Path, count: int, side: int) -> None:
    """Two classes of noisy JPEGs to train on, and a few to validate on."""
    generator = np.random.default_rng(0)
    for part, images in (("train", count), ("val", 32)):
        for number in range(images):
            folder = root / part / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            coarse = generator.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
            Image.fromarray(coarse).resize((side, side)).save(folder / f"{number}.jpg", quality=90)


def commands(args: argparse.Namespace, data: Path, out: Path, epochs: int) -> dict[str, list[str]]:
    """Both command lines."""
    common = [
        "--epochs",
        str(epochs),
        "-b",
        str(args.batch),
        "-j",
        "1",
        "--opt",
        "sgd",
        "--lr",
        "0.01",
    ]
    common += ["--weight-decay", "1e-4", "--warmup-epochs", "0", "--sched", "cosine", "--seed", "1"]
    retrofit = [
        "-m",
        "retrofit",
        "finetune",
        args.model,
        "--data-dir",
        str(data),
        "-o",
        str(out / "run"),
    ]
    retrofit += ["--img-size", str(args.size), "--device", "cpu", "--clip-grad", "0", *common]
    timm = [
        str(args.timm_train),
        "--data-dir",
        str(data),
        "--model",
        args.model,
        "--num-classes",
        "2",
    ]
    timm += [
        "--img-size",
        str(args.size),
        "--device",
        "cpu",
        "--output",
        str(out),
        "--val-split",
        "val",
        *common,
    ]
    return {"retrofit": retrofit, "timm": timm}


def seconds(command: list[str]) -> tuple[float, float]:
    """CPU and wall seconds of a command and its children, on one core."""
    core = min(os.sched_getaffinity(0))
    used, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return cpu, time.perf_counter() - start


def main() -> None:
    """Take turns and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timm-train", type=Path, required=True, help="timm's train.py")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[str, list[tuple[float, float]]] = {"retrofit": [], "timm": []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_images(data, args.images, args.size + args.size // 4)
        for number in range(args.rounds):
            for name, found in rates.items():
                short, long = (
                    seconds(commands(args, data, Path(folder) / f"{number}-{epochs}", epochs)[name])
                    for epochs in EPOCHS
                )
                seen = args.images * (EPOCHS[1] - EPOCHS[0])
                found.append((seen / (long[0] - short[0]), seen / (long[1] - short[1])))
                print(
                    f"{name}: {found[-1][0]:.1f} images a CPU second, {found[-1][1]:.1f} a second"
                )
    setting = f"{args.model}, {args.size} px, batches of {args.batch}. {machine()}."
    text = ["# `retrofit finetune` beside timm's train.py", "", setting, ""]
    for kind, which in (("CPU second", 0), ("second", 1)):
        ratios = [ours[which] / theirs[which] for ours, theirs in zip(*rates.values(), strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        text.append(
            f"- images a {kind}, retrofit / timm: {statistics.median(ratios):.2f} ({spread}, {args.rounds} rounds)"
        )
    print("\n".join(text))
    RESULT.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
