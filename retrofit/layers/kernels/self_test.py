"""Whether kernels are right on a device, tested before a network uses them there.

They run on a few small tensors, in both memory formats, where a set has a program of its own and
where programs share it, and are compared with the formulas on the same device. They run twice: the
bits must repeat. What passed is remembered in the cache folder, by device, versions and source.
"""

import contextlib
import copy
import importlib.metadata
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrofit.layers.kernels import cpp, eager
from retrofit.layers.kernels.kernel_options import KernelOptions, Strength
from retrofit.layers.kernels.layout import layout_of

_log = logging.getLogger(__name__)
TOLERANCES = {
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}  # of a tensor's largest value


class Case(NamedTuple):
    """A tensor in a layout's view, the dimensions of its sets, and the shape of its affine
    parameters.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    affine: tuple[int, ...]
    noise: bool = True


# with sets longer than a tile, and last tiles that are not full
CASES = (
    Case("channels, contiguous", (3, 5, 700), (0, 2), (1, 5, 1)),
    Case("channels, contiguous, without noise", (3, 5, 700), (0, 2), (1, 5, 1), noise=False),
    Case("channels, channels_last", (130, 21), (0,), (1, 21)),
    Case("positions that programs share, contiguous", (2, 150, 70), (1,), (1, 150, 1)),
    Case("tokens", (5, 1100), (1,), (1, 1100)),
    Case("short rows", (3, 4, 90), (2,), (1, 4, 1)),
    Case("groups, contiguous", (2, 2, 3, 450), (2, 3), (1, 2, 3, 1)),
    Case("groups, channels_last", (2, 450, 2, 3), (1, 3), (1, 1, 2, 3)),
    Case("long groups that programs share, contiguous", (2, 2, 3, 4500), (2, 3), (1, 2, 3, 1)),
    Case("small groups, channels_last", (2, 450, 2, 4), (1, 3), (1, 1, 2, 4)),
    Case("wide groups that programs share, channels_last", (2, 70, 2, 130), (1, 3), (1, 1, 2, 130)),
    Case("channels that programs share, contiguous", (24, 2, 800), (0, 2), (1, 2, 1)),
    Case("channels that programs share, channels_last", (4000, 19), (0,), (1, 19)),
)


def fault(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what is wrong with `kernels` on a device for a dtype, or return None where nothing is."""
    what = _label(kernels, device, dtype)
    record = _record(what)
    if record is not None and record.exists():
        return None
    _log.warning("testing the %s, once on this machine; compiling them may take a minute", what)
    for case in CASES:
        wrong = _guarded(compare, kernels, case, device, dtype)
        if wrong:
            return f"the {what} fail their self-test ({case.name}: {wrong})"
    if hasattr(kernels, "migrate"):
        wrong = _guarded(compare_maps, kernels, device, dtype)
        if wrong:
            return f"the {what} fail their self-test ({wrong})"
    if record is not None:
        with contextlib.suppress(OSError):
            record.write_text(f"{what}\n")
    return None


def _label(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> str:
    """Return words for kernels, their dtype, and the device with what it is capable of."""
    where = f"{device.type}, capability {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        where = f"{torch.cuda.get_device_name(device)}, capability {capability}"
    name = kernels.__name__.rpartition(".")[2]
    return f"{name} kernels for {str(dtype).removeprefix('torch.')} on {where}"


def _guarded(function: Any, *arguments: Any) -> str | None:
    """Return what a comparison says, or what compiling or launching raised."""
    try:
        wrong: str | None = function(*arguments)
    # Whatever that is
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        return f"{type(error).__name__}: {lines[0][:300]}"
    return wrong


@torch.no_grad()
def compare(
    kernels: ModuleType, case: Case, device: torch.device, dtype: torch.dtype, runs: int = 2
) -> str | None:
    """Say which result differs from the formulas', or from run to run; return None if none does."""
    with torch.autocast(device.type, enabled=False):
        expected = _results(eager, case, device, dtype)
        results = [_results(kernels, case, device, dtype) for _ in range(runs)]
    for name, reference in expected.items():
        wrong = _difference([result[name] for result in results], reference, dtype)
        if wrong:
            return f"{name} is {wrong}"
    return None


def _difference(results: list[Tensor], reference: Tensor, dtype: torch.dtype) -> str | None:
    """Say how the results of some runs differ from what they should be, or from each other."""
    first = results[0]
    exact = reference.double()
    error = ((first.double() - exact).abs().max() / exact.abs().max()).item()
    # NaN is not
    if not error <= TOLERANCES[dtype]:
        return f"{error:.1e} of its scale off"
    if not all(torch.equal(first, other) for other in results[1:]):
        return "not the same twice"
    return None


def compare_maps(
    kernels: ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (3, 6, 19, 40),
    runs: int = 2,
) -> str | None:
    """Say which result of layers by the kernels differs from torch's operations in float64."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for name, build in _layers(shape[1]).items():
            generator = torch.Generator("cpu").manual_seed(0)
            layer = _random(build(), generator)
            x = torch.randn(shape, generator=generator) + 0.5
            grad = torch.randn(shape, generator=generator)
            x, grad = (v.to(device, dtype, memory_format=memory_format) for v in (x, grad))
            expected = _gradients(eager, copy.deepcopy(layer).double(), x.double(), grad)
            results = [_gradients(kernels, layer, x, grad) for _ in range(runs)]
            for number, (reference, *found) in enumerate(zip(expected, *results, strict=True)):
                wrong = _difference(found, reference, dtype)
                if wrong:
                    return f"{name}: result {number} is {wrong}"
    return None


def _layers(channels: int) -> dict[str, Callable[[], nn.Module]]:
    """Return how to build each layer that has maps by a scale and a shift, by its name."""
    from retrofit.layers.frozen_batch_norm import FrozenBatchNorm
    from retrofit.layers.migrated_norm import MigratedGroupNorm, MigratedGroupNormAct
    from retrofit.layers.proxy_norm import ProxyNorm

    def fused() -> nn.Module:
        layer = MigratedGroupNormAct(2, channels, strength=0.7)
        layer.act = ProxyNorm(nn.SiLU(), channels, norm=layer)
        return layer

    def proxy(activation: nn.Module) -> nn.Module:
        restore = isinstance(activation, nn.ReLU)
        norm = FrozenBatchNorm(channels)
        return ProxyNorm(activation, channels, norm=norm, restore=restore)

    activations = nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardswish(), nn.SiLU(), nn.GELU()
    proxies = {f"proxy of {activation}": partial(proxy, activation) for activation in activations}
    return {
        "frozen": partial(FrozenBatchNorm, channels),
        "migrated": partial(MigratedGroupNorm, 2, channels, strength=0.7),
        "migrated and proxy": fused,
        **proxies,
    }


def _random(layer: Any, generator: torch.Generator) -> Any:
    """Give a layer, and the norm before it, parameters and statistics that are not the default."""
    for part in (layer, getattr(layer, "norm", None), getattr(layer, "act", None)):
        if part is None:
            continue
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if tensor.is_floating_point() and tensor.ndim == 1:
                value = torch.rand(tensor.shape, generator=generator) * 0.5
                tensor.data.copy_(value + (0.0 if name.endswith(("bias", "mean")) else 0.75))
    return layer


def _gradients(kernels: ModuleType, layer: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Return a layer's output and gradients, by some kernels."""
    from retrofit.layers.kernels import under_test

    parts = [part for part in (layer, getattr(layer, "norm", None)) if part is not None]
    for part in parts:
        part.to(x.device)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    leaf = x.detach().requires_grad_()
    with under_test(kernels), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        out = layer(leaf)
        gradients = torch.autograd.grad(out, [leaf, *parameters], grad.to(out.dtype))
    return [out.detach(), *gradients]


def _results(
    kernels: ModuleType, case: Case, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return what the kernels' three functions compute."""
    generator = torch.Generator("cpu").manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    # Skewed and away from zero, so that lambda is far from 1
    x = (0.6 * numbers(*case.shape)).exp().add(2).to(device, dtype)
    grad = numbers(*case.shape).to(device, dtype)
    weight, bias = numbers(*case.affine).to(device), numbers(*case.affine).to(device)
    strength = Strength(torch.tensor(0.8, dtype=torch.float32, device=device))
    layout = layout_of(case.shape, x.stride(), case.dims, torch.Size(case.affine))
    options = KernelOptions(layout, strength, eps=1e-5)
    if case.noise:
        seed = torch.tensor([11, -7], dtype=torch.int32, device=device)
        options = options._replace(xi=0.625, seed=seed)

    out, grad_x, applied = (torch.empty_like(x) for _ in range(3))
    stats = kernels.forward(out, x, weight, bias, options)
    grad_weight, grad_bias = kernels.backward(grad_x, x, grad, weight, stats, options)
    results = {"the output": out, "the gradient of x": grad_x}
    results |= {"the gradient of gamma": grad_weight, "the gradient of beta": grad_bias}
    if layout.affine == tuple(1 if d in case.dims else n for d, n in enumerate(case.shape)):
        mean, rstd, change = (
            numbers(*case.affine) + 3,
            numbers(*case.affine).abs() + 0.1,
            numbers(*case.affine),
        )
        constants = torch.stack([mean, rstd, change, weight.cpu(), bias.cpu()]).to(device)
        kernels.apply(applied, x, layout, constants)
        results["the output by given statistics"] = applied
    return results


def _record(what: str) -> Path | None:
    """Return the file that says that a test was passed, whether it is there or not; None where none
    can be kept.
    """
    try:
        folder = cpp.cache_folder()
    except OSError:
        return None
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    sources = [file.read_text() for file in files]
    versions = (
        torch.__version__,
        [one.version for one in importlib.metadata.distributions(name="triton")],
    )
    made_from = repr((what, versions, sources))
    return folder / f"passed-{cpp.digest(made_from.encode())}"
