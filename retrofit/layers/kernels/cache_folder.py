"""A folder that keeps what was built or tested on this machine, and that nobody but its owner may write to."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATIENCE = 180.0  # seconds: longer than what another process does under the lock


def folder() -> Path:
    """Return `retrofit` under XDG_CACHE_HOME or ~/.cache, made if it is missing. An OSError says that it cannot be
    made, or that others than this user and root may write to it or exchange it.
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


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Hold the lock of a folder, one process at a time; go on without it where a stopped process holds it for ever."""
    from retrofit.utils.files import acquire, release  # fcntl is not on every platform that imports this module

    lock, end = place / "lock", time.monotonic() + _PATIENCE
    while not (held := acquire(lock)) and time.monotonic() < end:
        time.sleep(0.05)
    try:
        yield
    finally:
        if held:
            release(lock)
