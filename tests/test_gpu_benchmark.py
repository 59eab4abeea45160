"""The script for a day with a GPU goes through all of its parts where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_dry_run_reaches_its_end() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--dry", "--minutes", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    titles = [line for line in done.stdout.splitlines() if line.startswith("## ")]
    assert [title.split()[1] for title in titles] == ["Self-test,", "Largest", "Forward", "A", "Images"]
    assert "failed: " not in done.stdout
    assert "not reached: " not in done.stdout
