"""torch's exporters print and warn, and wrap errors in errors: keep from the user what is not theirs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO

from retrofit.utils.text import with_class


@contextmanager
def silence() -> Iterator[None]:
    """Keep an exporter's warnings, log lines and prints from the user: a network that it fails on, it prints whole."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def cause_of(error: BaseException) -> str:
    """Return in one line what an error comes from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return with_class(error).rstrip(".")
