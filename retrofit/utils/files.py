"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
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

    The body writes to the temporary path that it is given, in the folder of `path`. When the body ends, the content is
    flushed to the disk and renamed; when the body fails, or the process is interrupted or terminated, the temporary
    file is removed. A killed process may leave a hidden `.NAME.*.tmp`, never a partial `path`.

    Args:
        path: The final name.
        force: Whether an existing file may be replaced.

    Yields:
        The path to write to: an empty file.

    Raises:
        RetrofitError: As `ensure_writable`, and if the disk is full or the folder cannot be written to.
    """
    target = ensure_writable(path, force)
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    with termination_unwinds(), writing(path):
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            mode = temporary.stat().st_mode  # as the user's umask has it; writers may put a private file in its place
            yield temporary
            temporary.chmod(mode)
            _flush(temporary)
            ensure_writable(path, force)  # another process may have finished the same file meanwhile
            os.replace(temporary, target)
            _flush(target.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


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
    with termination_unwinds():
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name[:200]}.", suffix=".tmp", dir=final.parent))
        new, old = aside / "new", aside / "old"
        try:
            new.mkdir()
            yield new
            if final.exists():
                final.rename(old)
            new.rename(final)
        finally:
            if old.exists() and not final.exists():
                old.rename(final)
            shutil.rmtree(aside, ignore_errors=True)


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
