"""Checkpoints: what is read of a file, which of its weights, and what is said when it cannot be read."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.networks.checkpoint import read_checkpoint
from tests.networks.small_states import same_tensors, small_state

# --- reading


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin", ".pth.tar"])
def test_reads_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    state, path = small_state(), tmp_path / f"a{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(state, path)
    assert same_tensors(read_checkpoint(path).tensors, state)


def test_reads_the_format_of_old_torch(tmp_path: Path) -> None:
    torch.save(small_state(), tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    assert same_tensors(read_checkpoint(tmp_path / "a.pth").tensors, small_state())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s, "epoch": 3, "args": argparse.Namespace(lr=0.1)},
        lambda s: {"model": s, "optimizer": {"state": {}}},
        lambda s: {"model": "resnet18", "state_dict": s},
        lambda s: {"state_dict": {k: v + 1 for k, v in s.items()}, "state_dict_ema": s},
        lambda s: {"model": {k: v + 1 for k, v in s.items()}, "model_ema": s},
        lambda s: {"epoch": 3, "net": s},
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
        lambda s: {"model": {f"module._orig_mod.{k}": v for k, v in s.items()}},
        lambda s: {**s, "epoch": 3},
    ],
)
def test_opens_what_training_scripts_wrap_around(tmp_path: Path, wrap: Callable[[dict[str, Tensor]], Any]) -> None:
    torch.save(wrap(small_state()), tmp_path / "a.pth")
    assert same_tensors(read_checkpoint(tmp_path / "a.pth").tensors, small_state())


@pytest.mark.parametrize(
    ("wrap", "key", "taken", "others"),
    [
        (lambda s, o: s, None, "", ()),
        (lambda s, o: {"model": o, "model_ema": s}, None, "model_ema", ("model",)),
        (lambda s, o: {"model": s, "model_ema": o}, "model", "model", ("model_ema",)),
        (lambda s, o: {"a": o, "b": s, "optimizer": {"state": {0: o}}}, "b", "b", ("a",)),
        (lambda s, o: {"ema": {"state_dict": s}, "epoch": 3}, None, "ema.state_dict", ()),
        (lambda s, o: {"ema": {"state_dict": s}, "model": o}, "ema.state_dict", "ema.state_dict", ("model",)),
        (
            lambda s, o: {"state_dict": {f"teacher.{k}": v for k, v in s.items()} | {f"student.{k}": o[k] for k in o}},
            "teacher",
            "state_dict.teacher",
            (),
        ),
        (
            lambda s, o: {"state_dict": {f"net.{k}": v for k, v in s.items()}, "model": o},
            "state_dict.net",
            "state_dict.net",
            ("model",),
        ),
    ],
)
def test_which_of_several_weights(tmp_path: Path, wrap: Any, key: str, taken: str, others: tuple[str, ...]) -> None:
    wrong = {name: value + 1 for name, value in small_state().items()}
    torch.save(wrap(small_state(), wrong), tmp_path / "a.pth")
    found = read_checkpoint(tmp_path / "a.pth", key)
    assert same_tensors(found.tensors, small_state())
    assert (found.key, found.others) == (taken, others)
    assert bool(found.left_out) == (taken == "state_dict.teacher")


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    torch.save({"g": small_state(), "d": small_state()}, tmp_path / "a.pth")
    with pytest.raises(RetrofitError, match=r"no weights under 'e' \(it holds g, d\); give `checkpoint_key`"):
        read_checkpoint(tmp_path / "a.pth", "e")


def test_a_wrapper_s_prefix_that_only_some_names_have_hides_nothing(tmp_path: Path) -> None:
    state = {"module.a": torch.zeros(1), "a": torch.ones(1)}
    torch.save(state, tmp_path / "a.pth")
    assert same_tensors(read_checkpoint(tmp_path / "a.pth").tensors, state)


def _cut(path: Path, state: Any) -> None:
    (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _bomb(path: Path) -> None:
    torch.save({"a": torch.zeros(5_000_000)}, path)
    with zipfile.ZipFile(path) as plain:
        content = [(entry.filename, plain.read(entry)) for entry in plain.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in content:
            packed.writestr(name, data)


def _looped(path: Path) -> None:
    wide: dict[str, Any] = {}
    wide.update({f"k{i}": wide for i in range(2000)})
    torch.save(wide, path)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.pth", lambda path: None, "there is no checkpoint"),
        ("a.pth", Path.mkdir, "is a folder"),
        ("a.pth", lambda path: _cut(path, small_state()), "not a whole checkpoint"),
        ("a.safetensors", lambda path: _cut(path, small_state()), "not a whole safetensors"),
        ("a.pth", lambda path: path.write_text("hello"), "not a whole checkpoint"),
        ("a.safetensors", lambda path: path.write_text("hello"), "not a whole safetensors"),
        ("a.pth", lambda path: path.write_bytes(b""), "not a whole checkpoint"),
        ("a.npz", lambda path: np.savez(path, a=np.zeros(2)), "NumPy"),
        ("a.pth", lambda path: torch.save(nn.Linear(2, 2), path), r"Python objects \(torch.nn.modules.linear.Linear\)"),
        (
            "a.pth",
            lambda path: torch.save({"a": Path("x")}, path, _use_new_zipfile_serialization=False),
            r"Python objects \(pathlib",
        ),
        ("a.pth", lambda path: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path), "TorchScript"),
        ("a.pth", lambda path: torch.save({"epoch": 3}, path), "no tensors"),
        ("a.pth", lambda path: torch.save([torch.zeros(2)], path), "no tensors"),
        ("a.pth", lambda path: torch.save({}, path), "no tensors"),
        (
            "a.pth",
            lambda path: torch.save({"g": small_state(), "d": small_state()}, path),
            r"several sets of weights \(g, d\)",
        ),
        (
            "a.pth",
            lambda path: torch.save({0: torch.zeros(1), 1: torch.zeros(1)}, path),
            "2 tensors of .* no name",
        ),
        ("a.pth", lambda path: torch.save({"a": torch.eye(3).to_sparse()}, path), r"sparse, .*\(a\); save them dense"),
        ("a.pth", lambda path: torch.save({"a": torch.empty(3, device="meta")}, path), "without data"),
        ("a.pth", lambda path: torch.save({"a": torch.zeros(1).expand(10**9)}, path), "unpacks to 4,000,000,000"),
        ("a.pth", _bomb, "unpacks to "),
        ("a.pth", _looped, "no tensors"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_says_why_a_file_cannot_be_read(
    tmp_path: Path, name: str, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(RetrofitError, match=message) as caught:
        read_checkpoint(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_executes_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (tmp_path / "touched",)

    torch.save({"state_dict": small_state(), "extra": Evil()}, tmp_path / "a.pth")
    with pytest.raises(RetrofitError, match="Python objects"):
        read_checkpoint(tmp_path / "a.pth")
    assert not (tmp_path / "touched").exists()
