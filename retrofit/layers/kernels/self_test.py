"""Whether kernels are right on a device, tested before a network uses them there.

They run on a few small tensors, in both memory formats, where a set has a program of its own and
where programs share it, and are compared with the formulas on the same device. They run twice: the
bits must repeat. What passed is remembered in the cache folder, by device, versions and source.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from retrofit.layers.kernels import cpp, eager
from retrofit.layers.kernels.eager import KernelOptions, Strength
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
    Case("tokens", (5, 1100), (1,), (1, 1100)),
    Case("groups, contiguous", (2, 2, 3, 450), (2, 3), (1, 2, 3, 1)),
    Case("groups, channels_last", (2, 450, 2, 3), (1, 3), (1, 1, 2, 3)),
    Case("channels that programs share, contiguous", (3, 2, 8000), (0, 2), (1, 2, 1)),
    Case("channels that programs share, channels_last", (4000, 19), (0,), (1, 19)),
)


def fault(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what is wrong with `kernels` on a device for a dtype, or return None where nothing is."""
    where = f"{device.type}, capability {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, capability {torch.cuda.get_device_capability(device)}"
    what = f"{kernels.__name__.rpartition('.')[2]} kernels for {str(dtype).removeprefix('torch.')} on {where}"
    record = _record(what)
    if record is not None and record.exists():
        return None
    _log.warning("testing the %s, once on this machine; compiling them may take a minute", what)
    for case in CASES:
        try:
            wrong = compare(kernels, case, device, dtype)
        # whatever compiling or launching may raise
        except Exception as error:
            wrong = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"
        if wrong:
            return f"the {what} fail their self-test ({case.name}: {wrong})"
    if record is not None:
        with contextlib.suppress(OSError):
            record.write_text(f"{what}\n")
    return None


@torch.no_grad()
def compare(
    kernels: ModuleType, case: Case, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Say which result differs from the formulas', or from run to run; return None if none does."""
    with torch.autocast(device.type, enabled=False):
        expected, first, second = (
            _results(each, case, device, dtype) for each in (eager, kernels, kernels)
        )
    for name, reference in expected.items():
        error = (
            (first[name].float() - reference.float()).abs().max() / reference.abs().max().float()
        ).item()
        # NaN is not
        if not error <= TOLERANCES[dtype]:
            return f"{name} is {error:.1e} of its scale off"
        if not torch.equal(first[name], second[name]):
            return f"{name} is not the same twice"
    return None


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
        options = options._replace(noise=0.625, seed=seed)

    out, grad_x, applied = (torch.empty_like(x) for _ in range(3))
    stats = kernels.forward(out, x, weight, bias, options)
    grad_weight, grad_bias = kernels.backward(grad_x, x, grad, weight, stats, options)
    results = {"the output": out, "the gradient of x": grad_x}
    results |= {"the gradient of gamma": grad_weight, "the gradient of beta": grad_bias}
    if all(case.affine[d] == 1 for d in case.dims):
        mean, rstd, change = (
            numbers(*case.affine) + 3,
            numbers(*case.affine).abs() + 0.1,
            numbers(*case.affine),
        )
        constants = torch.stack([mean, rstd, change, weight.cpu(), bias.cpu()]).to(device)
        kernels.apply(applied, x, case.dims, constants)
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
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    versions = (
        torch.__version__,
        [one.version for one in importlib.metadata.distributions(name="triton")],
    )
    made_from = repr((what, versions, [file.read_text() for file in sources]))
    return folder / f"passed-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
