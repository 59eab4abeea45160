"""The formulas in C++: the library of the C++ files, built by the machine's own compiler when it is
first needed.

It is read from the cache folder, or built there, or in a temporary folder where that fails, for the
instruction set that torch reports. Its name holds a hash of what it was made from: a machine that
has it needs no compiler. One process builds, others that need the same library wait.

It is run by as many threads as torch uses. It takes float32 and bfloat16 tensors on the CPU whose
sets lie regularly enough; `forward`, `backward` and `apply` hand anything else to `eager`.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrofit.layers import power_transform
from retrofit.layers.kernels import eager
from retrofit.layers.kernels.eager import FIELDS
from retrofit.layers.kernels.kernel_options import KernelOptions
from retrofit.layers.kernels.layout import Geometry, Layout, geometry_of

_log = logging.getLogger(__name__)
_SOURCES = [
    Path(__file__).with_name(name) for name in ("normality.cpp", "channelwise.cpp", "vectors.h")
]
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
_CONSTANTS = tuple(
    f"-D{name}={getattr(power_transform, name)}"
    for name in ("MIN_CURVATURE", "LOG_STRETCH", "TINY")
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-DWIDTH=16")
_INSTRUCTIONS = {"AVX2": ("-mavx2", "-mfma", "-DWIDTH=8"), "AVX512": _AVX512}
TYPES = (torch.float32, torch.bfloat16)
# Elements below which waking other threads costs more than it gains.
_SINGLE_THREADED = 2**14


def load() -> ctypes.CDLL:
    """Load the library, built if this machine has none yet.

    Raises:
        OSError: If there can be none; says why.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        raise OSError("they are built on Linux with glibc only")
    instructions = _INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ("-DWIDTH=4",))
    options = (*_FLAGS, *_CONSTANTS, *instructions)
    made_from = repr((options, platform.machine(), os.environ.get("CXX"))).encode()
    name = f"kernels-{digest(made_from + b''.join(file.read_bytes() for file in _SOURCES))}"
    try:
        return ctypes.CDLL(str(_cached(name, options)))
    except OSError as error:
        fault = error
    with tempfile.TemporaryDirectory(prefix="retrofit-") as private:
        file = Path(private, f"{name}.so")
        _build(file, options)
        library = ctypes.CDLL(str(file))
    _log.warning("the C++ kernels are built anew by each process: %s", fault)
    return library


def _cached(name: str, options: tuple[str, ...]) -> Path:
    """Return the library in the cache folder, built there if it is missing."""
    file = cache_folder() / f"{name}.so"
    if not file.exists():
        with locked(file.parent):
            # Another process may have built it
            if not file.exists():
                _build(file, options)
    return file


def cache_folder() -> Path:
    """Return `retrofit` under XDG_CACHE_HOME or ~/.cache, made if it is missing, for what is built
    or tested once on a machine.

    Raises:
        OSError: If it cannot be made, or others than this user and root may write to it or exchange
            it.
    """
    place = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "retrofit"
    if not place.is_absolute():
        raise OSError(f"{place} is not an absolute path; set XDG_CACHE_HOME")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = place.resolve()
    for each in (place, *place.parents):
        status = each.stat()
        # As /tmp: others may add names, not change mine.
        sticky = each != place and status.st_mode & stat.S_ISVTX
        is_writable = status.st_mode & 0o022 and not sticky
        if is_writable or status.st_uid not in (os.geteuid(), 0):
            raise OSError(f"others may write to {each}; set XDG_CACHE_HOME")
    return place


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, one process at a time."""
    # It is not on every platform that imports this module.
    import fcntl

    with (folder / "lock").open("w") as lock:
        # Where the file system has no locks, several processes may build.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(file: Path, options: tuple[str, ...]) -> None:
    """Build the library; if it can be loaded, `file` appears whole."""
    compiler = _compiler()
    _log.warning("building the C++ kernels, once on this machine; this takes about ten seconds")
    with tempfile.TemporaryDirectory(dir=file.parent) as aside:
        built = Path(aside, "kernels.so")
        _compile(aside, *compiler, *options, *map(str, _SOURCES[:-1]), "-o", str(built))
        built.chmod(0o700)
        # An OSError if that is no library, or none may be loaded from here.
        ctypes.CDLL(str(built))
        built.replace(file)


def _compiler() -> list[str]:
    """Return the command of CXX, which may have arguments, or of the first compiler there is."""
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise OSError(f"CXX={named} is not a command ({error})") from None
    if not command:
        command = [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]
    if not command:
        raise OSError("no C++ compiler was found; install g++")
    return command


def _compile(aside: str, *command: str) -> None:
    """Run a compiler whose temporary files go `aside`."""
    environment = {**os.environ, "TMPDIR": aside}
    done = subprocess.run(command, stderr=subprocess.PIPE, env=environment, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace")
        first_line = message.strip().partition("\n")[0]
        raise OSError(f"{command[0]} failed: {first_line}")


def digest(content: bytes) -> str:
    """Return what stands for a content in the names of cached files."""
    return hashlib.sha256(content).hexdigest()[:16]


library = cache(load)
READS_STRENGTH = False


class _COptions(ctypes.Structure):
    """`Options` of normality.cpp, field by field: the library reads it as it is."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("step_factor", "eps", "noise_factor")),
        *((name, ctypes.c_uint32) for name in ("seed0", "seed1")),
        *((name, ctypes.c_int) for name in ("has_noise", "threads", "half")),
    )


def forward(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions
) -> Tensor:
    """See `eager.forward`."""
    geometry = _geometry(x, options.layout)
    if geometry is None:
        return eager.forward(out, x, weight, bias, options)
    c_options = _options(x, options)
    stats = room(FIELDS, geometry.sets)
    call("forward", geometry, c_options, out, x, floats(weight), floats(bias), stats)
    return stats


def backward(
    grad_x: Tensor,
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    options: KernelOptions,
) -> Tensor:
    """See `eager.backward`."""
    geometry = _geometry(x, options.layout)
    if geometry is None:
        return eager.backward(grad_x, x, grad, weight, stats, options)
    c_options = _options(x, options)
    shares = room(c_options.threads, 2, *options.layout.affine).zero_()
    call("backward", geometry, c_options, grad_x, shares, x, grad, floats(weight), stats)
    return shares.sum(0)


def apply(out: Tensor, x: Tensor, layout: Layout, constants: Tensor) -> None:
    """See `eager.apply`."""
    geometry = _geometry(x, layout)
    if geometry is None:
        eager.apply(out, x, layout, constants)
    else:
        c_options = _COptions(threads=threads(x), half=x.dtype == torch.bfloat16)
        call("apply", geometry, c_options, out, x, constants)


@cache
def fault() -> str | None:
    """Say why there are no kernels, or return None where there are; they are looked for and built
    once a process.
    """
    try:
        library()
    except OSError as error:
        return f"there are no C++ kernels: {error}"
    return None


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library, whose numbers are int64 and float; tensors, structures and
    None are pointers.
    """
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


def _geometry(x: Tensor, layout: Layout) -> Geometry | None:
    if x.dtype not in TYPES:
        return None
    return geometry_of(layout.shape, layout.dims, layout.affine, library().width())


def _options(x: Tensor, options: KernelOptions) -> _COptions:
    c_options = _COptions(
        step_factor=options.step_factor.item(),
        eps=options.eps,
        threads=threads(x),
        half=x.dtype == torch.bfloat16,
    )
    if options.seed is not None:
        c_options.has_noise = 1
        c_options.noise_factor = options.noise_factor.item()
        c_options.seed0, c_options.seed1 = (word % 2**32 for word in options.seed.tolist())
    return c_options


def floats(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter as the library reads it."""
    return None if parameter is None else parameter.detach().to(torch.float32).contiguous()
