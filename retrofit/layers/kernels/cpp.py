"""The formulas in C++ (normality.cpp), built by the machine's own compiler the first time they are wanted.

The library is run by as many threads as torch uses. It takes float32 and bfloat16 tensors on the CPU whose
sets lie regularly enough; `forward`, `backward` and `apply` hand anything else to `eager`.

Where ranks share the sets, the library runs in stages. A stage leaves parts, a row a quantity and a column a set: means
over the rank's own values. They become means over all ranks, in the order and the dtype in which `formulas` reduces
them: ranks with and without the library may mix, also where a rank has no values.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers import distributed
from retrofit.layers.kernels import build, eager
from retrofit.layers.kernels.build import UnavailableError
from retrofit.layers.kernels.formulas import FIELDS
from retrofit.layers.kernels.layout import Axis, Geometry, geometry_of, side_by_side

TYPES = (torch.float32, torch.bfloat16)
_ALL, _LAST = -1, 4  # all stages in one call; the stage of `forward` that writes
# Rows of the parts: mean and variance; five means of the Newton step, smallest and largest value; mean of y; its mean
# absolute deviation
_STAGES = slice(0, 2), slice(2, 9), slice(9, 10), slice(10, 11)
_SINGLE_THREADED = 2**14  # elements below which waking other threads costs more than it gains


class _CAxis(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in Axis._fields)


class _CGeometry(ctypes.Structure):
    _fields_ = (
        *((name, _CAxis) for name in ("outer", "inner", "runs", "lane")),
        *((name, ctypes.c_int64) for name in ("affine_size", "share")),
    )


class _COptions(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_float) for name in ("t", "eps", "factor")),
        *((name, ctypes.c_uint32) for name in ("seed0", "seed1")),
        *((name, ctypes.c_int) for name in ("noise", "threads", "stage")),
    )


def forward(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    t: Tensor,
    dims: tuple[int, ...],
    eps: float,
    factor: Tensor,
    seed: Tensor | None,
    group: ProcessGroup | None,
) -> Tensor:
    """See `eager.forward`."""
    geometry = _broadcast_geometry(x, dims, weight, bias)
    if geometry is None:
        return eager.forward(out, x, weight, bias, t, dims, eps, factor, seed, group)
    stats = _room(FIELDS, *(1 if d in dims else n for d, n in enumerate(x.shape)))
    options = _options(x, t.item(), eps, factor, seed)
    tensors = out, x, _floats(weight), _floats(bias), stats
    if group is None:
        _call("forward", x, geometry, options, *tensors, None)
        return stats
    parts = _room(_STAGES[-1].stop, geometry.sets)
    for options.stage, rows in enumerate(_STAGES if seed is not None else _STAGES[:2]):
        _call("forward", x, geometry, options, *tensors, parts)
        parts[rows] = _over_ranks(options.stage, parts[rows], x.numel() // geometry.sets, group)
    options.stage = _LAST
    _call("forward", x, geometry, options, *tensors, parts)
    return stats


def backward(
    grad_x: Tensor,
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    t: Tensor,
    stats: Tensor,
    dims: tuple[int, ...],
    factor: Tensor,
    seed: Tensor | None,
    affine: tuple[int, ...],
    group: ProcessGroup | None,
) -> Tensor:
    """See `eager.backward`."""
    geometry = _geometry(x, dims, affine)
    if geometry is None:
        return eager.backward(grad_x, x, grad, weight, t, stats, dims, factor, seed, affine, group)
    options = _options(x, t.item(), 0.0, factor, seed)
    shares = _room(options.threads, 2, *affine).zero_()
    tensors = grad_x, shares, x, grad.to(x.dtype), _floats(weight), stats
    if group is None:
        _call("backward", x, geometry, options, *tensors, None)
    else:
        parts, options.stage = _room(5, geometry.sets), 0
        _call("backward", x, geometry, options, *tensors, parts)
        parts, options.stage = _average(parts, x.numel() // geometry.sets, group), 1
        _call("backward", x, geometry, options, *tensors, parts)
    return shares.sum(0)


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """See `eager.apply`."""
    geometry = _broadcast_geometry(x, dims, constants[0])
    if geometry is None:
        eager.apply(out, x, dims, constants)
        return
    _call("apply", x, geometry, _options(x, 0.0, 0.0, None, None), out, x, constants)


@cache
def fault() -> str | None:
    """Say why there are no kernels, or return None where there are; they are looked for and built once a process."""
    try:
        library()
    except (OSError, UnavailableError) as error:
        return str(error)
    return None


def _over_ranks(stage: int, own: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Return what a stage of `forward` left over all ranks; `own`, (rows, sets), is over `count` values a set."""
    if stage == 0:
        (mean,) = _average(own[:1], count, group)
        apart = own[0] - mean
        offset, power = _average(torch.stack([apart, own[1] + apart * apart]), count, group)
        return torch.stack([mean + offset.nan_to_num(0.0), (power - offset * offset).clamp_min(0)])
    if stage == 1:
        extremes = distributed.widest(own[5], own[6], group)  # first, as `formulas` does
        return torch.stack([*_average(own[:5], count, group), *extremes])
    return _average(own, count, group)


def _average(own: Tensor, count: int, group: ProcessGroup) -> Tensor:
    return distributed.average(own * count, count, group)


def _broadcast_geometry(x: Tensor, dims: tuple[int, ...], *parameters: Tensor | None) -> Geometry | None:
    affine = next((tuple(p.shape) for p in parameters if p is not None), (1,) * x.ndim)
    return _geometry(x, dims, affine)


def _geometry(x: Tensor, dims: tuple[int, ...], affine: tuple[int, ...]) -> Geometry | None:
    width = library().width()
    geometry = geometry_of(tuple(x.shape), dims, affine, width) if x.dtype in TYPES else None
    return None if geometry is None else side_by_side(geometry, width)


def _options(x: Tensor, t: float, eps: float, factor: Tensor | None, seed: Tensor | None) -> _COptions:
    words = (0, 0) if seed is None else (word % 2**32 for word in seed.tolist())
    return _COptions(t, eps, 0.0 if factor is None else factor.item(), *words, seed is not None, threads(x), _ALL)


def threads(x: Tensor) -> int:
    """Return how many threads work on `x`."""
    return torch.get_num_threads() if x.numel() >= _SINGLE_THREADED else 1


def _floats(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach().to(torch.float32).contiguous()


def _room(*shape: int) -> Tensor:
    """Return what the library writes floats to, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _call(name: str, x: Tensor, geometry: Geometry, options: _COptions, *tensors: Tensor | None) -> None:
    pointers = (ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors)
    half = x.dtype == torch.bfloat16
    getattr(library(), name)(int(half), int(geometry.columns), _reference(geometry), ctypes.byref(options), *pointers)


@lru_cache(maxsize=1024)
def _reference(geometry: Geometry) -> Any:
    _, *axes, affine_size, share = geometry
    return ctypes.byref(_CGeometry(*(_CAxis(*axis) for axis in axes), affine_size, share))


@cache
def library() -> Any:
    """Return the loaded library; see `build.load`."""
    return build.load()
