"""The library of the C++ files: read from the cache folder, or built there, or in a temporary folder where that fails.

It is built for the instruction set that torch reports. Its name holds a hash of what it was made from and one of its
own content: a machine that has it needs no compiler, and one that is damaged is built again. One process builds while
others that need the same library wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from retrofit.layers import power_transform

_log = logging.getLogger(__name__)
_SOURCES = [Path(__file__).with_name(name) for name in ("normality.cpp", "channelwise.cpp", "vectors.h")]
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
_CONSTANTS = tuple(f"-D{name}={getattr(power_transform, name)}" for name in ("MIN_CURVATURE", "LOG_STRETCH", "TINY"))
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-DWIDTH=16")
_INSTRUCTIONS = {"AVX2": ("-mavx2", "-mfma", "-DWIDTH=8"), "AVX512": _AVX512}
_LIMIT = 170.0  # seconds to build, which takes about ten
_PATIENCE = 180.0  # seconds: longer than what another process does under the lock


class UnavailableError(RuntimeError):
    """There is no library and none can be had; the message says why, in a few words."""


def load() -> ctypes.CDLL:
    """Load the library, built if this machine has none yet; an `UnavailableError` says why there can be none."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        raise UnavailableError("they are built on Linux with glibc only")
    instructions = _INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ("-DWIDTH=4",))
    options = (*_FLAGS, *_CONSTANTS, *instructions)
    made_from = repr((options, platform.machine(), os.environ.get("CXX"))).encode()
    name = f"kernels-{_hash(made_from + b''.join(file.read_bytes() for file in _SOURCES))}"
    try:
        folder = cache_folder()
        if (library := _find(folder, name)) is None:
            with locked(folder):
                library = _find(folder, name) or _build(folder, name, options)
        return ctypes.CDLL(str(library))
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{error.cmd[0]} took more than {_LIMIT:.0f} s") from None
    except (OSError, UnavailableError) as error:
        fault = error
    try:
        with tempfile.TemporaryDirectory(prefix="retrofit-") as private:
            opened = ctypes.CDLL(str(_build(Path(private), name, options)))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"they cannot be built and loaded in a temporary folder ({error})") from error
    _log.warning("the C++ kernels are built anew by each process: %s", fault)
    return opened


def cache_folder() -> Path:
    """Return `retrofit` under XDG_CACHE_HOME or ~/.cache, made if it is missing, for what is built or tested once on a
    machine. An OSError says that it cannot be made, or that others than this user and root may write to it or exchange
    it.
    """
    place = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "retrofit"
    if not place.is_absolute():
        raise OSError(f"{place} is not an absolute path; set XDG_CACHE_HOME")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = place.resolve()
    for each in (place, *place.parents):
        status = each.stat()
        sticky = each != place and status.st_mode & stat.S_ISVTX  # as /tmp: others may add names, not change mine
        if status.st_uid not in (os.geteuid(), 0):
            raise OSError(f"{each} belongs to another user; set XDG_CACHE_HOME")
        if status.st_mode & 0o022 and not sticky:
            raise OSError(f"others may write to {each}; set XDG_CACHE_HOME")
    return place


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, one process at a time; go on without it where a stopped process holds it for ever."""
    from retrofit.utils.files import acquire, release  # fcntl is not on every platform that imports this module

    end = time.monotonic() + _PATIENCE
    while not (held := acquire(folder / "lock")) and time.monotonic() < end:
        time.sleep(0.05)
    try:
        yield
    finally:
        if held:
            release(folder / "lock")


def _find(folder: Path, name: str) -> Path | None:
    """Return the library called `name` whose content is what its own name says; remove any that is damaged."""
    for file in folder.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):
            if file.stem == f"{name}-{_hash(file.read_bytes())}":
                return file
            file.unlink()
    return None


def _build(folder: Path, name: str, options: tuple[str, ...]) -> Path:
    """Build the library; if it can be loaded it appears in `folder`, whole."""
    from retrofit.utils.files import flush, temporary_folder

    compiler = _compiler()
    _log.warning("building the C++ kernels, once on this machine; this takes about ten seconds")
    with temporary_folder(folder / name) as aside:
        built = aside / "kernels.so"
        _compile(aside, *compiler, *options, *map(str, _SOURCES[:-1]), "-o", str(built))
        built.chmod(0o700)
        ctypes.CDLL(str(built))  # an OSError if that is no library, or none may be loaded from here
        flush(built)  # so that the name stands for the whole content whatever happens
        return built.replace(folder / f"{name}-{_hash(built.read_bytes())}.so")


def _compiler() -> list[str]:
    """Return the command of CXX, which may have arguments, or of the first compiler there is."""
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named) or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]
    except ValueError as error:
        raise UnavailableError(f"CXX={named} is not a command ({error})") from error
    if not command:
        raise UnavailableError("no C++ compiler was found; install g++")
    if shutil.which(command[0]) is None:
        raise UnavailableError(f"CXX={named} is not there")
    return command


def _compile(aside: Path, *command: str) -> None:
    """Run a compiler whose temporary files go `aside`, in a session of its own so that its children end with it."""
    environment, stdin, stderr = {**os.environ, "TMPDIR": str(aside)}, subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdin=stdin, stderr=stderr, env=environment, start_new_session=True) as process:
        try:
            _, output = process.communicate(timeout=_LIMIT)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        message = output.decode(errors="replace").strip()
        _log.debug("%s said: %s", command[0], message)
        raise UnavailableError(f"{command[0]} failed: {(message.splitlines() or ['no message'])[0][:200]}")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
