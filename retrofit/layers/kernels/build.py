"""Finding or building the library of the C++ files, and trusting no file that another user may have written.

The library is built for the instruction set that torch found and kept in the user's cache folder, under a name that
hashes what it was made from: a machine that has it needs no compiler. One process builds while others that want the
same library wait for it.
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

from retrofit.layers import lambda_estimate

_log = logging.getLogger(__name__)
_SOURCES = [Path(__file__).with_name(name) for name in ("normality.cpp", "channelwise.cpp", "vectors.h")]
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
_CONSTANTS = tuple(f"-D{name}={getattr(lambda_estimate, name)}" for name in ("MIN_CURVATURE", "LOG_STRETCH", "TINY"))
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-DWIDTH=16")
_INSTRUCTIONS = {"AVX2": ("-mavx2", "-mfma", "-DWIDTH=8"), "AVX512": _AVX512}
_LIMIT = 180.0  # seconds to build, which takes about ten, or to wait for another process that does


class UnavailableError(RuntimeError):
    """There is no library and none can be had; the message says why, in a few words."""


def load() -> ctypes.CDLL:
    """Load the library, built if this machine has none yet.

    Raises:
        UnavailableError: If the platform is not one that it is built for, there is no compiler, or it fails.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        raise UnavailableError("they are built on Linux with glibc only")
    instructions = _INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ("-DWIDTH=4",))
    made_from = repr((_FLAGS, _CONSTANTS, instructions, platform.machine(), os.environ.get("CXX"))).encode()
    made_from += b"".join(file.read_bytes() for file in _SOURCES)
    name = f"kernels-{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    folder = cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="retrofit-") as private:
            return _open(_build(Path(private), name, instructions))
    if not _trusted_file(folder / name):
        with _lock(folder / "lock", folder / name):
            if not _trusted_file(folder / name):
                _build(folder, name, instructions)
    return _open(folder / name)


def cache_folder() -> Path | None:
    """Return the folder of built libraries, or None where there is none that only this user may write to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()).absolute() / "retrofit"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        fault = _fault(folder.resolve(strict=True))
        if fault is None and not os.access(folder, os.W_OK):
            fault = f"{folder} cannot be written to"
    except (OSError, RuntimeError) as error:
        fault = str(error)
    if fault is not None:
        _log.warning("the C++ kernels are built anew by each process, because %s; set XDG_CACHE_HOME", fault)
        return None
    return folder


def _fault(folder: Path) -> str | None:
    """Say what is wrong with a folder that code is loaded from: who else could put or exchange files there."""
    for place in (folder, *folder.parents):
        found = place.stat()
        if found.st_uid != os.geteuid() and (place == folder or found.st_uid != 0):
            return f"{place} belongs to another user"
        sticky = place != folder and found.st_mode & stat.S_ISVTX  # as /tmp: others may add names, not change mine
        if found.st_mode & 0o022 and not sticky:
            return f"others may write to {place}"
    return None


def _trusted_file(file: Path) -> bool:
    """Whether `file` is there.

    Raises:
        UnavailableError: If it is not a plain file of this user's that nobody else may write to.
    """
    try:
        found = file.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UnavailableError(f"{file} is not a file that only you can write to; remove it")
    return True


@contextlib.contextmanager
def _lock(file: Path, wanted: Path) -> Iterator[None]:
    """Hold a lock that one process at a time has, or go on without it once `wanted` is there.

    Raises:
        UnavailableError: If another process holds it for too long.
    """
    import fcntl  # not on every platform that imports this module

    with file.open("w") as handle:
        end = time.monotonic() + _LIMIT
        while not wanted.exists():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UnavailableError(f"another process holds {file} for over {_LIMIT:.0f} s") from None
                time.sleep(0.05)
            except OSError:  # a file system without locks: whoever is last replaces what the others built
                break
        yield


def _build(folder: Path, name: str, instructions: tuple[str, ...]) -> Path:
    """Build the library in `folder`, where it appears whole or not at all."""
    compiler = _compiler()
    _log.warning("building the C++ kernels, once on this machine; this takes about ten seconds")
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        built = Path(aside) / name
        command = [*compiler, *_FLAGS, *_CONSTANTS, *instructions, *map(str, _SOURCES[:-1]), "-o", str(built)]
        # In a session of its own, so that the compiler's own children end with it.
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                _, said = process.communicate(timeout=_LIMIT)
            except subprocess.TimeoutExpired:
                raise UnavailableError(f"{compiler[0]} took more than {_LIMIT:.0f} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            _log.debug("%s said: %s", compiler[0], said)
            raise UnavailableError(f"{compiler[0]} failed: {(said.strip().splitlines() or ['no message'])[0][:200]}")
        built.chmod(0o700)
        built.replace(folder / name)
    return folder / name


def _compiler() -> list[str]:
    """Return the command of CXX, which may have arguments, or of the first compiler there is.

    Raises:
        UnavailableError: If there is none.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise UnavailableError(f"CXX={os.environ['CXX']} is not there")
        return asked
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise UnavailableError("no C++ compiler was found; install g++")


def _open(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise UnavailableError(f"{file} cannot be loaded ({error}); remove it") from error
