"""The library is built once, found whole again without a compiler, never where others could have
put it, and clean.
"""

import contextlib
import errno
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrofit.layers import kernels
from retrofit.layers.kernels import VARIABLE, cpp, eager
from retrofit.layers.kernels.cpp import cache_folder

pytestmark = pytest.mark.compiler
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def library() -> Path:  # the library that this machine has
    cpp.load()
    return max(cache_folder().glob("kernels-*.so"), key=lambda file: file.stat().st_mtime)


@pytest.fixture
def cache(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and in CXX a compiler that hands out the library."""
    home = tmp_path / "cache"
    home.mkdir()
    home.chmod(0o755)
    compiler = tmp_path / "compiler"
    hand_out = f'while [ "$1" != -o ]; do shift; done\ncp {library} "$2"\n'
    compiler.write_text(f"#!/bin/sh\necho built >> {tmp_path}/built\n{hand_out}")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("CXX", str(compiler))
    return home


def works() -> bool:
    return cpp.load().width() in (4, 8, 16)


def kept(cache: Path) -> list[str]:
    return sorted(file.name for file in (cache / "retrofit").iterdir() if file.name != "lock")


def builds(cache: Path) -> int:
    return len(cache.with_name("built").read_text().splitlines())


def test_built_once_and_private_and_then_needs_no_compiler_and_no_right_to_write(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works()
    assert works()
    assert builds(cache) == 1
    (built,) = (cache / "retrofit").glob("*.so")
    assert kept(cache) == [built.name]
    assert (cache / "retrofit").stat().st_mode & 0o777 == 0o700
    assert built.stat().st_mode & 0o022 == 0
    Path(os.environ["CXX"]).unlink()
    monkeypatch.setattr(cpp, "locked", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    assert works()


def refused(*args: object, **options: object) -> None:
    """As a file system that is mounted read-only; permissions do not stop root."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("cache", "Read-only"),
        ("home", "not an absolute path"),
        ("full", "failed: \ufffd No space left"),
    ],
)
def test_where_nothing_can_be_kept_a_temporary_folder_serves(
    place: str,
    message: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if place == "cache":
        monkeypatch.setattr(cpp, "locked", refused)
    elif place == "home":  # as a user that has neither HOME nor an entry
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:  # for the compiler too, which says so in something else than UTF-8
        compiler = Path(os.environ["CXX"])
        full = f'case "$*" in *{cache}*) printf "\\351 No space left" >&2; exit 1;; esac\n'
        compiler.write_text(compiler.read_text().replace("\n", "\n" + full, 1))
    assert works()
    assert works()
    assert caplog.text.count("built anew by each process") == 2
    assert message in caplog.text
    assert not list(cache.glob("retrofit/*.so"))
    assert not Path("~").exists()


@pytest.mark.slow
def test_many_processes_build_once(cache: Path) -> None:
    compiler = Path(os.environ["CXX"])
    compiler.write_text(compiler.read_text().replace("\ncp ", "\nsleep 0.5\ncp "))
    command = [
        sys.executable,
        "-c",
        "from retrofit.layers.kernels import cpp; print(cpp.load().width())",
    ]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True)
        for _ in range(3)
    ]
    assert all(rank.communicate()[0].strip() in ("4", "8", "16") for rank in ranks)
    assert builds(cache) == 1


@pytest.mark.parametrize("place", ["retrofit", ""], ids=["the folder", "one above"])
def test_a_folder_that_others_write_to_is_not_used(
    place: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert works()
    (cache / place).chmod(0o777)
    assert works()  # from a folder of its own
    assert "others may write to" in caplog.text
    assert builds(cache) == 2
    (cache / place).chmod(0o1777)  # sticky, as /tmp: only the owner may rename what is in it
    with pytest.raises(OSError, match="others may write") if place else contextlib.nullcontext():
        cache_folder()


def test_nothing_is_loaded_from_another_users_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = cache_folder()
    found = own.stat()
    other = os.stat_result((found.st_mode, 0, 0, 0, os.geteuid() + 1, 0, 0, 0, 0, 0))
    stat = Path.stat
    monkeypatch.setattr(
        Path, "stat", lambda path, **options: other if path == own else stat(path, **options)
    )
    with pytest.raises(OSError, match="others may write to"):
        cache_folder()


WRITES = """sh -c 'while [ "$1" != -o ]; do shift; done; {} "$2"' sh"""
BROKEN = {
    f"{sys.executable} -I": "failed: ",
    "g++ '": r"CXX=g\+\+ ' is not a command \(No closing quotation\)",
    "/not/there": "No such file or directory: '/not/there'",
    WRITES.format("echo damaged >"): r"kernels\.so: file too short",
}


@pytest.mark.parametrize(("compiler", "message"), BROKEN.items())
def test_a_broken_compiler_leaves_nothing_behind(
    compiler: str, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(OSError, match=message):
        cpp.load()
    assert kept(cache) == []


@pytest.mark.parametrize(("system", "libc"), [("darwin", ""), ("win32", ""), ("linux", "")])
def test_other_platforms_are_refused(
    system: str, libc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))  # musl has no answer
    with pytest.raises(OSError, match="Linux with glibc only"):
        cpp.load()


def forget() -> None:
    for function in (cpp.library, cpp.fault, kernels._fastest, kernels._fault):
        function.cache_clear()


@pytest.fixture
def _unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # as in a process that has not asked for kernels yet
    monkeypatch.delenv(VARIABLE, raising=False)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("_unknown")
def test_what_was_chosen_is_said_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    x = torch.empty(kernels.LARGE)
    assert kernels.choose(x[:-1]) is eager
    assert not caplog.records
    assert [kernels.choose(x) for _ in range(3)] == [cpp] * 3
    assert [(r.levelname, r.getMessage().split(",")[0]) for r in caplog.records] == [
        ("WARNING", "building the C++ kernels"),
        ("INFO", "normality layers run the cpp kernels on cpu"),
    ]


@pytest.mark.usefixtures("_unknown", "cache")
def test_without_a_compiler_torch_operations_run_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    x = torch.empty(kernels.LARGE)
    assert [kernels.choose(x) for _ in range(3)] == [eager] * 3
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "many times slower, on cpu: there are no C++ kernels: no C++ compiler was found; install g++"
    )
    monkeypatch.setenv(VARIABLE, "cpp")
    with pytest.raises(
        RuntimeError, match=r"RETROFIT_KERNELS=cpp, but there are no C\+\+ kernels: no C"
    ):
        kernels.choose(x)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpp", "=cpp, but the tensor is on meta; unset it"),
        ("fast", "=fast names no kernels; .* eager, cpp, triton"),
    ],
)
def test_kernels_that_cannot_be_had_are_refused(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises((RuntimeError, ValueError), match=f"RETROFIT_KERNELS{message}"):
        kernels.choose(torch.empty(4, device="meta"))


SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
TESTS = ("tests/layers/kernels/test_channelwise.py", "tests/layers/kernels/test_agree.py")
# With less optimisation, for which sanitizers take long
RUN = """
import sys, pytest
from retrofit.layers.kernels import cpp
cpp._FLAGS = (*(flag for flag in cpp._FLAGS if flag != "-O3"), "-O1")
sys.exit(pytest.main(["-n", "0", "-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    "capability",
    [
        "default",
        pytest.param(torch.backends.cpu.get_cpu_capability().lower(), marks=pytest.mark.sweep),
    ],
)
def test_sanitizers_find_nothing(capability: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Portable vectors load part of a vector element by element, where the sanitizer sees each of
    # them.
    cache = tmp_path_factory.getbasetemp() / f"sanitized-{capability}"
    cache.mkdir(mode=0o700, exist_ok=True)
    loaded_first = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")  # whose exceptions the former hands on
    ]
    environment = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": capability,
        "CXX": f"env -u LD_PRELOAD g++ {SANITIZERS}",
        "XDG_CACHE_HOME": str(cache),
        "LD_PRELOAD": " ".join(loaded_first),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    }
    command = [sys.executable, "-c", RUN, *TESTS, "-k", "channelwise or cpp"]
    done = subprocess.run(
        command, check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(cache.rglob("kernels-*.so"))  # what ran was what the sanitizers saw
