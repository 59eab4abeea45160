"""The kernels of normality normalization, and which of them run.

`eager`, `compiled` and `fused` (Triton) are modules with the same three functions, `forward`, `backward` and `apply`,
on tensors in a `Layout`'s view. The environment variable RETROFIT_KERNELS names one of them: eager, compile or triton.
Unset, CUDA tensors go through Triton and large CPU tensors through C++; small ones, and all where there is no compiler,
stay eager, and nothing is said. The choice depends on the tensor alone, so that a run that is resumed repeats its bits.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from retrofit.layers.kernels import compiled, eager

VARIABLE = "RETROFIT_KERNELS"
NAMES = ("eager", "compile", "triton")
LARGE = 2**13
"""Elements from which compiled kernels are worth the call, and some ten seconds of building them once a machine."""


def fits(x: Tensor) -> bool:
    """Whether `x` is a plain tensor of numbers: not one that a tracer, a compiler or a mode follows."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type in ("cpu", "cuda")
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and _get_current_dispatch_mode() is None
    )


def run(function: str, out: Tensor, *args: Any) -> Any:
    """Call `forward`, `backward` or `apply` of the kernels chosen for `out`, the first argument, which they fill.

    Raises:
        ValueError: If RETROFIT_KERNELS names no kernels.
        RuntimeError: If it names kernels that cannot run here.
    """
    name = os.environ.get(VARIABLE, "")
    if name and name not in NAMES:
        raise ValueError(f"{VARIABLE}={name} names no kernels; choose one of {', '.join(NAMES)}, or unset it")
    return getattr(_choose(name, out), function)(out, *args)


def _choose(name: str, x: Tensor) -> ModuleType:
    if name == "eager" or x.dtype == torch.float64:
        return eager
    if name == "triton" or (not name and x.is_cuda and importlib.util.find_spec("triton")):
        return _triton(x)
    if name == "compile" and not x.is_cuda:
        if not compiled.available():
            raise RuntimeError(f"{VARIABLE}=compile, but no C++ compiler works here; install g++ or unset it")
        return compiled
    large = not x.is_cuda and x.numel() >= LARGE
    return compiled if large and compiled.available() else eager


def _triton(x: Tensor) -> ModuleType:
    if not importlib.util.find_spec("triton"):
        raise RuntimeError(f"{VARIABLE}=triton, but triton is not installed; unset it or install triton")
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{VARIABLE}=triton, but the tensor is on the CPU; unset it or choose eager or compile")
    from retrofit.layers.kernels import fused

    return fused
