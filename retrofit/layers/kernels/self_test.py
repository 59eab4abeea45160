"""Whether kernels are right on a device, tested before a network uses them there.

They run on a few small tensors, in both memory formats, where a set has a program of its own and
where programs share it, and are compared with the formulas on the same device. They run twice: the
bits must repeat. What passed is remembered in the cache folder, by device, versions and source.
"""

import contextlib
import copy
import importlib.metadata
import logging
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retrofit.layers.kernels import cpp, eager
from retrofit.layers.kernels.kernel_options import KernelOptions, Strength
from retrofit.layers.kernels.layout import layout_of

_log = logging.getLogger(__name__)
# Of a tensor's largest value, for each dtype that compiled kernels take
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


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
    try:
        wrong = _first_difference(kernels, device, dtype)
    # Whatever compiling or launching raises
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:300]}"
    if wrong is not None:
        return f"the {what} fail their self-test ({wrong})"
    if record is not None:
        with contextlib.suppress(OSError):
            record.write_text(f"{what}\n")
    return None


def _label(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> str:
    """Return words for kernels, their dtype, and the device with what it is capable of."""
    where = device.type
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        where = f"{torch.cuda.get_device_name(device)}, capability {capability}"
    name = kernels.__name__.rpartition(".")[2]
    return f"{name} kernels for {str(dtype).removeprefix('torch.')} on {where}"


def _first_difference(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say which result of which case or layer is wrong; return None if none is."""
    for case in CASES:
        wrong = compare(kernels, case, device, dtype)
        if wrong is not None:
            return f"{case.name}: {wrong}"
    return compare_maps(kernels, device, dtype) if hasattr(kernels, "migrate") else None


@torch.no_grad()
def compare(
    kernels: ModuleType, case: Case, device: torch.device, dtype: torch.dtype, runs: int = 2
) -> str | None:
    """Say which result differs from the formulas', or from run to run; return None if none does."""
    with torch.autocast(device.type, enabled=False):
        expected = _results(eager, case, device, dtype)
        found = [_results(kernels, case, device, dtype) for _ in range(runs)]
    return _difference(expected, found, dtype)


def compare_maps(
    kernels: ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (3, 6, 19, 40),
    runs: int = 2,
) -> str | None:
    """Say which result of layers by the kernels differs from torch's operations in float64."""
    for name, layer in _layers(shape[1]).items():
        generator = torch.Generator("cpu").manual_seed(0)
        _random(layer, generator)
        exact = copy.deepcopy(layer).double()
        x = torch.randn(shape, generator=generator) + 0.5
        grad = torch.randn(shape, generator=generator)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x, grad = (v.to(device, dtype, memory_format=memory_format) for v in (x, grad))
            expected = _gradients(eager, exact, x.double(), grad)
            found = [_gradients(kernels, layer, x, grad) for _ in range(runs)]
            wrong = _difference(expected, found, dtype)
            if wrong is not None:
                return f"{name}: {wrong}"
    return None


def _difference(
    expected: dict[str, Tensor], runs: list[dict[str, Tensor]], dtype: torch.dtype
) -> str | None:
    """Say which result of some runs differs from what it should be, or from run to run."""
    for name, reference in expected.items():
        first, *others = (run[name] for run in runs)
        exact = reference.double()
        error = ((first.double() - exact).abs().max() / exact.abs().max()).item()
        # NaN is not
        if not error <= TOLERANCES[dtype]:
            return f"{name} is {error:.1e} of its scale off"
        if not all(torch.equal(first, other) for other in others):
            return f"{name} is not the same twice"
    return None


def _layers(channels: int) -> dict[str, nn.Module]:
    """Return each layer that has maps by a scale and a shift, by its name."""
    from retrofit.layers.frozen_batch_norm import FrozenBatchNorm
    from retrofit.layers.migrated_norm import MigratedGroupNorm, MigratedGroupNormAct
    from retrofit.layers.proxy_norm import ProxyNorm

    fused = MigratedGroupNormAct(2, channels, strength=0.7)
    proxy = ProxyNorm(nn.SiLU(), channels, norm=fused)
    fused.act = proxy
    layers: dict[str, nn.Module] = {
        "frozen": FrozenBatchNorm(channels),
        "migrated": MigratedGroupNorm(2, channels, strength=0.7),
        "migrated and proxy": fused,
    }
    activations = nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardswish(), nn.SiLU(), nn.GELU()
    for activation in activations:
        restore = isinstance(activation, nn.ReLU)
        norm = FrozenBatchNorm(channels)
        proxy = ProxyNorm(activation, channels, norm=norm, restore=restore)
        # With it, gamma and beta are parameters of the layer
        proxy.add_module("source", norm)
        layers[f"proxy of {activation}"] = proxy
    return layers


def _random(layer: nn.Module, generator: torch.Generator) -> None:
    """Give a layer parameters and statistics that are not the default."""
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.is_floating_point() and tensor.ndim == 1:
            value = torch.rand(tensor.shape, generator=generator) * 0.5
            tensor.data.copy_(value + (0.0 if name.endswith(("bias", "mean")) else 0.75))


def _gradients(kernels: ModuleType, layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return a layer's output and gradients, by some kernels."""
    from retrofit.layers.kernels import under_test

    layer.to(x.device)
    leaf = x.detach().requires_grad_()
    with under_test(kernels), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        out = layer(leaf)
        gradients = torch.autograd.grad(out, [leaf, *layer.parameters()], grad.to(out.dtype))
    numbered = {f"gradient {number}": gradient for number, gradient in enumerate(gradients)}
    return {"the output": out.detach(), **numbered}


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
    weight, bias = numbers(2, *case.affine).to(device)
    strength = Strength(torch.tensor(0.8, dtype=torch.float32, device=device))
    layout = layout_of(case.shape, x.stride(), case.dims, torch.Size(case.affine))
    options = KernelOptions(layout, strength, eps=1e-5)
    if case.noise:
        seed = torch.tensor([11, -7], dtype=torch.int32, device=device)
        options = options._replace(xi=0.625, seed=seed)

    out, grad_x, applied = (torch.empty_like(x) for _ in range(3))
    stats = kernels.forward(out, x, weight, bias, options)
    grad_weight, grad_bias = kernels.backward(grad_x, x, grad, weight, stats, options)
    results = {
        "the output": out,
        "the gradient of x": grad_x,
        "the gradient of gamma": grad_weight,
        "the gradient of beta": grad_bias,
    }
    if layout.affine == layout.kept:
        constants = numbers(5, *case.affine).abs() + 0.1
        kernels.apply(applied, x, layout, constants.to(device))
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
