"""Time and peak memory of a training step and of inference, of whole networks against their source
networks.

    python benchmarks/step.py --model resnet18 [--batch 16] [--mode train|eval] [--device cpu|cuda]

The source network, its conversion at full strength with eager and with compiled kernels (Triton's
on a GPU), and the same network with the paper's formulas as they read, left to autograd, take turns
(or `--contenders gn-pn,ln-pn,eager`: targets of BatchNorm have the fast kernels). A name with
`-compiled` after it is that network under torch.compile. Figures are medians over the rounds,
ratios are of the same round. Peak memory is measured in a process of its own for each contender:
what a step adds at most to the resident memory before it (CPU), or to the memory allocated (CUDA).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from layers import Plain, append, machine, measure, ratio
from torch import nn

import retrofit
from retrofit.layers import BatchNormalNorm2d, LayerNormalNorm

BATCH_INDEPENDENT = ("ln", "gn", "ln-pn", "gn-pn")
COMPILED = "-compiled"


def build(model: str, contender: str, mode: str) -> nn.Module:
    """The network; conversions at strength 1, in evaluation with running lambdas away from 1."""
    torch.manual_seed(0)
    network = timm.create_model(model, num_classes=1000)
    if contender != "source":
        options = (
            {"to": contender}
            if contender in BATCH_INDEPENDENT
            else {"to": "normal", "noise": "paper"}
        )
        network, _ = retrofit.convert(network, **options)
        retrofit.set_strength(network, 1.0)
        for name, module in list(network.named_modules()):
            if getattr(module, "running_lambda", None) is not None:
                module.running_lambda.uniform_(0.6, 1.4)
            if contender == "plain" and isinstance(module, BatchNormalNorm2d | LayerNormalNorm):
                dims = (0, 2, 3) if isinstance(module, BatchNormalNorm2d) else (-1,)
                follows = [child for child in module.children()]
                network.set_submodule(
                    name,
                    nn.Sequential(Plain(module.weight.numel(), dims, 0, module.noise), *follows),
                )
    return network.train(mode == "train")


def stepper(args: argparse.Namespace, contender: str) -> Callable[[], float]:
    """A function that takes one step and returns its seconds."""
    compiled, contender = contender.endswith(COMPILED), contender.removesuffix(COMPILED)
    network = build(args.model, contender, args.mode).to(args.device)
    x = torch.randn(args.batch, *network.default_cfg["input_size"], device=args.device)
    target = torch.randint(1000, (args.batch,), device=args.device)
    if args.channels_last:
        network, x = (
            network.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    kernels = contender if contender in ("eager", "cpp", "triton") else "eager"
    if contender in BATCH_INDEPENDENT:
        kernels = "triton" if args.device == "cuda" else "cpp"
    if compiled:
        network.compile()

    def run() -> float:
        os.environ["RETROFIT_KERNELS"] = kernels
        start = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.amp):
            if args.mode == "eval":
                with torch.inference_mode():
                    network(x)
            else:
                loss = nn.functional.cross_entropy(network(x), target)
        if args.mode == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return run


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak(args: argparse.Namespace, contender: str, results: multiprocessing.Queue[int]) -> None:
    """Put the most memory that steps add to what is there before the first of them."""
    torch.set_num_threads(args.threads)
    run = stepper(args, contender)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        results.put(torch.cuda.max_memory_allocated() - before)
        return
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident())

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    run()
    done.set()
    watcher.join()
    results.put(most - before)


def peak_of(args: argparse.Namespace, contender: str) -> int:
    """Run `peak` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=peak, args=(args, contender, results))
    process.start()
    bytes_: int = results.get()
    process.join()
    return bytes_


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--mode", choices=["train", "eval"], default="train")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--contenders", default="")
    parser.add_argument("--measure", choices=["time", "memory", "both"], default="both")
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fast = "triton" if args.device == "cuda" else "cpp"
    names = [
        "source",
        *(args.contenders.split(",") if args.contenders else [fast, "eager", "plain"]),
    ]
    times, memory = {}, {}
    if args.measure != "memory":
        times = measure({name: stepper(args, name) for name in names}, args.repeats)
    if args.measure != "time":
        memory = {name: peak_of(args, name) for name in names}
    rows: list[list[object]] = []
    for name in names:
        row: list[object] = [args.model, args.mode, args.batch, name]
        if times:
            ratios = (f"{value:.2f}" for value in ratio(times, name, "source"))
            row += [f"{1e3 * statistics.median(times[name]):.0f}", *ratios]
        else:
            row += [""] * 4
        row += (
            [f"{memory[name] / 2**20:.0f}", f"{memory[name] / memory['source']:.2f}"]
            if memory
            else ["", ""]
        )
        rows.append(row)
        print(*row, sep="\t", flush=True)
    if args.out:
        head = [
            "model",
            "mode",
            "batch",
            "kernels",
            "ms",
            "ratio to source",
            "quartile",
            "quartile",
        ]
        head += ["peak MiB", "peak ratio", "machine"]
        append(args.out, head, [[*row, machine(args.device)] for row in rows])


if __name__ == "__main__":
    main()
