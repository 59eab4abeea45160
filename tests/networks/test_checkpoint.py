"""Checkpoints: what is read of a file, and which of its weights."""

import argparse
import datetime
import os
import zipfile
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.networks.checkpoint import read_checkpoint
from tests.networks.conftest import (
    refused,
    same_tensors,
    shape_beyond_torch,
    small_state,
    under,
)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth.tar", "old.pth"])
def test_reads_every_kind_of_file(tmp_path: Path, name: str) -> None:
    state, path = small_state(), tmp_path / name
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=not name.startswith("old"))
    assert same_tensors(read_checkpoint(path).tensors, state)


@pytest.mark.parametrize(
    ("wrap", "key", "nest", "others"),
    [
        (lambda s, o: s, None, "", ()),
        (lambda s, o: {"epoch": 3, "net": s}, None, "net", ()),
        (
            lambda s, o: {"model": "resnet18", "state_dict": s, "args": argparse.Namespace(lr=0)},
            None,
            "state_dict",
            (),
        ),
        (
            lambda s, o: {"state_dict": o, "state_dict_ema": s},
            None,
            "state_dict_ema",
            ("state_dict",),
        ),
        (lambda s, o: {"model": o, "model_ema": s}, None, "model_ema", ("model",)),
        (lambda s, o: {"model": s, "model_ema": o}, "model", "model", ("model_ema",)),
        (lambda s, o: {"a": o, "b": s, "optimizer": {"state": {0: o}}}, "b", "b", ("a",)),
        (
            lambda s, o: {"ema": {"state_dict": s}, "model": o},
            "ema.state_dict",
            "ema.state_dict",
            ("model",),
        ),
        (lambda s, o: {"state_dict": under("a.", s) | under("b.", o)}, "a", "state_dict.a", ()),
        (
            lambda s, o: {"state_dict": under("net.", s), "model": o},
            "state_dict.net",
            "state_dict.net",
            ("model",),
        ),
    ],
)
def test_what_of_a_file_is_taken(
    tmp_path: Path, wrap: Any, key: str, nest: str, others: tuple[str, ...]
) -> None:
    wrong = {name: value + 1 for name, value in small_state().items()}
    torch.save(wrap(small_state(), wrong), tmp_path / "a.pth")
    checkpoint = read_checkpoint(tmp_path / "a.pth", key)
    assert same_tensors(checkpoint.tensors, small_state())
    assert (checkpoint.key, checkpoint.others) == (nest, others)
    assert bool(checkpoint.left_out) == (nest == "state_dict.a")
    with pytest.raises(
        RetrofitError, match=r"or none of that name \(.*\); give `checkpoint_key` one of these"
    ):
        read_checkpoint(tmp_path / "a.pth", "e")


BESIDE: list[Any] = [
    argparse.Namespace(lr=0.1),
    np.float64(0.7),
    np.int64(3),
    np.bool_(True),
    np.arange(6.0).reshape(2, 3),
    np.array(["a", None], dtype=object),
    np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    np.dtype("f8"),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    datetime.date(2026, 1, 2),
    datetime.timedelta(hours=1),
    Path("runs/1"),
    PureWindowsPath("runs"),
]


@pytest.mark.parametrize("zipped", [True, False])
def test_what_training_scripts_save_beside_the_weights_is_left_out(
    tmp_path: Path, zipped: bool
) -> None:
    content = {"state_dict": small_state(), "best": BESIDE[1], "args": {"more": BESIDE}}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    checkpoint = read_checkpoint(tmp_path / "a.pth")
    assert same_tensors(checkpoint.tensors, small_state())
    assert (checkpoint.key, checkpoint.others) == ("state_dict", ())


def _cut(path: Path) -> None:
    (save_file if path.suffix == ".safetensors" else torch.save)(small_state(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _with_a_changed_byte(path: Path) -> None:
    values = torch.ones(64)
    torch.save({"a": values}, path)
    written = values.numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(written, written[:-1] + b"\0"))


def _bomb(path: Path) -> None:
    torch.save({"a": torch.zeros(5_000_000)}, path)
    with zipfile.ZipFile(path) as plain:
        content = [(entry.filename, plain.read(entry)) for entry in plain.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in content:
            packed.writestr(name, data)


WIDE: dict[str, Any] = {}
WIDE.update({f"k{i}": WIDE for i in range(2000)})


def _saves(content: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path, **options)


class Opens:  # a class of somebody's own
    def __setstate__(self, state: object) -> None:
        raise AssertionError("it was made")


class Runs:  # a command when it is read
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit",)


OLD = {"_use_new_zipfile_serialization": False}
UNREADABLE: list[tuple[str, Callable[[Path], object], str]] = [
    ("a.pth", lambda path: None, "there is no checkpoint file"),
    ("a.pth", Path.mkdir, "is a folder"),
    ("a.pth", os.mkfifo, "is a pipe or a device"),
    ("a.safetensors", os.mkfifo, "is a pipe or a device"),
    ("a.pth", _cut, "not a whole checkpoint"),
    ("a.safetensors", _cut, "not a whole checkpoint"),
    ("a.safetensors", shape_beyond_torch, "not a whole checkpoint.*Overflow"),
    ("a.pth", lambda path: path.write_text("hello"), "not a whole checkpoint"),
    ("a.npz", lambda path: np.savez(path, a=np.zeros(2)), "save weights as .safetensors or .pth"),
    ("a.pth", _saves(nn.Linear(2, 2)), r"Python objects \(torch.nn.modules.linear.Linear\)"),
    ("a.pth", _saves({"a": nn.ReLU()}, **OLD), r"Python objects \(torch.nn"),
    ("a.pth", _saves({"a": Opens(), "b": Path("x")}), r"Python objects \(.*Opens\)"),
    ("a.pth", _saves({"a": Runs()}), r"Python objects \(posix.system\)"),
    ("a.pth", _saves({"a": np.ones(2), "b": np.float64(1)}), "no tensors"),
    (
        "a.pth",
        lambda path: torch.jit.save(torch.jit.script(nn.ReLU()), path),
        "TorchScript.*save weights",
    ),
    ("a.pth", _saves([torch.zeros(2)]), "no tensors"),
    (
        "a.pth",
        _saves({"g": small_state(), "d": small_state()}),
        r"several sets of weights, .* \('g', 'd'\)",
    ),
    ("a.pth", _bomb, "unpacks to "),
    ("a.pth", _with_a_changed_byte, "not a whole checkpoint .*checksum of a/data/0"),
    ("a.pth", _saves(WIDE), "no tensors"),
]


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_checkpoint(tmp_path / "a.pth").tensors["a"].tolist() == [1, 1]


@pytest.mark.parametrize(("name", "write", "message"), UNREADABLE)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_says_why_a_file_is_not_read(
    tmp_path: Path, name: str, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / name)
    with refused(message):
        read_checkpoint(tmp_path / name)
