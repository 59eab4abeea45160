"""Say on a terminal what takes long."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

_PATIENCE = 5.0


@contextmanager
def announced_if_slow(task: str) -> Iterator[None]:
    """Write one line to stderr if the body takes longer than five seconds; nothing where stderr is
    no terminal.
    """
    stream = sys.stderr
    if not stream.isatty():
        yield
        return
    line = f"{task}; large networks take minutes"
    timer = Timer(_PATIENCE, print, [line], {"file": stream, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
