"""The command line as a real process: signals and closed pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import heed_signals

pytestmark = pytest.mark.slow
RETROFIT = [sys.executable, "-m", "retrofit"]


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    words = [*RETROFIT, "convert", "resnet152", "--to", "bnn"]
    pipes = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heed_signals}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("weights: RANDOM")  # the check of the source comes next
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == []


def test_a_closed_pipe_is_no_error_of_ours(tmp_path: Path, environment: dict[str, str]) -> None:
    words = [*RETROFIT, "inspect", "test_resnet", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
