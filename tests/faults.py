"""Faults at system calls: an exception wherever a function opens, writes, flushes, renames or
removes a file.

    for fault in faults_of(save):
        prepare()
        with injected(fault):
            save()
        assert nothing_is_lost(), fault

Nothing is patched. Python's profiler sees each call of a C function: those of `os`, the methods of
open files, and the writers of safetensors and of torch.
"""

import errno
import io
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from retrofit.errors import RetrofitError

_OF_THE_SYSTEM = {"mkdir", "open", "write", "fsync", "chmod", "lockf", "utime"}
_OF_THE_SYSTEM |= {"rename", "replace", "unlink", "remove", "rmdir", "link", "symlink", "truncate"}
_OF_FILES = {"write", "writelines", "truncate", "flush"}
# Not StringIO and BytesIO, which are no files.
_FILES = io.FileIO, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper
_NATIVE = {"serialize_file", "write_record", "write_end_of_file"}
_EVENTS = {"c_call", "c_return", "c_exception"}
# After these an interrupt leaves an open file, which the tests' warnings would report; what it
# would do to other files is what it does before the next call.
_OPENING = {"open"}


@dataclass(frozen=True)
class Fault:
    """An exception in place of a system call, or right after it.

    Attributes:
        number: Which of the function's system calls, from 0.
        call: Its name.
        error: The class of what is raised.
        after: Whether the call is made first, as an interrupt may come.
    """

    number: int
    call: str
    error: type[BaseException]
    after: bool = False

    def exception(self) -> BaseException:
        """Return the exception; a full disk for OSError."""
        if self.error is OSError:
            return OSError(errno.ENOSPC, "No space left on device")
        return self.error(f"injected at {self.call}")


def faults_of(run: Callable[[], object]) -> list[Fault]:
    """Return every fault of a function, which makes the same system calls each time.

    It runs twice: the first call may import modules and fill caches.
    """
    run()
    calls: list[str] = []

    def count(_frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and _is_system_call(function):
            calls.append(function.__name__)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    kinds = [(KeyboardInterrupt, False), (KeyboardInterrupt, True)]
    kinds += [(OSError, False), (MemoryError, False)]
    return [
        Fault(number, call, error, after)
        for number, call in enumerate(calls)
        for error, after in kinds
        if not (after and call in _OPENING)
    ]


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """Raise a fault in the body and take it, or the RetrofitError that it became, as the body's
    end.

    The body may also survive it, but an interrupt has to come out.
    """
    calls = 0
    outcome: BaseException | None = None

    def watch(_frame: Any, event: str, function: Any) -> None:
        nonlocal calls
        if event not in _EVENTS or not _is_system_call(function):
            return
        ended = event != "c_call"
        calls += not ended
        if calls == fault.number + 1 and ended == fault.after:
            # Python takes the profiler off when it raises.
            raise fault.exception()

    sys.setprofile(watch)
    try:
        yield
    except (fault.error, RetrofitError) as error:
        outcome = error
    finally:
        sys.setprofile(None)
    assert calls == fault.number + 1, f"{fault} was not reached"
    assert fault.error is not KeyboardInterrupt or isinstance(outcome, KeyboardInterrupt), fault


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes: writing stops half-way, in C++ and Rust too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _is_system_call(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name in _NATIVE:
        return True
    if isinstance(getattr(function, "__self__", None), _FILES):
        return name in _OF_FILES
    module = getattr(function, "__module__", None)
    return module in ("posix", "io", "_io", "fcntl") and name in _OF_THE_SYSTEM
