"""A GPU in one command: are the Triton kernels right on a real device, what do they cost, and what is missing?

    python benchmarks/gpu.py [--minutes 9] [--train train.tar --test test.tar]
    python benchmarks/gpu.py --dry

In this order, until the minutes are over: the tests marked gpu; every layer by Triton against float64, in three types;
layers against torch's own and against what the memory's bandwidth allows; training steps of networks, with peak memory;
ResNet-18 from scratch. What failed and what was not reached stands at the end of the file, and the exit status is 1 if
anything failed. --dry goes through the same code on the CPU, in Triton's interpreter, at tiny sizes, and records
nothing: what it prints says whether the script runs, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if "--dry" in sys.argv:  # before Triton is imported: it decides then
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import timm
import torch
from evidence_data import cifar, digits, still
from layers import contenders, machine, measure, ratio, step, synchronize
from reproduce import full
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrofit
from retrofit.layers import BatchNormalNorm2d, GroupNormalNorm, InstanceNormalNorm2d, LayerNormalNorm2d

ROOT = Path(__file__).parents[1]
TYPES = (torch.float32, torch.bfloat16, torch.float16)
PASSES = 5  # over memory that forward and backward need: read x, write y; read x and y's gradient, write x's
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
        """Give whether there are so many seconds left; what fails inside is noted, and the rest goes on."""
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

    def tests(self) -> None:
        """Run the tests that need a GPU; in a dry run, collect them."""
        with self.part("tests", 60) as begin:
            if not begin:
                return
            command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/layers", "tests/export"]
            command += ["--collect-only"] if self.args.dry else []
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
            self.text += ["", f"Tests marked gpu: {last}"]
            print(self.text[-1], flush=True)
            if done.returncode:
                raise RuntimeError(last)

    def agreement(self) -> None:
        """Compare each layer by Triton with eager float64, next to what eager has in the same type."""
        shape = (2, 8, 3, 3) if self.args.dry else (16, 64, 56, 56)
        layers: dict[str, Callable[[], nn.Module]] = {
            "BatchNormalNorm2d": lambda: BatchNormalNorm2d(shape[1], noise=0.0),
            "LayerNormalNorm2d": lambda: LayerNormalNorm2d(shape[1], noise=0.0),
            "GroupNormalNorm": lambda: GroupNormalNorm(8, shape[1], noise=0.0),
            "InstanceNormalNorm2d": lambda: InstanceNormalNorm2d(shape[1], affine=True, noise=0.0),
        }
        rows: list[Row] = []
        for name, build in layers.items():
            for dtype in TYPES:
                for layout in self.layouts:
                    what = f"{name}, {_short(dtype)}, {_short(layout)}"
                    with self.part(f"agreement of {what}") as begin:
                        if begin:
                            by = {one: self._error(build, shape, dtype, layout, one) for one in ("triton", "eager")}
                            rows.append([what, *(f"{value:.2g}" for value in by.values())])
                            if by["triton"] > 3 * by["eager"] + 1e-5:
                                self.failed.append(f"{what} is {by['triton']:.2g} off, eager {by['eager']:.2g}")
        self.table("Largest error of output and gradients, over their scale", "layer | Triton | eager", rows)

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
            layer = build().to(self.device, torch.float64 if kind == torch.float64 else torch.float32)
            own = x.to(kind).contiguous(memory_format=layout).requires_grad_()
            out = layer(own)
            out.backward(grad.to(out.dtype).contiguous(memory_format=layout))
            found.append([out.detach(), own.grad, *(parameter.grad for parameter in layer.parameters())])
        return max(
            ((a.double() - b.double()).abs().max() / a.double().abs().max()).item()
            for a, b in zip(*found, strict=True)
            if a is not None and b is not None
        )

    def layers(self) -> None:
        """Time layers against torch's own, and against reading and writing the memory that they must."""
        shapes = [("batch", (256, 56, 56)), ("layer", (197, 384)), ("group", (256, 56, 56)), ("proxy", (256, 56, 56))]
        if self.args.dry:
            shapes = [("batch", (4, 2, 2)), ("layer", (2, 8)), ("group", (32, 1, 2)), ("proxy", (4, 2, 2))]
        rows: list[Row] = []
        for kind, size in shapes:
            for dtype in TYPES[: 1 if self.args.dry else 2]:
                for layout in self.layouts[: len(size) - 1]:
                    what = f"{kind} {'x'.join(map(str, size))}, {_short(dtype)}, {_short(layout)}"
                    with self.part(f"layers: {what}") as begin:
                        if begin:
                            rows.append([what, *self._layer(kind, size, dtype, layout)])
        head = "layer | Triton / torch | quartiles | eager / torch | torch / floor | Triton / floor"
        self.table("Forward and backward of a layer, medians of turns", head, rows)

    def _layer(self, kind: str, size: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> Row:
        x = torch.randn((2 if self.args.dry else 64, *size), device=self.device, dtype=dtype)
        x = x.contiguous(memory_format=layout) if x.ndim == 4 else x
        grad, copy = torch.randn_like(x), torch.empty_like(x)
        x.requires_grad_()
        channels = size[-1] if kind == "layer" else size[0]
        theirs, ours = (layer.to(self.device) for layer in contenders(kind, channels, 0.0)[:2])

        def floor() -> float:
            synchronize(x)
            start = time.perf_counter()
            copy.copy_(x.detach())  # two passes
            synchronize(x)
            return (time.perf_counter() - start) * PASSES / 2

        runs = {"torch": step(theirs, x, grad, "eager"), "floor": floor, "triton": step(ours, x, grad, "triton")}
        times = measure(runs | {"eager": step(ours, x, grad, "eager")}, self.rounds)
        middle, low, high = ratio(times, "triton", "torch")
        others = [ratio(times, *pair)[0] for pair in (("eager", "torch"), ("torch", "floor"), ("triton", "floor"))]
        return [f"{middle:.2f}", f"{low:.2f}-{high:.2f}", *(f"{value:.2f}" for value in others)]

    def steps(self) -> None:
        """Time training steps of networks against their sources', and take the peak of their memory."""
        networks = {"resnet50": ["bnn", "gn-pn", "ln-pn"], "convnext_tiny": ["lnn"], "vit_small_patch16_224": ["lnn"]}
        if self.args.dry:
            networks = {"test_resnet": ["bnn", "gn-pn", "ln-pn"], "test_convnext": ["lnn"], "test_vit": ["lnn"]}
        rows: list[Row] = []
        for way in ("AMP", "float32", "AMP, channels_last", "AMP, torch.compile"):
            compiled = "compile" in way
            for name, targets in networks.items():
                if compiled and name != next(iter(networks)):
                    continue
                with self.part(f"steps of {name}, {way}", 150 if compiled else 20) as begin:
                    if begin:
                        rows += self._steps(name, targets, way)
        head = "network, way | target | time / source | quartiles | peak memory / source"
        self.table("A training step, medians of turns", head, rows)

    def _steps(self, name: str, targets: list[str], way: str) -> list[Row]:
        names = ["source", *targets]
        runs = {one: self._step(name, one, way) for one in names}
        memory = {one: self._peak(run) for one, run in runs.items()}
        times = measure(runs, self.rounds)
        rows: list[Row] = []
        for one in targets:
            middle, low, high = ratio(times, one, "source")
            of_source = f"{memory[one] / memory['source']:.2f}" if memory["source"] else ""
            rows.append([f"{name}, {way}", one, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", of_source])
        return rows

    def _step(self, name: str, target: str, way: str) -> Callable[[], float]:
        torch.manual_seed(0)
        network = timm.create_model(name)
        size = network.pretrained_cfg["input_size"]
        if target != "source":
            network, _ = retrofit.convert(network, target, check=False)
            retrofit.set_strength(network, 1.0)
        network = network.to(self.device).train()
        x = torch.randn((2, 3, 32, 32) if self.args.dry and "vit" not in name else (self._batch, *size))
        x, layout = x.to(self.device), torch.channels_last if "channels_last" in way else torch.contiguous_format
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
        return 2 if self.args.dry else 64

    def _peak(self, run: Callable[[], float]) -> int:
        """Return what a step allocates at most beyond what is there before it."""
        run()
        if self.device == "cpu":
            return 0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def scratch(self) -> None:
        """Train ResNet-18 from scratch, as it is and converted, the same pictures in the same order."""
        rows: list[Row] = []
        args = self.args
        pictures = cifar(args.train, args.test, 100) if args.train and args.test else digits()
        size, epochs = (16, 1) if args.dry else (32, 20)
        train, test = (still(part[: 64 if args.dry else None], size) for part in (pictures.pool, pictures.test))
        for target in ("source", "bnn", "ln-pn"):
            with self.part(f"ResNet-18 from scratch, {target}", 60) as begin:
                if begin:
                    rows.append([target, f"{self._train(target, train, test, epochs):.1f}"])
        what = "CIFAR-10 excerpt" if args.train and args.test else "digits"
        self.table(f"ResNet-18 from scratch, {what}, {epochs} epochs, one seed", "target | test top-1", rows)

    def _train(self, target: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], epochs: int) -> float:
        torch.manual_seed(0)
        network = timm.create_model("test_resnet" if self.args.dry else "resnet18", num_classes=10)
        if not self.args.dry:  # the stem that small pictures take
            network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        if target != "source":
            network, _ = retrofit.convert(network, target, input_size=tuple(train[0].shape[1:]), check=False)
            retrofit.set_strength(network, 1.0)
        network = network.to(self.device).train()
        images, labels = (part.to(self.device) for part in train)
        batch = 32 if self.args.dry else 128
        steps = epochs * (len(images) // batch)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        generator = torch.Generator().manual_seed(0)
        for _ in range(epochs):
            for chosen in torch.randperm(len(images), generator=generator).split(batch)[: len(images) // batch]:
                flip = torch.rand(len(chosen), generator=generator) < 0.5
                own = images[chosen.to(self.device)]
                own = torch.where(flip.to(self.device)[:, None, None, None], own.flip(3), own)
                with torch.autocast(self.device, torch.bfloat16):
                    loss = cross_entropy(network(own), labels[chosen.to(self.device)])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        network.eval()
        with torch.inference_mode():
            right = [network(part.to(self.device)).argmax(1).cpu() == own for part, own in _parts(*test)]
        return 100 * statistics.fmean(torch.cat(right).float().tolist())


def _parts(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(images.split(250), labels.split(250), strict=True)


def _short(value: object) -> str:
    return str(value).removeprefix("torch.").removesuffix("_format")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU, in the interpreter; records nothing")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--train", metavar="TAR", help="CIFAR-10 with one folder a class, for training from scratch")
    parser.add_argument("--test", metavar="TAR")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.md")
    parser.add_argument("--reproduce", action="store_true", help="go on with the papers' runs (reproduce.py) instead")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry shows that the script runs")
    if args.reproduce:
        return full(args.train, args.test, args.minutes)
    day = Day(args)
    for work in (day.tests, day.agreement, day.layers, day.steps, day.scratch):
        with day.part(work.__name__, 0.0):
            work()
        day.write()
    for line in (*(f"failed: {one}" for one in day.failed), *(f"not reached: {one}" for one in day.missing)):
        print(line)
    sys.exit(1 if day.failed else 0)


if __name__ == "__main__":
    main()
