"""Running the command line inside the test's process, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from retrofit.cli import main

Run = Callable[..., Result]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RETROFIT_DEBUG", raising=False)
    return folder


@pytest.fixture
def run(here: Path) -> Run:
    """Run a command line, given as words."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


def complaint(result: Result) -> str:
    """Return the error line; what else was written must not be an error, a traceback or on stdout."""
    assert result.stdout == ""
    *others, last = result.stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert "; " in last
    assert not any("Traceback" in line or line.startswith("error") for line in others)
    return last


def done(result: Result) -> Result:
    """Return what a command answered that did what it was to do."""
    assert result.exit_code == 0, result.stderr
    return result
