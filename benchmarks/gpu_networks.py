"""The parts of gpu.py that look at networks: a profile, training steps, and images a second."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import timm
import torch
from gpu_profile import STEPS, busy_milliseconds, kernel_times, profiled
from gpu_report import Report, Row, Sizes, short
from layers import measure, ratio, synchronize
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

import retrofit

ROOT = Path(__file__).parents[1]
# Kernels that a profile shows
SHOWN = 15


class TrainingStep:
    """A training step of a network in channels_last, under autocast, on made-up images.

    Args:
        network: The network's name in timm.
        target: "source", "bn.eval()" (the source with constant statistics), or a target.
        sizes: How many images, and on what.
        dtype: Type of autocast.
        compile_mode: Mode of `torch.compile`; empty does not compile.
    """

    def __init__(
        self, network: str, target: str, sizes: Sizes, dtype: torch.dtype, compile_mode: str = ""
    ) -> None:
        torch.manual_seed(0)
        model = timm.create_model(network)
        side = model.pretrained_cfg["input_size"][-1]
        if network == sizes.convolutional:
            side = sizes.pixels
        model = _converted(model, target).to(sizes.device, memory_format=torch.channels_last)
        images = torch.randn(sizes.batch, 3, side, side, device=sizes.device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.zeros(sizes.batch, dtype=torch.long, device=sizes.device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(sizes.device, enabled=dtype == torch.float16)
        self.autocast = torch.autocast(sizes.device, dtype)
        self.model = torch.compile(model, mode=compile_mode) if compile_mode else model
        self.host_seconds: list[float] = []

    def __call__(self) -> float:
        """Take the step; return the seconds until the device has done it."""
        synchronize(self.images)
        start = time.perf_counter()
        with self.autocast:
            loss = cross_entropy(self.model(self.images), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.host_seconds.append(time.perf_counter() - start)
        synchronize(self.images)
        return time.perf_counter() - start

    def peak_memory(self) -> int:
        """Return the bytes that a step allocates at most, beyond what is there before it."""
        self()
        if not self.images.is_cuda:
            return 0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        return torch.cuda.max_memory_allocated() - before


def _converted(model: nn.Module, target: str) -> nn.Module:
    if target in ("source", "bn.eval()"):
        model.train()
        if target == "bn.eval()":
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return model
    model, _ = retrofit.convert(model, target, check=False)
    if target != "frozen":  # which has no strength
        retrofit.set_strength(model, 1.0)
    return model.train()


def profile_steps(report: Report, sizes: Sizes) -> None:
    """Profile steps of `bnn` and of its source: does the device wait for Python, and on which
    kernels is its time spent?
    """
    name = sizes.convolutional
    totals: list[Row] = []
    for target in ("source", "bnn"):
        with report.part(f"profile of {target}", 30) as is_time:
            if not is_time:
                continue
            run = TrainingStep(name, target, sizes, torch.bfloat16)
            kernels = kernel_times(profiled(run, sizes), sizes)
            # The profiler slows the host: what it takes is measured without it
            seconds = [run() for _ in range(STEPS)]
            host = run.host_seconds[-STEPS:]
            launches = sum(kernel.launches for kernel in kernels)
            totals.append(
                [
                    target,
                    f"{1e3 * statistics.median(seconds):.1f}",
                    f"{1e3 * statistics.median(host):.1f}",
                    f"{busy_milliseconds(kernels):.1f}",
                    f"{launches:.0f}",
                ]
            )
            rows: list[Row] = [
                [kernel.name, f"{kernel.launches:.0f}", f"{kernel.milliseconds:.2f}"]
                for kernel in kernels[:SHOWN]
            ]
            title = f"Slowest kernels of a step of {name}, {target}"
            report.table(title, "kernel | launches | ms", rows)
    head = "network | ms a step | ms until the host has sent it | ms the device works | launches"
    report.table(f"A step of {name}, AMP in bfloat16", head, totals)


def time_steps(report: Report, sizes: Sizes) -> None:
    """Time training steps against their sources', and take the peak of their memory."""
    rows: list[Row] = []
    for dtype in sizes.half_types:
        for name, targets in _networks(sizes).items():
            with report.part(f"steps of {name} in {short(dtype)}", 30) as is_time:
                if is_time:
                    rows += _step_times(name, targets, sizes, dtype)
                    _report_steps(report, sizes, "channels_last", rows)


def time_compiled_steps(report: Report, sizes: Sizes) -> None:
    """Time compiled training steps against their compiled sources'."""
    rows: list[Row] = []
    for mode in sizes.compile_modes:
        for name, targets in _networks(sizes).items():
            for target in targets:
                what = f"compiled steps of {name}, {target}, {mode}"
                with report.part(what, 180) as is_time:
                    if is_time:
                        rows += _step_times(name, (target,), sizes, torch.bfloat16, mode)
                        _report_steps(report, sizes, "torch.compile", rows)
                torch.compiler.reset()


def _networks(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    return {sizes.convolutional: sizes.targets, sizes.transformer: ("lnn",)}


def _report_steps(report: Report, sizes: Sizes, way: str, rows: list[Row]) -> None:
    head = "network, way | target | time / source | quartiles | images/s | peak memory / source"
    report.table(f"A training step of {sizes.batch} images, {way}, medians of turns", head, rows)


def _step_times(
    name: str, targets: tuple[str, ...], sizes: Sizes, dtype: torch.dtype, mode: str = ""
) -> list[Row]:
    steps = {
        target: TrainingStep(name, target, sizes, dtype, mode) for target in ("source", *targets)
    }
    memory = {target: step.peak_memory() for target, step in steps.items()}
    times = measure(dict(steps), sizes.rounds, sizes.warm_up)
    way = f"{name}, {short(dtype)}{mode and ', ' + mode}"
    rows: list[Row] = []
    for target in targets:
        middle, low, high = ratio(times, target, "source")
        speed = sizes.batch / statistics.median(times[target])
        of_source = f"{memory[target] / memory['source']:.2f}" if memory["source"] else ""
        quartiles = f"{low:.2f}-{high:.2f}"
        rows.append([way, target, f"{middle:.2f}", quartiles, f"{speed:.0f}", of_source])
    return rows


def run_gpu_tests(report: Report, sizes: Sizes) -> None:
    """Run the tests that need a GPU; in a dry run, collect them."""
    with report.part("tests", 60) as is_time:
        if not is_time:
            return
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu"]
        command += ["tests/layers", "tests/export"]
        if sizes.device == "cpu":
            command.append("--collect-only")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        output = done.stdout.strip() or done.stderr.strip()
        last_line = output.splitlines()[-1]
        report.section("Tests marked gpu", last_line)
        if done.returncode:
            raise RuntimeError(last_line)


def time_finetune(report: Report, sizes: Sizes, timm_train: str | None) -> None:
    """Train a network for an epoch on made-up JPEGs by `retrofit finetune`, and by timm's
    train.py.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _write_jpegs(folder / "data", sizes.jpegs)
        workers = str(min(8, os.cpu_count() or 1))
        common = ["--data-dir", str(folder / "data"), "--epochs", "2", "-j", workers]
        common += ["-b", str(sizes.batch), "--device", sizes.device]
        if sizes.device == "cuda":
            common.append("--amp")
        for who, command in _trainers(sizes.convolutional, folder, timm_train).items():
            with report.part(f"throughput of {who}", 120) as is_time:
                if is_time:
                    speed = _images_per_second(who, [sys.executable, *command, *common])
                    rows.append([who, f"{speed:.0f}"])
    title = f"Images a second of {sizes.convolutional}, second epoch of {sizes.jpegs} JPEGs"
    report.table(title, "who | images/s", rows)


def _trainers(name: str, folder: Path, timm_train: str | None) -> dict[str, list[str]]:
    converted = folder / f"{name}-bnn.safetensors"
    network, _ = retrofit.convert(timm.create_model(name, num_classes=2), "bnn", check=False)
    retrofit.save(network, converted)
    finetune = ["-m", "retrofit", "finetune"]
    source = [*finetune, name, "--num-classes", "2", "--json", "-o", str(folder / "source")]
    bnn = [*finetune, str(converted), "--json", "-o", str(folder / "bnn")]
    trainers = {"retrofit finetune": source, "retrofit finetune, bnn": bnn}
    if timm_train:
        options = ["--model", name, "--num-classes", "2", "--output", str(folder / "timm")]
        trainers["timm's train.py"] = [timm_train, *options]
    return trainers


def _images_per_second(who: str, command: list[str]) -> float:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])
    if who.startswith("retrofit"):
        return float(json.loads(done.stdout)["last"]["images_per_second"])
    return float(re.findall(r"\(\s*[\d.]+s,\s*([\d.]+)/s\)", done.stdout + done.stderr)[-1])


def _write_jpegs(folder: Path, count: int) -> None:
    """Fill a folder of two classes, for training and for validation, with random JPEGs."""
    generator = torch.Generator().manual_seed(0)
    for split, number in (("train", count), ("validation", 8)):
        for n in range(number):
            pixels = torch.randint(256, (8, 8, 3), generator=generator, dtype=torch.uint8)
            file = folder / split / str(n % 2) / f"{n}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).resize((256, 256)).save(file)
