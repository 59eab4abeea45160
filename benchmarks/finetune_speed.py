r"""Images a second of `retrofit finetune` beside timm's own train.py, on one core.

    python benchmarks/finetune_speed.py --timm-train train.py [--model resnet18] [--size 64] \
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
from harness import command_line, machine, publish
from PIL import Image

EPOCHS = (1, 4)


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
    """Return both command lines."""
    common = (
        f"--data-dir {data} --img-size {args.size} --device cpu --epochs {epochs} -b {args.batch} "
        "-j 1 --opt sgd --lr 0.01 --weight-decay 1e-4 --warmup-epochs 0 --sched cosine --seed 1"
    )
    retrofit = f"-m retrofit finetune {args.model} -o {out}/run --clip-grad 0 {common}"
    timm = (
        f"{args.timm_train} --model {args.model} --num-classes 2 --output {out} --val-split val "
        f"{common}"
    )
    return {"retrofit": retrofit.split(), "timm": timm.split()}


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


def rate(args: argparse.Namespace, name: str, data: Path, out: Path) -> tuple[float, float]:
    """Return images a CPU second and a second of a command."""
    short, long = (
        seconds(commands(args, data, out / str(epochs), epochs)[name]) for epochs in EPOCHS
    )
    images = args.images * (EPOCHS[1] - EPOCHS[0])
    return images / (long[0] - short[0]), images / (long[1] - short[1])


def main() -> None:
    """Take turns and print the figures."""
    parser = command_line(__doc__, out="finetune_speed.md")
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
            for name, measured in rates.items():
                cpu, wall = rate(args, name, data, Path(folder) / str(number))
                measured.append((cpu, wall))
                print(f"{name}: {cpu:.1f} images a CPU second, {wall:.1f} a second")
    setting = f"{args.model}, {args.size} px, batches of {args.batch}. {machine()}."
    text = ["# `retrofit finetune` beside timm's train.py", "", setting, ""]
    for column, kind in enumerate(("CPU second", "second")):
        ratios = [
            ours[column] / theirs[column] for ours, theirs in zip(*rates.values(), strict=True)
        ]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {args.rounds} rounds"
        median = statistics.median(ratios)
        text.append(f"- images a {kind}, retrofit / timm: {median:.2f} ({spread})")
    publish(args.out, text)


if __name__ == "__main__":
    main()
