"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from retrofit.errors import RetrofitError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LOCK, _OLD = "lock", "old"  # in a temporary folder: its owner's lock, and what it replaces

_held: dict[Path, int] = {}
"""Descriptors of the files that this process has locked."""


def ensure_writable(path: str | Path, force: bool = False) -> Path:
    """Check, before any long work, that a file may be written at `path`.

    Args:
        path: The file to come.
        force: Whether an existing file may be replaced.

    Returns:
        The path with symbolic links resolved, so that a link is written through and not replaced.

    Raises:
        RetrofitError: If `path` is a folder or a device, exists (without `force`), or lies in a folder that is missing
            or read-only.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            target.lstat()
    except OSError as error:
        raise _explained(error, path) from error
    if target.is_dir():
        raise RetrofitError(f"{path} is a folder; name a file in it")
    if target.exists() and not target.is_file():
        raise RetrofitError(f"{path} is not a regular file; name another one")
    if target.exists() and not force:
        raise RetrofitError(f"{path} exists; pass `force=True` to replace it")
    if not target.parent.is_dir():
        raise RetrofitError(f"the folder {target.parent} does not exist; create it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise RetrofitError(f"the folder {target.parent} is read-only; choose another one")
    return target


@contextmanager
def atomic_write(path: str | Path, force: bool = False) -> Iterator[Path]:
    """Write a file aside and rename it when it is complete.

    The body writes to the temporary path that it is given, in a hidden folder beside `path`. When the body ends, the
    content is flushed to the disk and renamed; when the body fails, or the process is interrupted or terminated, the
    folder is removed. A killed process may leave a hidden `.NAME.*.tmp`, never a partial `path`; the next `force`
    removes it.

    Args:
        path: The final name.
        force: Whether an existing file may be replaced.

    Yields:
        The path to write to: an empty file of the same name.

    Raises:
        RetrofitError: As `ensure_writable`, and if the disk is full or the folder cannot be written to.
    """
    target = ensure_writable(path, force)
    with writing(path), aside(target) as folder:
        temporary = folder / target.name
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode  # as the user's umask has it; writers may put a private file in its place
        yield temporary
        temporary.chmod(mode)
        _flush(temporary)
        ensure_writable(path, force)  # another process may have finished the same file meanwhile
        os.replace(temporary, target)
        _flush(target.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Fill a folder aside and rename it when it is complete.

    What stood there is replaced; it is back if the body fails, or the process is interrupted or terminated.

    Args:
        folder: The final name; its parent is there and can be written to.

    Yields:
        The empty folder to fill.
    """
    final = folder.absolute()
    with aside(final) as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        if final.exists():
            final.rename(temporary / _OLD)
        new.rename(final)


@contextmanager
def aside(final: Path) -> Iterator[Path]:
    """Make a hidden folder beside a path, and remove it in the end; after a kill, the next one for that path does.

    Args:
        final: What will be written; its folder is there.
    """
    sweep(final.parent, final.name)
    with termination_unwinds():
        folder = Path(tempfile.mkdtemp(prefix=f".{final.name[:200]}.", suffix=".tmp", dir=final.parent))
        try:
            acquire(folder / _LOCK)
            yield folder
        finally:
            _discard(folder, final)
            release(folder / _LOCK)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files and folders of processes that are gone.

    Args:
        folder: Where they lie.
        name: The file or folder that they were to become; any if None.
    """
    ours = re.compile(rf"\.({'.+' if name is None else re.escape(name[:200])})\.[a-z0-9_]{{8}}\.tmp")
    for found in list(folder.iterdir()) if folder.is_dir() else []:
        if (match := ours.fullmatch(found.name)) is None:
            continue
        if not found.is_dir():  # earlier versions wrote a file
            found.unlink(missing_ok=True)
        elif (found / _LOCK).exists() and acquire(found / _LOCK):
            _discard(found, folder / match[1])
            release(found / _LOCK)


def _discard(folder: Path, final: Path) -> None:
    """Remove a temporary folder; what it was about to replace goes back."""
    if (folder / _OLD).exists() and not final.exists():
        (folder / _OLD).rename(final)
    shutil.rmtree(folder, ignore_errors=True)


def acquire(path: Path) -> bool:
    """Lock a file, made if it is not there, until `release` or the end of the process, however it ends.

    The lock is this process's alone: those that it forks, which may outlive it, do not hold it.

    Returns:
        Whether it was free. Where the file system has no locks it counts as free.

    Raises:
        OSError: If the file cannot be made.
    """
    path = path.absolute()
    while path not in _held:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                os.close(descriptor)
                return False
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:  # else its last owner has removed it meanwhile
                _held[path] = descriptor
                return True
        os.close(descriptor)
    return False


def release(path: Path) -> None:
    """Remove a file that `acquire` locked, and the lock."""
    if (descriptor := _held.pop(path.absolute(), None)) is not None:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _flush(path: Path) -> None:
    """Have the system put a file's content, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # what file systems that cannot sync a folder answer
            raise
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn errors of writing `path` into the user's words.

    Raises:
        RetrofitError: If the disk is full, or the place cannot be written to.
    """
    try:
        yield
    except OSError as error:
        raise _explained(error, path) from error


def _explained(error: OSError, path: str | Path) -> OSError | RetrofitError:
    """Turn an error of writing into the user's words; errors that name another file are not about writing `path`."""
    if error.errno in _FULL:
        return RetrofitError(f"no space left for {path}; free some or choose another folder")
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.EIO}:
        return RetrofitError(f"cannot write {path} ({os.strerror(error.errno)}); choose another place")
    return error


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Let SIGTERM unwind the stack, as Ctrl-C does, instead of ending the process on the spot."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def unwind(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
