"""A line for who waits at a terminal, and for nobody else."""

import io
import sys
import time

import pytest

from retrofit.utils import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "patience", "lines"),
    [(Terminal(), 0.0, 1), (Terminal(), 60.0, 0), (io.StringIO(), 0.0, 0)],
)
def test_what_takes_long_is_said_once_on_a_terminal(
    stream: io.StringIO, patience: float, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    with progress.announced_if_slow("tracing"):
        while lines and not stream.getvalue():
            time.sleep(0.001)
    assert stream.getvalue() == "tracing; large networks take minutes\n" * lines
