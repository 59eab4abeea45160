"""The kernels of normality normalization, and which of them run.

`eager`, `cpp` and `triton` are modules with the same three functions, `forward`, `backward` and
`apply`, on tensors in a `Layout`'s view. The environment variable RETROFIT_KERNELS names one of
them. Unset, CUDA tensors go through Triton and large CPU tensors through C++; small ones, and all
where neither is to be had, stay eager. On a GPU Triton's kernels run once they have passed a
self-test there. The choice depends on the tensor alone, so that a run that is resumed repeats its
bits. The log says once what was chosen for a kind of device, as a warning where it is not the
fastest.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn

from retrofit.layers.function_transforms import followed
from retrofit.layers.kernels import cpp, eager, self_test

_log = logging.getLogger(__name__)

VARIABLE = "RETROFIT_KERNELS"
NAMES = ("eager", "cpp", "triton")
_STRETCH = 32
LARGE = 2**13
"""Elements from which compiled kernels are worth the call, and some ten seconds of building them
once a machine.
"""


# What a thread tests, which is then chosen whatever the tensor
_under_test: ContextVar[ModuleType | None] = ContextVar("_under_test", default=None)


@contextlib.contextmanager
def under_test(module: ModuleType) -> Iterator[None]:
    """Choose some kernels in this thread, whether they are right or not."""
    before = _under_test.set(module)
    try:
        yield
    finally:
        _under_test.reset(before)


def fits(x: Tensor) -> bool:
    """Whether `x` is a plain tensor of numbers: not one that a tracer, a compiler, a mode or a
    derivative follows.
    """
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type in ("cpu", "cuda")
        and x.numel() > 0
        and not followed()
        and not torch._C._len_torch_dispatch_stack()
    )


def choose(x: Tensor) -> ModuleType:
    """Return the kernels for `x`.

    A ValueError says that RETROFIT_KERNELS names no kernels, a RuntimeError why those that it names
    cannot run here.
    """
    tested = _under_test.get()
    if tested is not None:
        return tested
    name = _named()
    is_small = not x.is_cuda and x.numel() < LARGE
    if name == "eager" or x.dtype not in self_test.TOLERANCES or (not name and is_small):
        return eager
    if not name:
        # said once of a CPU
        return _fastest(x.device, x.dtype if x.is_cuda else torch.float32)
    fault = _fault(name, x.device, x.dtype)
    if fault is not None:
        raise RuntimeError(f"{VARIABLE}={name}, but {fault}; unset it or choose eager")
    return _module(name)


def triton_for(x: Tensor) -> ModuleType | None:
    """Return Triton's kernels where they are chosen for `x`, else None."""
    # First, for a compiler does not follow what comes after
    if not fits(x):
        return None
    # Not asked in vain, for the answer may take a compiler's time
    possible = x.is_cuda or _under_test.get() is not None or _named() == "triton"
    return triton_kernels() if possible and choose(x).READS_STRENGTH else None


@torch.compiler.assume_constant_result
def chosen_by_compiler(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is chosen for tensors of a device and type, asked while they are compiled."""
    name = _named()
    if name not in ("", "triton") or dtype not in self_test.TOLERANCES:
        return False
    return (device.type == "cuda" or name == "triton") and _fault("triton", device, dtype) is None


def triton_kernels() -> ModuleType:
    """Return Triton's kernels."""
    return _module("triton")


def runs_cpp(x: Tensor) -> bool:
    """Whether C++ is chosen for `x` where there is a choice of it and torch operations only."""
    return x.is_cpu and _named() in ("", "cpp") and choose(x) is cpp


def should_gather(x: Tensor, stretch: int) -> bool:
    """Whether sets of many stretches of `stretch` neighbouring elements are better moved together
    before they are run: short ones leave vectors half empty. (The C++ kernels fill theirs with the
    stretches of neighbouring sets, Triton's do so with those of a power of two.)
    """
    if stretch >= _STRETCH:
        return False
    if runs_cpp(x):
        return stretch > cpp.library().width()
    return stretch & (stretch - 1) != 0 or not choose(x).READS_STRENGTH


def _named() -> str:
    name = os.environ.get(VARIABLE, "")
    if name and name not in NAMES:
        raise ValueError(
            f"{VARIABLE}={name} names no kernels; choose one of {', '.join(NAMES)}, or unset it"
        )
    return name


@cache
def _fastest(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The fastest kernels that are there and right; says what runs, and why where it is not the
    fastest of all.
    """
    name = "triton" if device.type == "cuda" else "cpp"
    fault = _fault(name, device, dtype)
    if fault is None:
        _log.info("normality layers run the %s kernels on %s", name, device.type)
        return _module(name)
    _log.warning(
        "normality layers run torch operations, many times slower, on %s: %s", device.type, fault
    )
    return eager


@cache
def _fault(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why kernels cannot run on a device, or return None where they can."""
    if name == "cpp" and device.type == "cpu":
        return cpp.fault()
    if name == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        # There, a self-test takes minutes
        return None
    if name == "cpp" or device.type != "cuda":
        return f"the tensor is on {device}"
    try:
        kernels = _module(name)
        own = kernels.fault()
        return own or self_test.fault(kernels, device, dtype)
    except ImportError as error:
        return f"triton cannot be imported ({error})"


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
