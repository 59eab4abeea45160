"""Say on a terminal what takes long."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

_PATIENCE = 5.0


@contextmanager
def announced_if_slow(task: str, seconds: float = _PATIENCE) -> Iterator[None]:
    """Write one line to stderr if the body takes longer than some seconds; nothing where stderr is
    no terminal.
    """
    stream = sys.stderr
    if not stream.isatty():
        yield
        return

    def announce() -> None:
        print(f"{task}; large networks take minutes", file=stream, flush=True)

    timer = Timer(seconds, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
