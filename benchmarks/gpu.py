"""A GPU in one command: are the Triton kernels right on a real device, what do they cost, and what
is missing?

    python benchmarks/gpu.py [--minutes 25] [--timm-train train.py] [--only PART ...]
    python benchmarks/gpu.py --dry

In this order, until the minutes are over: the self-test; the tests marked gpu; every layer against
float64, in three types; layers against torch's own and against what the memory's bandwidth allows;
training steps of networks, as they are and compiled, with peak memory; images a second of `retrofit
finetune`, and of timm's train.py if its path is given. What failed and what was not reached stands
at the end of the file, and the exit status is 1 if anything failed. --dry goes through the same
code on the CPU, in Triton's interpreter, at tiny sizes and with nothing compiled, and records
nothing: what it prints says whether the script runs, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if "--dry" in sys.argv:  # before Triton is imported: it decides then
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"

import timm
import torch
from layers import contenders, machine, measure, ratio, step, synchronize
from PIL import Image
from reproduce import full
from torch import nn
from torch.nn.functional import cross_entropy

import retrofit
from retrofit.layers import (
    BatchNormalNorm2d,
    GroupNormalNorm,
    InstanceNormalNorm2d,
    LayerNormalNorm2d,
)
from retrofit.layers.kernels import self_test
from retrofit.layers.kernels import triton as triton_kernels

ROOT = Path(__file__).parents[1]
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# over memory that forward and backward need: read x, write y; read x and y's gradient, write x's
PASSES = 5
PARTS = ("self_test", "tests", "agreement", "layers", "steps", "throughput")
Row = list[object]


class Day:
    """What is measured in the time there is.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = "cpu" if args.dry else "cuda"
        self.rounds = 2 if args.dry else 15
        self.layouts = (torch.contiguous_format, torch.channels_last)[: 1 if args.dry else 2]
        self.end = time.monotonic() + 60 * args.minutes
        self.text = [f"Machine: {machine(self.device)}."]
        self.failed: list[str] = []
        self.missing: list[str] = []

    @contextmanager
    def part(self, name: str, seconds: float = 5.0) -> Iterator[bool]:
        """Give whether there are so many seconds left; what fails inside is noted, and the rest
        goes on.
        """
        left = self.end - time.monotonic()
        if left < seconds:
            self.missing.append(name)
        try:
            yield left >= seconds
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else ""
            self.failed.append(f"{name}: {type(error).__name__}: {first}"[:300])
            print(self.failed[-1], flush=True)

    def table(self, title: str, head: str, rows: list[Row]) -> None:
        """Add a table, and write the file anew."""
        self.text += ["", f"## {title}", "", f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
        self.text += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        print("\n".join(self.text[-len(rows) - 4 :]), flush=True)
        self.write()

    def write(self) -> None:
        """Write what there is."""
        if self.args.dry:
            return
        notes = [f"{what}: {'; '.join(own) or 'nothing'}" for what, own in self._notes()]
        self.args.out.write_text("\n".join([*self.text, "", *notes]) + "\n")

    def _notes(self) -> list[tuple[str, list[str]]]:
        return [("Failed", self.failed), ("Not reached", self.missing)]

    def self_test(self) -> None:
        """Ask of each dtype what every process asks, whatever was remembered."""
        self_test._record = lambda what: None
        if self.args.dry:
            self_test.CASES = (self_test.Case("tiny", (2, 2, 5), (0, 2), (1, 2, 1)),)
        rows: list[Row] = []
        for dtype in TYPES[: 1 if self.args.dry else 3]:
            with self.part(f"self-test in {_short(dtype)}") as begin:
                if begin:
                    seconds, faults = [], []
                    for _ in range(2):  # the second time everything is compiled
                        start = time.perf_counter()
                        faults.append(
                            self_test.fault(triton_kernels, torch.device(self.device), dtype)
                        )
                        seconds.append(time.perf_counter() - start)
                    self.failed += {fault for fault in faults if fault}
                    rows.append(
                        [_short(dtype), *(f"{one:.1f}" for one in seconds), faults[-1] or "passed"]
                    )
        self.table("Self-test, seconds", "type | with compiling | again | result", rows)

    def tests(self) -> None:
        """Run the tests that need a GPU; in a dry run, collect them."""
        with self.part("tests", 60) as begin:
            if not begin:
                return
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-n",
                "0",
                "-m",
                "gpu",
                "tests/layers",
                "tests/export",
            ]
            command += ["--collect-only"] if self.args.dry else []
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            last = (
                done.stdout.strip().splitlines()[-1]
                if done.stdout.strip()
                else done.stderr.strip()[-200:]
            )
            self.text += ["", f"Tests marked gpu: {last}"]
            print(self.text[-1], flush=True)
            if done.returncode:
                raise RuntimeError(last)

    def agreement(self) -> None:
        """Compare each layer by Triton with eager float64, next to what eager has in the same
        type.
        """
        shape = (2, 8, 3, 3) if self.args.dry else (16, 64, 56, 56)
        layers: dict[str, Callable[[], nn.Module]] = {
            "BatchNormalNorm2d": lambda: BatchNormalNorm2d(shape[1], noise=0.0),
            "LayerNormalNorm2d": lambda: LayerNormalNorm2d(shape[1], noise=0.0),
            "GroupNormalNorm": lambda: GroupNormalNorm(8, shape[1], noise=0.0),
            "InstanceNormalNorm2d": lambda: InstanceNormalNorm2d(shape[1], affine=True, noise=0.0),
        }
        rows: list[Row] = []
        for name, build in layers.items():
            for dtype in TYPES[: 1 if self.args.dry else 3]:
                for layout in self.layouts:
                    what = f"{name}, {_short(dtype)}, {_short(layout)}"
                    with self.part(f"agreement of {what}") as begin:
                        if begin:
                            ours, eager = (
                                self._error(build, shape, dtype, layout, by)
                                for by in ("triton", "eager")
                            )
                            rows.append([what, f"{ours:.2g}", f"{eager:.2g}"])
                            if not ours <= 3 * eager + 1e-5:
                                self.failed.append(
                                    f"{what}: Triton is {ours:.2g} off, eager {eager:.2g}"
                                )
        self.table(
            "Largest error of output and gradients, over their scale",
            "layer | Triton | eager",
            rows,
        )

    def _error(
        self,
        build: Callable[[], nn.Module],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        layout: torch.memory_format,
        kernels: str,
    ) -> float:
        generator = torch.Generator().manual_seed(0)
        x, grad = (torch.randn(shape, generator=generator).to(self.device, dtype) for _ in range(2))
        found = []
        for name, kind in (("eager", torch.float64), (kernels, dtype)):
            os.environ["RETROFIT_KERNELS"] = name
            layer = build().to(
                self.device, torch.float64 if kind == torch.float64 else torch.float32
            )
            own = x.to(kind).contiguous(memory_format=layout).requires_grad_()
            out = layer(own)
            out.backward(grad.to(out.dtype).contiguous(memory_format=layout))
            found.append(
                [out.detach(), own.grad, *(parameter.grad for parameter in layer.parameters())]
            )
        return max(
            ((a.double() - b.double()).abs().max() / a.double().abs().max()).item()
            for a, b in zip(*found, strict=True)
            if a is not None and b is not None
        )

    def layers(self) -> None:
        """Time layers against torch's own, and against moving the memory that they must."""
        shapes = [
            ("batch", (256, 56, 56)),
            ("layer", (197, 384)),
            ("group", (256, 56, 56)),
            ("proxy", (256, 56, 56)),
        ]
        if self.args.dry:
            shapes = [
                ("batch", (4, 2, 2)),
                ("layer", (2, 8)),
                ("group", (32, 1, 2)),
                ("proxy", (4, 2, 2)),
            ]
        rows: list[Row] = []
        for kind, size in shapes:
            for dtype in TYPES[: 1 if self.args.dry else 2]:
                for layout in self.layouts[: len(size) - 1]:
                    what = f"{kind} {'x'.join(map(str, size))}, {_short(dtype)}, {_short(layout)}"
                    with self.part(f"layers: {what}") as begin:
                        if begin:
                            rows.append([what, *self._layer(kind, size, dtype, layout)])
        head = "layer | ours / torch's | quartiles | torch's / floor | ours / floor"
        self.table("Forward and backward of a layer, medians of turns", head, rows)

    def _layer(
        self, kind: str, size: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format
    ) -> Row:
        x = torch.randn((2 if self.args.dry else 64, *size), device=self.device, dtype=dtype)
        x = x.contiguous(memory_format=layout) if x.ndim == 4 else x
        grad, copy = torch.randn_like(x), torch.empty_like(x)
        x.requires_grad_()
        channels = size[-1] if kind == "layer" else size[0]
        theirs, ours, _ = contenders(kind, channels, 0.0)
        theirs, ours = (
            theirs.to(self.device, dtype),
            ours.to(self.device),
        )  # torch's group and layer norm take one type

        def floor() -> float:
            synchronize(x)
            start = time.perf_counter()
            copy.copy_(x.detach())  # two passes
            synchronize(x)
            return (time.perf_counter() - start) * PASSES / 2

        runs = {"torch": step(theirs, x, grad, "eager"), "floor": floor}
        times = measure(runs | {"triton": step(ours, x, grad, "triton")}, self.rounds)
        middle, low, high = ratio(times, "triton", "torch")
        floors = (f"{ratio(times, name, 'floor')[0]:.2f}" for name in ("torch", "triton"))
        return [f"{middle:.2f}", f"{low:.2f}-{high:.2f}", *floors]

    def steps(self) -> None:
        """Time training steps of networks against their sources', and take the peak of their
        memory.
        """
        names = (
            ("test_resnet", "test_vit") if self.args.dry else ("resnet50", "vit_small_patch16_224")
        )
        targets = ["bn.eval()", "frozen", "ln", "gn-pn", "ln-pn", "bnn"], ["lnn"]
        networks = dict(zip(names, targets, strict=True))
        rows: list[Row] = []
        for way in ("AMP, channels_last", "AMP, channels_last, torch.compile"):
            for name, targets in networks.items():
                with self.part(f"steps of {name}, {way}", 240 if "compile" in way else 30) as begin:
                    if begin:
                        rows += self._steps(name, targets, way)
        head = "network, way | target | time / source | quartiles | images/s | peak memory / source"
        self.table(f"A training step of {self._batch} images, medians of turns", head, rows)

    def _steps(self, name: str, targets: list[str], way: str) -> list[Row]:
        names = ["source", *targets]
        runs = {one: self._step(name, one, way) for one in names}
        memory = {one: self._peak(run) for one, run in runs.items()}
        times = measure(runs, self.rounds)
        rows: list[Row] = []
        for one in targets:
            middle, low, high = ratio(times, one, "source")
            of_source = f"{memory[one] / memory['source']:.2f}" if memory["source"] else ""
            speed = f"{self._batch / statistics.median(times[one]):.0f}"
            rows.append(
                [f"{name}, {way}", one, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", speed, of_source]
            )
        return rows

    def _step(self, name: str, target: str, way: str) -> Callable[[], float]:
        torch.manual_seed(0)
        network = timm.create_model(name)
        size = network.pretrained_cfg["input_size"]
        if target not in ("source", "bn.eval()"):
            network, _ = retrofit.convert(network, target, check=False)
            if target != "frozen":  # which has no strength
                retrofit.set_strength(network, 1.0)
        network = network.to(self.device).train()
        if target == "bn.eval()":
            for module in network.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        x = torch.randn(
            (2, 3, 32, 32) if self.args.dry and "vit" not in name else (self._batch, *size)
        )
        x, layout = (
            x.to(self.device),
            torch.channels_last if "channels_last" in way else torch.contiguous_format,
        )
        network, x = network.to(memory_format=layout), x.contiguous(memory_format=layout)
        labels = torch.zeros(len(x), dtype=torch.long, device=self.device)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        module = torch.compile(network, backend="aot_eager" if self.args.dry else "inductor")
        module = module if "compile" in way else network

        def run() -> float:
            os.environ.pop("RETROFIT_KERNELS", None)
            synchronize(x)
            start = time.perf_counter()
            with torch.autocast(self.device, torch.bfloat16, enabled="AMP" in way):
                loss = cross_entropy(module(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(x)
            return time.perf_counter() - start

        return run

    @property
    def _batch(self) -> int:
        return 2 if self.args.dry else 128

    def _peak(self, run: Callable[[], float]) -> int:
        """Return what a step allocates at most beyond what is there before it."""
        run()
        if self.device == "cpu":
            return 0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def throughput(self) -> None:
        """Train ResNet-50 for an epoch on made-up JPEGs by `retrofit finetune`, and by timm's
        train.py.
        """
        name, images = ("test_resnet", 8) if self.args.dry else ("resnet50", 5120)
        rows: list[Row] = []
        with tempfile.TemporaryDirectory() as place:
            data = _images(Path(place) / "data", images)
            common = [
                *("--data-dir", str(data), "--epochs", "2", "-j", str(min(8, os.cpu_count() or 1)))
            ]
            common += [
                "-b",
                str(self._batch),
                "--device",
                self.device,
                *([] if self.args.dry else ["--amp"]),
            ]
            for who, command in self._trainers(name, Path(place)).items():
                with self.part(f"throughput of {who}", 120) as begin:
                    if begin:
                        rows.append(
                            [
                                who,
                                f"{self._images_per_second(who, [sys.executable, *command, *common]):.0f}",
                            ]
                        )
        self.table(
            f"Images a second of {name}, second epoch of {images} JPEGs", "who | images/s", rows
        )

    def _trainers(self, name: str, folder: Path) -> dict[str, list[str]]:
        converted = folder / f"{name}-bnn.safetensors"
        network, _ = retrofit.convert(timm.create_model(name, num_classes=2), "bnn", check=False)
        retrofit.save(network, converted)
        finetune = ["-m", "retrofit", "finetune"]
        trainers = {
            "retrofit finetune": [
                *finetune,
                name,
                "--num-classes",
                "2",
                "--json",
                "-o",
                str(folder / "source"),
            ],
            "retrofit finetune, bnn": [
                *finetune,
                str(converted),
                "--json",
                "-o",
                str(folder / "bnn"),
            ],
        }
        if self.args.timm_train:
            options = ["--model", name, "--num-classes", "2", "--output", str(folder / "timm")]
            trainers["timm's train.py"] = [self.args.timm_train, *options]
        return trainers

    def _images_per_second(self, who: str, command: list[str]) -> float:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])
        if who.startswith("retrofit"):
            return float(json.loads(done.stdout)["last"]["images_per_second"])
        return float(re.findall(r"\(\s*[\d.]+s,\s*([\d.]+)/s\)", done.stdout + done.stderr)[-1])


def _images(folder: Path, count: int) -> Path:
    """Fill a folder of two classes, for training and for validation, with random JPEGs."""
    generator = torch.Generator().manual_seed(0)
    for split, number in (("train", count), ("validation", 8)):
        for n in range(number):
            pixels = torch.randint(256, (8, 8, 3), generator=generator, dtype=torch.uint8).numpy()
            file = folder / split / str(n % 2) / f"{n}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((256, 256)).save(file)
    return folder


def _short(value: object) -> str:
    return str(value).removeprefix("torch.").removesuffix("_format")


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
        choices=PARTS,
        default=PARTS,
        metavar="PART",
        help=f"of {', '.join(PARTS)}",
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
        return full(args.train, args.test, args.minutes)
    day = Day(args)
    for part in args.only:
        with day.part(part, 0.0):
            getattr(day, part)()
        day.write()
    for line in (
        *(f"failed: {one}" for one in day.failed),
        *(f"not reached: {one}" for one in day.missing),
    ):
        print(line)
    sys.exit(1 if day.failed else 0)


if __name__ == "__main__":
    main()
