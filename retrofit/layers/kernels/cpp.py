"""The formulas in C++ (normality.cpp), built by the machine's own compiler the first time that they are needed.

The library is run by as many threads as torch uses. It takes float32 and bfloat16 tensors on the CPU whose
sets lie regularly enough; `forward`, `backward` and `apply` hand anything else to `eager`.

Where ranks share the sets, the library runs in stages. A stage leaves parts, a row a quantity and a column a set: means
over the rank's own values. They become means over all ranks, in the order and the dtype in which `formulas` reduces
them: ranks with and without the library may mix, also where a rank has no values.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers import power_transform
from retrofit.layers.kernels import build, eager
from retrofit.layers.kernels.eager import KernelOptions
from retrofit.layers.kernels.formulas import FIELDS
from retrofit.layers.kernels.layout import Geometry, geometry_of

TYPES = (torch.float32, torch.bfloat16)
_ALL, _LAST = -1, 4  # all stages in one call; the stage of `forward` that writes
# Rows of the parts: mean and variance; five means of the Newton step, smallest and largest value; mean of y; its mean
# absolute deviation
_STAGES = slice(0, 2), slice(2, 9), slice(9, 10), slice(10, 11)
library = cache(build.load)
_SINGLE_THREADED = 2**14  # elements below which waking other threads costs more than it gains


class _COptions(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_float) for name in ("t", "eps", "factor")),
        *((name, ctypes.c_uint32) for name in ("seed0", "seed1")),
        *((name, ctypes.c_int) for name in ("noise", "threads", "stage", "half")),
    )


def forward(out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions) -> Tensor:
    """See `eager.forward`."""
    geometry = _geometry(x, options.dims, options.affine)
    if geometry is None:
        return eager.forward(out, x, weight, bias, options)
    own, group = _options(x, options), options.group
    stats = room(FIELDS, *(1 if d in options.dims else n for d, n in enumerate(x.shape)))
    tensors = out, x, floats(weight), floats(bias), stats
    if group is None:
        call("forward", geometry, own, *tensors, None)
        return stats
    parts = room(_STAGES[-1].stop, geometry.sets)
    for stage, rows in enumerate(_STAGES if own.noise else _STAGES[:2]):
        own.stage = stage
        call("forward", geometry, own, *tensors, parts)
        parts[rows] = _over_ranks(stage, parts[rows], x.numel() // geometry.sets, group)
    own.stage = _LAST
    call("forward", geometry, own, *tensors, parts)
    return stats


def backward(
    grad_x: Tensor, x: Tensor, grad: Tensor, weight: Tensor | None, stats: Tensor, options: KernelOptions
) -> Tensor:
    """See `eager.backward`."""
    geometry = _geometry(x, options.dims, options.affine)
    if geometry is None:
        return eager.backward(grad_x, x, grad, weight, stats, options)
    own = _options(x, options)
    shares = room(own.threads, 2, *options.affine).zero_()
    tensors, parts = (grad_x, shares, x, grad.to(x.dtype), floats(weight), stats), None
    if options.group is not None:
        parts, own.stage = room(5, geometry.sets), 0
        call("backward", geometry, own, *tensors, parts)
        parts, own.stage = _average(parts, x.numel() // geometry.sets, options.group), 1
    call("backward", geometry, own, *tensors, parts)
    return shares.sum(0)


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """See `eager.apply`."""
    geometry = _geometry(x, dims, tuple(constants.shape[1:]))
    if geometry is None:
        eager.apply(out, x, dims, constants)
    else:
        own = _COptions(threads=threads(x), half=x.dtype == torch.bfloat16)
        call("apply", geometry, own, out, x, constants)


@cache
def fault() -> str | None:
    """Say why there are no kernels, or return None where there are; they are looked for and built once a process."""
    try:
        library()
    except (OSError, build.UnavailableError) as error:
        return f"there are no C++ kernels: {error}"
    return None


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library, whose numbers are int64 and float; tensors, structures and None are pointers."""
    getattr(library(), name)(*map(_converted, arguments))


def _converted(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else argument


def threads(x: Tensor) -> int:
    """Return how many threads work on `x`."""
    return torch.get_num_threads() if x.numel() >= _SINGLE_THREADED else 1


def room(*shape: int) -> Tensor:
    """Return what the library writes floats to, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _over_ranks(stage: int, own: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Return what a stage of `forward` left over all ranks; `own`, (rows, sets), is over `count` values a set."""
    if stage == 0:
        (mean,) = _average(own[:1], count, group)
        apart = own[0] - mean
        offset, power = _average(torch.stack([apart, own[1] + apart * apart]), count, group)
        return torch.stack([mean + offset.nan_to_num(0.0), (power - offset * offset).clamp_min(0)])
    if stage == 1:
        extremes = power_transform.widest(own[5], own[6], group)  # first, as `formulas` does
        return torch.stack([*_average(own[:5], count, group), *extremes])
    return _average(own, count, group)


def _average(own: Tensor, count: int, group: ProcessGroup) -> Tensor:
    return power_transform.average(own * count, count, group)


def _geometry(x: Tensor, dims: tuple[int, ...], affine: tuple[int, ...]) -> Geometry | None:
    return geometry_of(tuple(x.shape), dims, affine, library().width(), True) if x.dtype in TYPES else None


def _options(x: Tensor, options: KernelOptions) -> _COptions:
    own = _COptions(options.t.item(), options.eps, threads=threads(x), stage=_ALL, half=x.dtype == torch.bfloat16)
    if options.factor is not None and options.seed is not None:
        own.noise, own.factor = 1, options.factor.item()
        own.seed0, own.seed1 = (word % 2**32 for word in options.seed.tolist())
    return own


def floats(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter as the library reads it."""
    return None if parameter is None else parameter.detach().to(torch.float32).contiguous()
