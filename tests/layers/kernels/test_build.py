"""The library is built once, found again without a compiler, and never loaded from where others could have put it."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from retrofit.layers import kernels
from retrofit.layers.kernels import VARIABLE, build, cpp, eager

pytestmark = pytest.mark.compiler
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def library() -> Path:
    """The library that this machine has."""
    build.load()
    folder = build.cache_folder()
    assert folder is not None
    return max(folder.glob("kernels-*.so"), key=lambda file: file.stat().st_mtime)


@pytest.fixture
def cache(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and in CXX a compiler that hands out the library after half a second."""
    home = tmp_path / "cache"
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    compiler = tmp_path / "compiler"
    hand_out = f'while [ "$1" != -o ]; do shift; done\nsleep 0.5\ncp {library} "$2"\n'
    compiler.write_text(f"#!/bin/sh\necho built >> {tmp_path}/built\n{hand_out}")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("CXX", str(compiler))
    return home


def builds(cache: Path) -> int:
    record = cache.with_name("built")
    return len(record.read_text().splitlines()) if record.exists() else 0


def test_built_once_and_private(cache: Path) -> None:
    for _ in range(2):
        assert build.load().width() in (4, 8, 16)
    assert builds(cache) == 1
    (built,) = (cache / "retrofit").glob("*.so")
    assert (cache / "retrofit").stat().st_mode & 0o777 == 0o700
    assert built.stat().st_mode & 0o022 == 0


def test_a_built_library_needs_no_compiler(cache: Path) -> None:
    build.load()
    Path(os.environ["CXX"]).unlink()
    assert build.load().width() in (4, 8, 16)


@pytest.mark.slow
def test_many_processes_build_once(cache: Path) -> None:
    command = [sys.executable, "-c", "from retrofit.layers.kernels import build; print(build.load().width())"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(3)]
    assert all(rank.communicate()[0].strip() in ("4", "8", "16") for rank in ranks)
    assert builds(cache) == 1


@pytest.mark.parametrize("place", ["retrofit", ""], ids=["the folder", "one above"])
def test_nothing_is_loaded_from_a_folder_that_others_write_to(
    place: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build.load()
    (planted,) = (cache / "retrofit").glob("*.so")
    planted.unlink()  # it is loaded: a write would change this very process
    planted.write_text("not what was built")
    (cache / place).chmod(0o777)
    assert build.load().width() in (4, 8, 16)  # from a folder of its own
    assert "others may write to" in caplog.text
    assert builds(cache) == 2
    (cache / place).chmod(0o1777)  # sticky, as /tmp: only the owner may rename what is in it
    assert (build.cache_folder() is None) == (place == "retrofit")


def test_nothing_is_loaded_from_another_users_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build.load()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert build.cache_folder() is None
    assert "belongs to another user" in caplog.text


def test_a_file_that_is_not_ours_alone_is_refused(cache: Path) -> None:
    build.load()
    (built,) = (cache / "retrofit").glob("*.so")
    built.chmod(0o770)
    with pytest.raises(build.UnavailableError, match="only you can write to; remove it"):
        build.load()
    built.rename(cache / "elsewhere.so").chmod(0o700)
    built.symlink_to(cache / "elsewhere.so")
    with pytest.raises(build.UnavailableError, match="only you can write to; remove it"):
        build.load()


def test_a_damaged_library_is_named(cache: Path) -> None:
    Path(os.environ["CXX"]).write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho damaged > "$2"\n')
    with pytest.raises(build.UnavailableError, match=r"kernels-.*\.so cannot be loaded .*; remove it"):
        build.load()


def test_a_compiler_that_hangs_is_ended(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_LIMIT", 0.3)
    Path(os.environ["CXX"]).write_text(f"#!/bin/sh\n(sleep 3; touch {cache}/survived) &\nwait\n")
    start = time.monotonic()
    with pytest.raises(build.UnavailableError, match="took more than"):
        build.load()
    assert time.monotonic() - start < 2
    time.sleep(3.2 - (time.monotonic() - start))
    assert not (cache / "survived").exists()
    assert [file.name for file in (cache / "retrofit").iterdir()] == ["lock"]


def test_a_broken_compiler_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -I")
    with pytest.raises(build.UnavailableError, match="failed: "):
        build.load()
    assert [file.name for file in (cache / "retrofit").iterdir()] == ["lock"]


@pytest.mark.parametrize(("system", "libc"), [("darwin", ""), ("win32", ""), ("linux", "")])
def test_other_platforms_are_refused(system: str, libc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))  # musl has no answer
    with pytest.raises(build.UnavailableError, match="Linux with glibc only"):
        build.load()


@pytest.fixture
def _unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not asked for kernels yet."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for function in (cpp.library, cpp.fault, kernels._on_cpu):
        function.cache_clear()
    yield
    for function in (cpp.library, cpp.fault, kernels._on_cpu):
        function.cache_clear()


@pytest.mark.usefixtures("_unknown")
def test_what_was_chosen_is_said_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    x = torch.empty(kernels.LARGE)
    assert kernels._choose("", x[:-1]) is eager
    assert not caplog.records
    assert [kernels._choose("", x) for _ in range(3)] == [cpp] * 3
    assert [(r.levelname, r.getMessage().split(",")[0]) for r in caplog.records] == [
        ("WARNING", "building the C++ kernels"),
        ("INFO", "normality layers run C++ kernels on the CPU"),
    ]


@pytest.mark.usefixtures("_unknown", "cache")
def test_without_a_compiler_torch_operations_run_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    x = torch.empty(kernels.LARGE)
    assert kernels._choose("eager", x) is eager
    assert not caplog.records
    assert [kernels._choose("", x) for _ in range(3)] == [eager] * 3
    (record,) = caplog.records
    assert "12 times slower than C++: no C++ compiler was found; install g++" in record.getMessage()
    with pytest.raises(RuntimeError, match=r"RETROFIT_KERNELS=cpp, but there are no C\+\+ kernels: no C"):
        kernels._choose("cpp", x)


def test_kernels_of_another_device_are_refused() -> None:
    with pytest.raises(RuntimeError, match="RETROFIT_KERNELS=cpp, but the tensor is on meta; unset it"):
        kernels._choose("cpp", torch.empty(4, device="meta"))
