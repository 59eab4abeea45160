"""Files that users name, opened without ever waiting; files and folders that appear whole or not
at all.
"""

import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from retrofit.errors import RetrofitError
from retrofit.utils.text import one_line, printable

# Errors of a place, which the user can mend; any other is a fault of the program.
_OF_THE_PLACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
_OF_THE_PLACE |= {errno.ENAMETOOLONG, errno.EIO}
# What file systems that cannot sync a folder answer.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP}
_LOCK = "lock"
# The name, in a temporary folder, of what is replaced: it goes back if nothing took its place.
OLD = "old"

# The name of a temporary folder; the group is that of what it is to become.
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp", re.DOTALL)

# Without O_NONBLOCK, opening a pipe waits until somebody writes to it.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# The files that this process has locked, with their descriptors.
_locks: dict[Path, int] = {}


class UnwritableError(RetrofitError):
    """A place that cannot be written to; `problem` says which, and why."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; free space or choose another place")
        self.problem = problem


def open_file(
    path: str | Path,
    noun: str = "file",
    *,
    most: int | None = None,
    advice: str = "check the path",
) -> BinaryIO:
    """Open a regular file that the user names, for reading; a pipe or a device is refused at once.

    Args:
        path: The file, or a link to it.
        noun: What the file is, for messages: "checkpoint file", "class map".
        most: The largest size in bytes; None for any.
        advice: What an error says to do.

    Returns:
        The open file, for the caller to close.

    Raises:
        RetrofitError: If nothing lies at `path`, or it is no regular file, is larger than `most`,
            or cannot be opened.
    """
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RetrofitError(f"there is no {noun} at {printable(path)}; {advice}") from error
    # A name with a null byte is a ValueError; a socket, or a device without a driver, an OSError.
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise RetrofitError(
            f"cannot open the {noun} {printable(path, 300)} ({why}); {advice}"
        ) from error
    try:
        status = os.fstat(descriptor)
        problem = _refusal(status, most)
        if problem:
            raise RetrofitError(f"{printable(path)} {problem}; {advice}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refusal(status: os.stat_result, most: int | None) -> str:
    """Say why what was opened is not read; empty if it is."""
    if stat.S_ISDIR(status.st_mode):
        return "is a folder"
    if not stat.S_ISREG(status.st_mode):
        return "is a pipe or a device"
    if most is not None and status.st_size > most:
        return f"has {status.st_size:,} bytes, more than {most:,}"
    return ""


def ensure_readable(
    path: str | Path, noun: str = "file", *, advice: str = "check the path"
) -> Path:
    """Check a file that the user names, as `open_file` does, for a library that opens it by path.

    Raises:
        RetrofitError: As for `open_file`.
    """
    open_file(path, noun, advice=advice).close()
    return Path(path)


def read_text(
    path: str | Path,
    noun: str = "file",
    *,
    most: int = 2**20,
    advice: str = "check the path",
) -> str:
    """Read a text in UTF-8 that the user names, of at most `most` bytes; a byte-order mark is left
    out.

    Raises:
        RetrofitError: As for `open_file`, or if the file is not UTF-8 or cannot be read.
    """
    try:
        with open_file(path, noun, most=most, advice=advice) as file:
            return file.read().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise RetrofitError(
            f"cannot read the {noun} {printable(path)} ({one_line(error)}); {advice}"
        ) from error


def ensure_writable(path: str | Path, force: bool = False) -> Path:
    """Check, before any long work, that a file may be written at `path`.

    Args:
        path: The file to write.
        force: Whether it may exist.

    Returns:
        The path with symbolic links resolved, so that a link is written through and not replaced.

    Raises:
        RetrofitError: If `path` is a folder or a device, exists, or lies in a folder that is missing
            or read-only.
    """
    target = Path(os.path.realpath(path))
    # The name may be too long to be looked up.
    with writing(path):
        exists = target.exists()
    if exists:
        if not target.is_file():
            raise RetrofitError(f"{path} is a folder or a device; name a file")
        if not force:
            raise RetrofitError(f"{path} exists; pass `force=True` to replace it")
    folder = target.parent
    if not folder.is_dir():
        raise RetrofitError(f"the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RetrofitError(f"the folder {folder} is read-only; choose another one")
    return target


@contextmanager
def atomic_write(path: str | Path, force: bool = False) -> Iterator[Path]:
    """Yield an empty file of the same name in a hidden folder beside `path`, and rename it when the
    body ends.

    If the body fails, or the process is interrupted or terminated, the folder is removed. A killed
    process may leave a hidden `.NAME.*.tmp`, which the next writer of `path` removes, but never a
    partial `path`.

    Raises:
        RetrofitError: As for `ensure_writable`, or if the disk is full or the folder cannot be
            written to.
    """
    target = ensure_writable(path, force)
    with writing(path), temporary_folder(target) as folder:
        temporary = folder / target.name
        temporary.touch()
        # As the user's umask has it; safetensors makes its files private.
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        flush(temporary)
        # Another process may have finished the same file meanwhile.
        ensure_writable(path, force)
        os.replace(temporary, target)
        flush(target.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to fill, and rename it to `folder` when the body ends.

    What stood there is replaced; it is back if the body fails, or the process is interrupted or
    terminated.

    Raises:
        RetrofitError: If the disk is full, or the place cannot be written to.
    """
    final = folder.absolute()
    with writing(folder), temporary_folder(final) as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        if final.exists():
            final.rename(temporary / OLD)
        new.rename(final)


@contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """Make a hidden folder beside `final` and remove it in the end; after a kill, the next one for
    that path does.
    """
    sweep(final.parent, final.name)
    with termination_unwinds():
        prefix = f".{final.name[:200]}."
        name = tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=final.parent)
        folder = Path(name)
        try:
            acquire(folder / _LOCK)
            yield folder
        finally:
            try:
                _discard(folder, final)
            finally:
                release(folder / _LOCK)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove the temporary folders in `folder` of processes that are gone: for the file `name`, or
    for any if None.
    """
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        final = final_name(path)
        if final is None or not path.is_dir():
            continue
        if name is not None and final != name[:200]:
            continue
        if _is_abandoned(path):
            _discard(path, folder / final)
            release(path / _LOCK)


def final_name(path: Path) -> str | None:
    """Return what a temporary folder is to become; None for any other path."""
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return None
    return match[1]


def _is_abandoned(folder: Path) -> bool:
    """Tell whether the process that made a temporary folder is gone; then its lock is ours."""
    if (folder / _LOCK).exists():
        return acquire(folder / _LOCK)
    # The lock is the first file made. A folder that holds others without it was half removed.
    return any(folder.iterdir())


def _discard(folder: Path, final: Path) -> None:
    """Remove a temporary folder; what it was about to replace goes back."""
    if (folder / OLD).exists() and not final.exists():
        (folder / OLD).rename(final)
    shutil.rmtree(folder, ignore_errors=True)


def acquire(path: Path) -> bool:
    """Lock a file until `release` or the end of the process, however it ends.

    The file is made if it is not there. The processes that this one forks, which may outlive it, do
    not hold the lock.

    Returns:
        Whether it was free; where the file system has no locks it counts as free.

    Raises:
        OSError: If the file cannot be made.
    """
    path = path.absolute()
    while path not in _locks:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                os.close(descriptor)
                return False
        # Its last owner may have removed it between the opening and the lock: then try again.
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                _locks[path] = descriptor
                return True
        os.close(descriptor)
    return False


def release(path: Path) -> None:
    """Remove a file that `acquire` locked, and the lock."""
    descriptor = _locks.pop(path.absolute(), None)
    if descriptor is None:
        return
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def flush(path: Path) -> None:
    """Have the system put a file's content, or a folder's entries, on the disk.

    Raises:
        OSError: If the disk cannot take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn errors of writing `path` into RetrofitError.

    Raises:
        UnwritableError: If the disk is full, or the place cannot be written to.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_THE_PLACE:
            raise
        why = os.strerror(error.errno)
        raise UnwritableError(f"cannot write {path} ({why})") from error


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Let SIGTERM unwind the stack, as Ctrl-C does, instead of ending the process on the spot."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
