"""Files and folders that appear whole or not at all."""

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

from retrofit.errors import RetrofitError

_OF_THE_PLACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
_OF_THE_PLACE |= {errno.ENAMETOOLONG, errno.EIO}
_LOCK = "lock"
# the name, in a temporary folder, of what is replaced: it goes back if nothing took its place
OLD = "old"

# the files that this process has locked, with their descriptors
_locks: dict[Path, int] = {}


def ensure_writable(path: str | Path, force: bool = False) -> Path:
    """Check, before any long work, that a file may be written at `path`; with `force` it may exist.

    Returned is the path with symbolic links resolved, so that a link is written through and not
    replaced. A RetrofitError says that `path` is a folder or a device, exists, or lies in a folder
    that is missing or read-only.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    # whose name may be too long to look it up
    with writing(path):
        if target.exists() and not target.is_file():
            raise RetrofitError(f"{path} is a folder or a device; name a file")
    if target.exists() and not force:
        raise RetrofitError(f"{path} exists; pass `force=True` to replace it")
    if not target.parent.is_dir():
        raise RetrofitError(f"the folder {target.parent} does not exist; create it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise RetrofitError(f"the folder {target.parent} is read-only; choose another one")
    return target


@contextmanager
def atomic_write(path: str | Path, force: bool = False) -> Iterator[Path]:
    """Yield an empty file of the same name in a hidden folder beside `path`, and rename it when the
    body ends.

    If the body fails, or the process is interrupted or terminated, the folder is removed. A killed
    process may leave a hidden `.NAME.*.tmp`, which the next writer of `path` removes, but never a
    partial `path`. A RetrofitError says what `ensure_writable` does, or that the disk is full or
    the folder cannot be written to.
    """
    target = ensure_writable(path, force)
    with writing(path), temporary_folder(target) as folder:
        temporary = folder / target.name
        temporary.touch()
        mode = (
            temporary.stat().st_mode
        )  # as the user's umask has it; safetensors makes its files private
        yield temporary
        temporary.chmod(mode)
        flush(temporary)
        # another process may have finished the same file meanwhile
        ensure_writable(path, force)
        os.replace(temporary, target)
        flush(target.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to fill, and rename it to `folder` when the body ends.

    What stood there is replaced; it is back if the body fails, or the process is interrupted or
    terminated. A RetrofitError says that the disk is full or that the place cannot be written to.
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
        folder = Path(
            tempfile.mkdtemp(prefix=f".{final.name[:200]}.", suffix=".tmp", dir=final.parent)
        )
        try:
            acquire(folder / _LOCK)
            yield folder
        finally:
            _discard(folder, final)
            release(folder / _LOCK)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove the temporary folders in `folder` of processes that are gone: for the file `name`, or
    for any if None.
    """
    pattern = re.compile(
        rf"\.({'.+' if name is None else re.escape(name[:200])})\.[a-z0-9_]{{8}}\.tmp"
    )
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = pattern.fullmatch(path.name)
        if match and (path / _LOCK).exists() and acquire(path / _LOCK):
            _discard(path, folder / match[1])
            release(path / _LOCK)


def _discard(folder: Path, final: Path) -> None:
    """Remove a temporary folder; what it was about to replace goes back."""
    if (folder / OLD).exists() and not final.exists():
        (folder / OLD).rename(final)
    shutil.rmtree(folder, ignore_errors=True)


def acquire(path: Path) -> bool:
    """Lock a file, made if it is not there, until `release` or the end of the process, however it
    ends.

    Return whether it was free; where the file system has no locks it counts as free. The processes
    that this one forks, which may outlive it, do not hold the lock. An OSError says that the file
    cannot be made.
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
        with suppress(FileNotFoundError):
            if (
                os.fstat(descriptor).st_ino == path.stat().st_ino
            ):  # else its last owner has removed it meanwhile
                _locks[path] = descriptor
                return True
        os.close(descriptor)
    return False


def release(path: Path) -> None:
    """Remove a file that `acquire` locked, and the lock."""
    if (descriptor := _locks.pop(path.absolute(), None)) is not None:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def flush(path: Path) -> None:
    """Have the system put a file's content, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {
            errno.EINVAL,
            errno.ENOTSUP,
        }:  # what file systems that cannot sync a folder answer
            raise
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn errors of writing `path` into RetrofitError: the disk is full, or the place cannot be
    written to.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_THE_PLACE:
            raise
        why = os.strerror(error.errno)
        raise RetrofitError(
            f"cannot write {path} ({why}); free space or choose another place"
        ) from error


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
