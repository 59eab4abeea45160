"""The kernels' own tests, over every shape and layout that they have, with the C++ built under sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
TESTS = ("tests/layers/kernels/test_channelwise.py", "tests/layers/kernels/test_agree.py")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("capability", ["default", ""], ids=["portable", "of this machine"])
def test_clean(capability: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Portable vectors load part of a vector element by element, where the sanitizer sees each of them.
    cache = tmp_path_factory.getbasetemp() / f"sanitized-{capability}"
    cache.mkdir(mode=0o700, exist_ok=True)
    loaded_first = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")  # whose exceptions the former hands on
    ]
    environment = {
        **os.environ,
        **({"ATEN_CPU_CAPABILITY": capability} if capability else {}),
        "PYTHONPATH": str(REPOSITORY),
        "CXX": f"env -u LD_PRELOAD g++ {SANITIZERS}",
        "XDG_CACHE_HOME": str(cache),
        "LD_PRELOAD": " ".join(loaded_first),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, str(Path(__file__).with_name("sanitized.py")), *TESTS, "-k", "channelwise or cpp"]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(cache.rglob("kernels-*.so"))  # what ran was what the sanitizers saw
