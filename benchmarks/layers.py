"""Time and peak memory of the layers against torch's own, over the shapes of real networks.

    python benchmarks/layers.py [--device cpu|cuda] [--dtype float32|bfloat16] [--channels-last]

Each shape is timed in rounds, in which every contender takes its turn, so that whatever else the
machine does falls on all of them; the figures are medians over the rounds, and ratios are of the
same round. Contenders: torch's layer, ours with eager and with compiled kernels (Triton's on a
GPU), and the paper's formulas as they read, left to autograd. With --channels-last one more: the
compiled kernels on the same values in contiguous memory.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from retrofit.layers import BatchNormalNorm2d, GroupNormalNorm, LayerNormalNorm, ProxyNorm

WARM_UP = 3  # rounds: memory that was never touched before is slow
SHAPES = {  # network: (kind, shape at the batch size given by --batch)
    "resnet50": [
        ("batch", (64, 112, 112)),
        ("batch", (256, 56, 56)),
        ("batch", (128, 28, 28)),
        ("batch", (2048, 7, 7)),
    ],
    "efficientnet_b0": [
        ("batch", (32, 112, 112)),
        ("batch", (144, 56, 56)),
        ("batch", (672, 14, 14)),
    ],
    "vit_tiny": [("layer", (197, 192))],
    "vit_base": [("layer", (197, 768))],
    "resnet50 of groups": [("group", (256, 56, 56))],
    "resnet50, proxy": [("proxy", (256, 56, 56))],
}


class Plain(nn.Module):
    """Algorithm 1 of Eftekhari & Papyan (2025) as it reads, its gradients left to autograd."""

    def __init__(
        self, channels: int, dims: tuple[int, ...], groups: int, noise: float, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.dims, self.groups, self.noise, self.eps = dims, groups, noise, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, estimate lambda, transform, perturb, scale."""
        shape, dims = x.shape, self.dims
        if self.groups:
            x = x.unflatten(1, (self.groups, -1))
        h = (x - x.mean(dims, True)) / torch.sqrt(
            x.var(dims, correction=0, keepdim=True) + self.eps
        )
        lmbda = self.estimate(h)
        y = torch.where(h >= 0, power(h.clamp_min(0), lmbda), -power(-h.clamp_max(0), 2 - lmbda))
        if self.training and self.noise:
            scale = (y - y.mean(dims, True)).abs().mean(dims, True).detach()
            y = y + torch.randn_like(y) * scale * self.noise
        y = y.view(shape)
        affine = (1, -1, 1, 1) if y.ndim == 4 else (-1,)
        return y * self.weight.view(affine) + self.bias.view(affine)

    def estimate(self, h: Tensor) -> Tensor:
        """One Newton step from lambda = 1 on the negative log-likelihood (the paper's appendix
        D).
        """
        a, s = h.abs(), torch.where(h < 0, -1.0, 1.0)
        log = torch.log1p(a)
        d = (1 + a) * log - a
        m1, m2, m3, m4 = ((v).mean(self.dims, True) for v in (s * log, h * d, d, d * d))
        m5 = (a * ((1 + a) * log**2 - 2 * d)).mean(self.dims, True)
        return 1 - (m2 - m1) / (m5 + m4 - m3**2 - 2 * m2**2)


def power(h: Tensor, p: Tensor) -> Tensor:
    """((1 + h)^p - 1) / p, with its limit at p = 0."""
    zero = p.abs() < 1e-6
    return torch.where(
        zero, torch.log1p(h), ((1 + h) ** torch.where(zero, 1.0, p) - 1) / torch.where(zero, 1.0, p)
    )


def contenders(
    kind: str, channels: int, noise: float
) -> tuple[nn.Module, nn.Module, nn.Module | None]:
    """Torch's layer, ours, and the plain formulas where there are any."""
    if kind == "batch":
        return (
            nn.BatchNorm2d(channels),
            BatchNormalNorm2d(channels, noise=noise),
            Plain(channels, (0, 2, 3), 0, noise),
        )
    if kind == "layer":
        return (
            nn.LayerNorm(channels),
            LayerNormalNorm(channels, noise=noise),
            Plain(channels, (2,), 0, noise),
        )
    if kind == "group":
        return (
            nn.GroupNorm(32, channels),
            GroupNormalNorm(32, channels, noise=noise),
            Plain(channels, (2, 3, 4), 32, noise),
        )
    return nn.ReLU(), ProxyNorm(nn.ReLU(), channels), None


def step(layer: nn.Module, x: Tensor, grad: Tensor, kernels: str) -> Callable[[], float]:
    """A forward and backward; returns the seconds it took."""

    def run() -> float:
        os.environ["RETROFIT_KERNELS"] = kernels
        x.grad = None
        synchronize(x)
        start = time.perf_counter()
        layer(x).backward(grad)
        synchronize(x)
        return time.perf_counter() - start

    return run


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(
    runs: dict[str, Callable[[], float]], rounds: int, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Times of each contender, round by round; the first few only warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds + warm_up):
        for name, run in runs.items():
            seconds = run()
            print(f"round {n}: {name} {1e3 * seconds:.1f} ms", file=sys.stderr, flush=True)
            if n >= warm_up:
                times[name].append(seconds)
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> tuple[float, float, float]:
    """Median, lower and upper quartile of the ratio within a round."""
    ratios = [a / b for a, b in zip(times[name], times[to], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def machine(device: str) -> str:
    """The device in general words."""
    cpu = f"{torch.get_num_threads()} cores, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    return f"{name}, torch {torch.__version__.split('+')[0]}"


def append(path: Path, head: list[str], rows: list[list[object]]) -> None:
    """Append rows to a CSV file that starts with `head`."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows] if fresh else rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    args = parser.parse_args()
    fast = "triton" if args.device == "cuda" else "cpp"
    rows: list[list[object]] = []
    for network, layers in SHAPES.items():
        for kind, size in layers:
            if args.only not in network:
                continue
            shape = (args.batch, *size)
            x = torch.randn(shape, device=args.device, dtype=getattr(torch, args.dtype))
            if args.channels_last and x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            x.requires_grad_()
            grad = torch.randn_like(x)
            torchs, ours, plain = (
                layer and layer.to(args.device)
                for layer in contenders(kind, size[-1] if kind == "layer" else size[0], args.noise)
            )
            runs = {"torch": step(torchs, x, grad, "eager"), fast: step(ours, x, grad, fast)}
            other_layout = args.channels_last and x.ndim == 4
            if other_layout:
                plain_x = x.detach().contiguous().requires_grad_()
                runs[f"{fast}, contiguous"] = step(ours, plain_x, grad.contiguous(), fast)
            if kind != "proxy":
                runs |= {
                    "eager": step(ours, x, grad, "eager"),
                    "plain": step(plain, x, grad, "eager"),
                }
            times = measure(runs, args.repeats)
            for name in runs:
                middle, low, high = ratio(times, name, "torch")
                milliseconds = 1e3 * statistics.median(times[name])
                layout = "channels_last" if other_layout else "contiguous"
                row = [
                    network,
                    kind,
                    "x".join(map(str, shape)),
                    layout,
                    args.dtype,
                    args.noise,
                    name,
                ]
                rows.append(
                    [*row, f"{milliseconds:.2f}", f"{middle:.2f}", f"{low:.2f}", f"{high:.2f}"]
                )
                print(*rows[-1], sep="\t", flush=True)
            if other_layout:
                found = ratio(times, fast, f"{fast}, contiguous")
                rows.append(
                    [*row[:-1], f"{fast} / contiguous", "", *(f"{number:.2f}" for number in found)]
                )
                print(*rows[-1], sep="\t", flush=True)
            if args.out:
                head = ["network", "kind", "shape", "layout", "dtype", "noise", "kernels"]
                head += ["ms forward+backward", "ratio to torch", "quartile", "quartile", "machine"]
                append(
                    args.out,
                    head,
                    [[*row, machine(args.device)] for row in rows[-len(runs) - other_layout :]],
                )


if __name__ == "__main__":
    main()
