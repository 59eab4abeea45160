"""Property tests on examples that no one chose."""

import random
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_properties_hold_on_other_examples() -> None:
    """In a process of its own, with a seed that a failure shows: pass it as --hypothesis-seed to
    repeat it.
    """
    seed = random.SystemRandom().randrange(2**32)
    run = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "hypothesis",
    ]
    seeded = ["--hypothesis-profile=wide", f"--hypothesis-seed={seed}"]
    command = [*run, *seeded, str(Path(__file__).parent)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False
    )
    assert done.returncode == 0, (
        f"--hypothesis-profile=wide --hypothesis-seed={seed}\n{done.stdout[-6000:]}"
    )
    assert " passed" in done.stdout
