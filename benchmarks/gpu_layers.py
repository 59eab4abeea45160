"""The parts of gpu.py that look at layers: whether their kernels are right, and what they cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gpu_profile import busy_milliseconds, kernel_times, profiled
from gpu_report import Report, Row, Sizes, short
from layers import Plain, measure, ratio, step, synchronize
from torch import Tensor, nn

import retrofit
from retrofit.layers import (
    BatchNormalNorm2d,
    GroupNormalNorm,
    InstanceNormalNorm2d,
    LayerNormalNorm,
    LayerNormalNorm2d,
)
from retrofit.layers.kernels import self_test, triton_plan
from retrofit.layers.kernels import triton as triton_kernels

# Passes over memory that forward and backward need: read x, write y; read x and y's gradient,
# write x's
PASSES = 5


@dataclass(frozen=True)
class Contest:
    """A layer of ours, and what it stands in for.

    Attributes:
        name: What the table calls it.
        size: Shape of a sample.
        theirs: Builds torch's layer.
        ours: Builds the layer.
        formulas: Builds the paper's formulas as they read, left to autograd, where there are any.
    """

    name: str
    size: tuple[int, ...]
    theirs: Callable[[], nn.Module]
    ours: Callable[[], nn.Module]
    formulas: Callable[[], nn.Module] | None = None


def converted(to: str, channels: int, strength: float = 1.0) -> nn.Module:
    """Return the layers that a target makes of a BatchNorm with statistics and its ReLU."""
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    network, _ = retrofit.convert(nn.Sequential(norm, nn.ReLU()), to, check=False)
    if to != "frozen":  # which has no strength
        retrofit.set_strength(network, strength)
    return network


def _contests(sizes: Sizes) -> list[Contest]:
    channels = sizes.image[0]
    features = sizes.tokens[1]
    targets = [
        Contest(
            f"{to} and ReLU",
            sizes.image,
            lambda: nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()),
            lambda to=to: converted(to, channels),  # type: ignore[misc]
        )
        for to in ("frozen", "ln", "gn", "ln-pn", "gn-pn")
    ]
    return [
        Contest(
            "bnn",
            sizes.image,
            lambda: nn.BatchNorm2d(channels),
            lambda: BatchNormalNorm2d(channels, noise=0.0),
            lambda: Plain(channels, (0, 2, 3), 0, 0.0),
        ),
        Contest(
            "lnn",
            sizes.tokens,
            lambda: nn.LayerNorm(features),
            lambda: LayerNormalNorm(features, noise=0.0),
            lambda: Plain(features, (2,), 0, 0.0),
        ),
        Contest(
            "gnn",
            sizes.image,
            lambda: nn.GroupNorm(32, channels),
            lambda: GroupNormalNorm(32, channels, noise=0.0),
            lambda: Plain(channels, (2, 3, 4), 32, 0.0),
        ),
        *targets,
    ]


def run_self_test(report: Report, sizes: Sizes) -> None:
    """Ask of each type what every process asks, whatever was remembered."""
    self_test._record = lambda what: None
    device = torch.device(sizes.device)
    if sizes.device == "cpu":
        self_test.CASES = (self_test.Case("tiny", (2, 2, 5), (0, 2), (1, 2, 1)),)
    rows: list[Row] = []
    for dtype in sizes.types:
        with report.part(f"self-test in {short(dtype)}") as is_time:
            if not is_time:
                continue
            # The second time everything is compiled
            first, _ = _self_test_seconds(device, dtype)
            again, fault = _self_test_seconds(device, dtype)
            if fault:
                report.fail(fault)
            rows.append([short(dtype), f"{first:.1f}", f"{again:.1f}", fault or "passed"])
    report.table("Self-test, seconds", "type | with compiling | again | result", rows)


def _self_test_seconds(device: torch.device, dtype: torch.dtype) -> tuple[float, str | None]:
    start = time.perf_counter()
    fault = self_test.fault(triton_kernels, device, dtype)
    return time.perf_counter() - start, fault


def compare_with_float64(report: Report, sizes: Sizes) -> None:
    """Compare each layer by Triton with eager float64, next to what eager has in the same type."""
    channels = sizes.errors_of[1]
    layers: dict[str, Callable[[], nn.Module]] = {
        "BatchNormalNorm2d": lambda: BatchNormalNorm2d(channels, noise=0.0),
        "LayerNormalNorm2d": lambda: LayerNormalNorm2d(channels, noise=0.0),
        "GroupNormalNorm": lambda: GroupNormalNorm(8, channels, noise=0.0),
        "InstanceNormalNorm2d": lambda: InstanceNormalNorm2d(channels, affine=True, noise=0.0),
        "frozen and ReLU": lambda: converted("frozen", channels),
        "ln and ReLU": lambda: converted("ln", channels),
        "ln and ReLU, strength 0.5": lambda: converted("ln", channels, 0.5),
        "gn and ReLU": lambda: converted("gn", channels),
        "ln-pn": lambda: converted("ln-pn", channels),
    }
    rows: list[Row] = []
    for name, build in layers.items():
        for dtype in sizes.types:
            for layout in sizes.layouts:
                what = f"{name}, {short(dtype)}, {short(layout)}"
                with report.part(f"agreement of {what}") as is_time:
                    if not is_time:
                        continue
                    ours = _largest_error(build, sizes, dtype, layout, "triton")
                    eager = _largest_error(build, sizes, dtype, layout, "eager")
                    rows.append([what, f"{ours:.2g}", f"{eager:.2g}"])
                    if not ours <= 3 * eager + 1e-5:
                        report.fail(f"{what}: Triton is {ours:.2g} off, eager {eager:.2g}")
    title = "Largest error of output and gradients, over their scale"
    report.table(title, "layer | Triton | eager", rows)


def _largest_error(
    build: Callable[[], nn.Module],
    sizes: Sizes,
    dtype: torch.dtype,
    layout: torch.memory_format,
    kernels: str,
) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes.errors_of, generator=generator).to(sizes.device, dtype)
    grad = torch.randn(sizes.errors_of, generator=generator).to(sizes.device, dtype)
    x = x.contiguous(memory_format=layout)
    grad = grad.contiguous(memory_format=layout)
    torch.manual_seed(0)
    layer = build().to(sizes.device)
    exact = _results(layer, x.double(), grad.double(), "eager")
    found = _results(layer.float(), x, grad, kernels)
    return max(
        ((ours.double() - right).abs().max() / right.abs().max()).item()
        for ours, right in zip(found, exact, strict=True)
    )


def _results(layer: nn.Module, x: Tensor, grad: Tensor, kernels: str) -> list[Tensor]:
    """Return a training step's output, and its gradients by the input and the parameters."""
    if x.dtype == torch.float64:
        layer = layer.double()
    x = x.requires_grad_()
    with _kernels(kernels):
        out = layer(x)
        gradients = torch.autograd.grad(out, [x, *layer.parameters()], grad.to(out.dtype))
    return [out.detach(), *gradients]


@contextmanager
def _kernels(name: str) -> Iterator[None]:
    os.environ["RETROFIT_KERNELS"] = name
    try:
        yield
    finally:
        del os.environ["RETROFIT_KERNELS"]


def time_layers(report: Report, sizes: Sizes) -> None:
    """Time layers against torch's own, against what moving the memory takes, and replayed from a
    CUDA graph.
    """
    rows: list[Row] = []
    for contest in _contests(sizes):
        for dtype in sizes.types[:2]:
            for layout in sizes.layouts[: len(contest.size) - 1]:
                shape = "x".join(map(str, contest.size))
                what = f"{contest.name} {shape}, {short(dtype)}, {short(layout)}"
                with report.part(f"layers: {what}", 20) as is_time:
                    if is_time:
                        rows.append([what, *_times(contest, sizes, dtype, layout)])
    head = "layer | ours / torch's | quartiles | torch's / floor | ours / floor "
    head += "| ours / torch's, CUDA graphs | formulas / torch's"
    report.table("Forward and backward of a layer, medians of turns", head, rows)


def _times(contest: Contest, sizes: Sizes, dtype: torch.dtype, layout: torch.memory_format) -> Row:
    x = torch.randn((sizes.layer_batch, *contest.size), device=sizes.device, dtype=dtype)
    if x.ndim == 4:
        x = x.contiguous(memory_format=layout)
    grad = torch.randn_like(x)
    copy = torch.empty_like(x)
    x.requires_grad_()
    # torch's group and layer norm take one type
    theirs = contest.theirs().to(sizes.device, dtype)
    ours = contest.ours().to(sizes.device)

    def floor() -> float:
        synchronize(x)
        start = time.perf_counter()
        copy.copy_(x.detach())  # two passes
        synchronize(x)
        return (time.perf_counter() - start) * PASSES / 2

    runs = {
        "torch": step(theirs, x, grad, "eager"),
        "floor": floor,
        "triton": step(ours, x, grad, "triton"),
    }
    if contest.formulas is not None:
        runs["formulas"] = step(contest.formulas().to(sizes.device), x, grad, "eager")
    if sizes.device == "cuda":
        runs["torch, graph"] = _replayed(theirs, x, grad, "eager")
        runs["triton, graph"] = _replayed(ours, x, grad, "triton")
    times = measure(runs, sizes.rounds, sizes.warm_up)

    def median(name: str, to: str) -> str:
        return f"{ratio(times, name, to)[0]:.2f}" if name in times else ""

    middle, low, high = ratio(times, "triton", "torch")
    return [
        f"{middle:.2f}",
        f"{low:.2f}-{high:.2f}",
        median("torch", "floor"),
        median("triton", "floor"),
        median("triton, graph", "torch, graph"),
        median("formulas", "torch"),
    ]


def _replayed(layer: nn.Module, x: Tensor, grad: Tensor, kernels: str) -> Callable[[], float]:
    """Capture a forward and backward; return what replays it, and the seconds that takes."""
    graph = torch.cuda.CUDAGraph()
    tensors = [x, *layer.parameters()]
    with _kernels(kernels):
        # Compiled, tested and allocated for before anything is captured
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                torch.autograd.grad(layer(x), tensors, grad)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            torch.autograd.grad(layer(x), tensors, grad)

    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return run


def try_tiles(report: Report, sizes: Sizes) -> None:
    """Run `bnn` in bfloat16 with other tiles than the plan's, and profile its kernels."""
    chosen = triton_plan.TILE, triton_plan.COLUMNS
    rows: list[Row] = []
    try:
        for layout in sizes.layouts:
            for tile in sizes.tiles:
                for columns in sizes.columns:
                    what = f"tiles: {short(layout)}, {tile}, {columns}"
                    with report.part(what, 20) as is_time:
                        if is_time:
                            _set_tiles(tile, columns)
                            mark = " (chosen)" if (tile, columns) == chosen else ""
                            times = _tile_times(sizes, layout)
                            rows.append([short(layout), f"{tile}{mark}", columns, *times])
    finally:
        _set_tiles(*chosen)
    head = "layout | elements of a tile | columns | kernels, us | slowest kernel | us"
    report.table("Tiles of bnn, bfloat16", head, rows)


def _set_tiles(tile: int, columns: int) -> None:
    triton_plan.TILE = tile
    triton_plan.COLUMNS = columns
    triton_plan.plan_of.cache_clear()


def _tile_times(sizes: Sizes, layout: torch.memory_format) -> Row:
    shape = sizes.layer_batch, *sizes.image
    x = torch.randn(shape, device=sizes.device, dtype=sizes.types[-1])
    x = x.contiguous(memory_format=layout)
    grad = torch.randn_like(x)
    layer = BatchNormalNorm2d(sizes.image[0], noise=0.0).to(sizes.device)
    run = step(layer, x.requires_grad_(), grad, "triton")
    kernels = kernel_times(profiled(run, sizes), sizes)
    slowest = kernels[0]
    total = 1e3 * busy_milliseconds(kernels)
    return [f"{total:.0f}", slowest.name, f"{1e3 * slowest.milliseconds:.0f}"]
