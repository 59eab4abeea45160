"""Keep from the user what a library says while it works."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO


@contextmanager
def silence() -> Iterator[None]:
    """Keep warnings, log lines and prints from the user: an exporter prints whole a network that it fails on."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        ignored = warnings.catch_warnings(action="ignore")
        with ignored, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)
