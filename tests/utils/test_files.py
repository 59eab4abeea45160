"""Files appear whole or not at all."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from retrofit.errors import RetrofitError
from retrofit.utils.files import (
    acquire,
    atomic_folder,
    atomic_write,
    ensure_writable,
    open_file,
    read_text,
    release,
    sweep,
)
from tests.conftest import heed_signals
from tests.faults import faults_of, injected
from tests.networks.conftest import refused

ROOT = Path(__file__).parents[2]


def test_writes_beside_and_renames_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(path := tmp_path / "real" / "a.bin")
    with atomic_write(tmp_path / "link") as temporary:
        temporary.write_bytes(b"whole")
        assert (temporary.parent.parent, temporary.name) == (path.parent, path.name)
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert (os.listdir(path.parent), (tmp_path / "link").is_symlink()) == (["a.bin"], True)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_text("old")
    with pytest.raises(RetrofitError, match=r"exists; pass `force=True`"), atomic_write(path):
        pytest.fail("the body must not run")
    with pytest.raises(FileNotFoundError), atomic_write(path, force=True) as temporary:
        temporary.with_name("input").read_text()  # an error that is not about `path`
    assert path.read_text() == "old"
    with atomic_write(path, force=True) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_a_file_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    writing = atomic_write(path)
    writing.__enter__().write_text("ours")
    path.write_text("another process's")
    with pytest.raises(RetrofitError, match="exists"):
        writing.__exit__(None, None, None)
    assert path.read_text() == "another process's"


def test_impossible_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    places = {
        "": "is a folder or",
        "pipe": "or a device",
        "missing/a": "does not exist",
        "file/a": "does not exist",
    }
    for name, message in {**places, "n" * 300: "cannot write"}.items():
        with refused(message), atomic_write(tmp_path / name, force=True):
            pytest.fail("the body must not run")
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
    # Nothing that reads a file expands it.
    with refused("does not exist"):
        ensure_writable("~/a")


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "access", lambda *_: False
    )  # chmod does not stop root, who may run the tests
    with refused("read-only"):
        ensure_writable(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("name", "message"), [("ENOSPC", "No space"), ("EFBIG", "too large"), ("EROFS", "Read-only")]
)
def test_the_disk_refuses(tmp_path: Path, name: str, message: str) -> None:
    with refused(message), atomic_write(tmp_path / "a.bin"):
        raise OSError(getattr(errno, name), "no")
    assert os.listdir(tmp_path) == []


def _child(body: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process that writes a.bin in `folder` and says so when it is half-way."""
    script = f"""
import time
from retrofit.utils.files import atomic_write
with atomic_write({str(folder / "a.bin")!r}) as temporary:
    {body}
    temporary.write_bytes(b"half")
    print("half-way", flush=True)
    time.sleep(60)
"""
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "preexec_fn": heed_signals,
    }
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, **pipes)


def test_a_process_that_is_told_to_end_half_way_leaves_nothing(tmp_path: Path) -> None:
    with _child("", tmp_path) as child:
        assert (child.stdout.readline(), len(os.listdir(tmp_path))) == ("half-way\n", 1)
        child.send_signal(signal.SIGTERM)
        child.communicate()
    assert child.returncode != 0
    assert os.listdir(tmp_path) == []


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    """The writer has a child of its own, as data loaders have, which outlives it and must not keep
    its lock.
    """
    others = [".b.bin.0a1b2c3d.tmp", ".a.bin.notes.tmp", "a.bin.0a1b2c3d.tmp"]
    for name in others:
        (tmp_path / name).touch()

    def aside() -> int:
        return len(list(tmp_path.glob(".a.bin.????????.tmp")))

    with _child("import os; os.fork() or (time.sleep(5), os._exit(0))", tmp_path) as child:
        assert child.stdout.readline() == "half-way\n"
        with atomic_write(tmp_path / "a.bin"):  # the first still lives: both write
            assert aside() == 2
        assert aside() == 1
        child.kill()
        child.wait()
        with atomic_write(tmp_path / "a.bin", force=True):
            assert aside() == 1
        child.stdout.close()
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "a.bin"])


def test_what_a_killed_process_had_moved_away_comes_back(tmp_path: Path) -> None:
    aside = tmp_path / ".report.0a1b2c3d.tmp"
    (aside / "old").mkdir(parents=True)
    (aside / "old" / "page").write_text("the only copy")
    (aside / "lock").touch()
    with atomic_folder(tmp_path / "report") as folder:
        assert (tmp_path / "report" / "page").read_text() == "the only copy"
        (folder / "page").write_text("new")
    assert os.listdir(tmp_path) == ["report"]
    assert (tmp_path / "report" / "page").read_text() == "new"


def test_a_lock_has_one_owner(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert acquire(lock)
    assert not acquire(lock)
    asks = f"import pathlib; from retrofit.utils.files import acquire; print(acquire(pathlib.Path({str(lock)!r})))"
    ask = partial(subprocess.check_output, [sys.executable, "-c", asks], text=True, cwd=ROOT)
    assert ask() == "False\n"
    release(lock)
    assert ask() == "True\n"
    assert lock.exists()  # that process has ended without a release
    assert acquire(lock)
    release(lock)
    assert not lock.exists()


def test_a_writer_that_makes_its_own_file_does_not_make_it_private(tmp_path: Path) -> None:
    """safetensors replaces the file it is given with one that only the owner can read."""
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "target") as temporary:
        temporary.unlink()
        temporary.touch(mode=0o600)
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_exception_at_any_system_call_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"

    def write(text: str = "new") -> None:
        with atomic_write(path, force=True) as temporary:
            temporary.write_text(text)

    for fault in faults_of(write):
        write("old")
        with injected(fault):
            write()
        assert path.read_text() in ("old", "new"), fault
        # What is left is hidden, and the next writer removes all of it but an empty folder.
        assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == ["a.bin"]
        write("old")
        left = [one for one in tmp_path.iterdir() if one != path]
        assert not any(os.listdir(one) for one in left), fault
        for one in left:
            one.rmdir()


def test_an_exception_at_any_system_call_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path,
) -> None:
    final = tmp_path / "report"

    def write(text: str = "new") -> None:
        with atomic_folder(final) as folder:
            (folder / "page").write_text(text)

    for fault in faults_of(write):
        write("old")
        with injected(fault):
            write()
        # Whatever a fault left hidden comes back with the next sweep.
        sweep(tmp_path)
        assert (final / "page").read_text() in ("old", "new"), fault
        left = [path for path in tmp_path.iterdir() if path != final]
        assert not any(os.listdir(path) for path in left), fault
        for path in left:
            path.rmdir()


@pytest.mark.parametrize("opener", [open_file, read_text])
def test_what_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, opener: Callable[..., object]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").write_bytes(b"12345")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, message in {
            "pipe": "pipe is a pipe or a device; check",
            "link": "link is a pipe or a device; check",
            "loop": "cannot open the class map .*loop",
            "socket": "cannot open the class map .*socket",
            "": "is a folder; check the path",
            "missing": "there is no class map at .*missing; check",
            "large/below": "there is no class map at",
            "large": "has 5 bytes, more than 4; check",
            "n" * 300: "cannot open the class map .*File name too long",
            "null\0": "cannot open the class map .*null",
        }.items():
            with refused(message):
                opener(f"{tmp_path}/{name}", "class map", most=4)


def test_reads_a_text_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    for content in (b"caf\xc3\xa9\n", b"\xef\xbb\xbfcaf\xc3\xa9\n"):
        path.write_bytes(content)
        assert read_text(path) == "caf\xe9\n"
    path.write_bytes(b"caf\xe9\n")
    with refused("cannot read the file .*utf-8"):
        read_text(path)
