"""A GPU in one command: are the Triton kernels right on a real device, what do they cost, and what
is missing?

    python benchmarks/gpu.py [--minutes 25] [--timm-train train.py] [--only PART ...]
    python benchmarks/gpu.py --dry

In this order, until the minutes are over:

    profile      steps of bnn and of its source: host against device, the slowest kernels
    self_test    what every process asks of the kernels
    steps        training steps of networks in bfloat16 and float16, with peak memory
    layers       layers against torch's own and the memory's bandwidth, also from CUDA graphs
    tiles        the kernels of bnn with other tiles
    compiled     training steps under torch.compile
    throughput   images a second of `retrofit finetune`, and of timm's train.py if its path is given
    agreement    every layer against float64, in three types
    tests        those marked gpu

Each result is written as soon as it is there. Started again on the same machine and the same layers,
with --only for what is missing, the script replaces the tables that it makes anew and keeps the
others. What failed and what was not reached stands at the end of the file, and the exit status is 1
if anything failed. --dry goes through the same code on the CPU, in Triton's interpreter, at tiny sizes and with nothing
compiled, and records nothing: what it prints says whether the script runs, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

if "--dry" in sys.argv:  # before Triton is imported: it decides then
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
import triton
from gpu_layers import compare_with_float64, run_self_test, time_layers, try_tiles
from gpu_networks import (
    profile_steps,
    run_gpu_tests,
    time_compiled_steps,
    time_finetune,
    time_steps,
)
from gpu_report import DRY, FULL, Report, Sizes
from layers import machine
from reproduce import full

import retrofit
from retrofit.layers.kernels.cpp import digest

Part = Callable[[Report, Sizes], None]


def parts(timm_train: str | None = None) -> dict[str, Part]:
    """Return what can be measured, in the order in which it is."""
    return {
        "profile": profile_steps,
        "self_test": run_self_test,
        "steps": time_steps,
        "layers": time_layers,
        "tiles": try_tiles,
        "compiled": time_compiled_steps,
        "throughput": partial(time_finetune, timm_train=timm_train),
        "agreement": compare_with_float64,
        "tests": run_gpu_tests,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU, in the interpreter; records nothing"
    )
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=parts(),
        default=parts(),
        metavar="PART",
        help=f"of {', '.join(parts())}",
    )
    parser.add_argument(
        "--timm-train", metavar="FILE", help="timm's train.py, which its package does not contain"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.md")
    parser.add_argument(
        "--train", metavar="TAR", help="CIFAR-10 with one folder a class, for --reproduce"
    )
    parser.add_argument("--test", metavar="TAR")
    parser.add_argument(
        "--reproduce",
        action="store_true",
        help="go on with the papers' runs (reproduce.py) instead",
    )
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry shows that the script runs")
    if args.reproduce:
        full(args.train, args.test, args.minutes)
        return
    sizes = DRY if args.dry else FULL
    where = f"{machine(sizes.device)}, Triton {triton.__version__}, layers {_layers_version()}"
    report = Report(where, args.minutes, None if args.dry else args.out)
    measured = parts(args.timm_train)
    for name in args.only:
        with report.part(name, 0.0):
            measured[name](report, sizes)
        # What times layers leaves the name of their kernels there
        os.environ.pop("RETROFIT_KERNELS", None)
        report.write()
    for what in report.missing:
        print(f"not reached: {what}")
    sys.exit(1 if report.failed else 0)


def _layers_version() -> str:
    """Return a digest of the layers and their kernels: figures of others are not kept."""
    files = sorted((Path(retrofit.__file__).parent / "layers").rglob("*.py"))
    return digest(b"".join(file.read_bytes() for file in files))


if __name__ == "__main__":
    main()
