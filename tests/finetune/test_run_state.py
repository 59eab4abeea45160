"""A run's folder has one owner, and what it holds is kept."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch

from retrofit.errors import RetrofitError
from retrofit.finetune.recipe import FREE, PLACES, Recipe
from retrofit.finetune.run_position import Position
from retrofit.finetune.run_state import (
    SCHEMA,
    beginning,
    load_state,
    owned,
    recipe_file,
    resumable,
    save_state,
)
from tests.faults import faults_of, injected


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fill(folder: Path, *names: str) -> None:  # make files, and folders where a name ends in "/"
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_bytes(b"left")


@contextmanager
def held(lock: Path) -> Iterator[None]:  # let another process hold a lock until it is killed
    hold = "import pathlib, time; from retrofit.utils.files import acquire; "
    hold += f"print(acquire(pathlib.Path({str(lock)!r})), flush=True); time.sleep(60)"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", hold], cwd=root, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "True\n"
        yield
        process.kill()


def test_a_folder_in_which_another_process_trains_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fill(folder, "recipe.yaml", "state/start.safetensors", "state/.last.pt.0a1b2c3d.tmp/lock")
    before = contents(folder)
    with held(folder / ".lock"):
        for resume in (False, True):
            with pytest.raises(
                RetrofitError,
                match=r"another process trains in .*run; give another `folder`, or res",
            ):
                owned(folder, resume).__enter__()
            assert contents(folder) == {**before, ".lock": b""}
    with owned(folder, resume=True):  # a kill releases it
        assert "state/.last.pt.0a1b2c3d.tmp/lock" not in contents(folder)
    assert not (folder / ".lock").exists()


def test_a_run_killed_before_it_wrote_anything_leaves_an_unused_folder(tmp_path: Path) -> None:
    begun = ".state.0a1b2c3d.tmp/"
    fill(tmp_path / "run", ".lock", f"{begun}lock", f"{begun}recipe.yaml", f"{begun}state/last.pt")
    with owned(tmp_path / "run", resume=False):
        assert contents(tmp_path / "run") == {".lock": (tmp_path / "run" / ".lock").read_bytes()}
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize(
    "there",
    [
        ("recipe.yaml",),  # the user's own
        ("photo.png", "state/start.safetensors"),
        (
            "recipe.yaml",
            "state/start.safetensors",
            "state/last.pt",
            "metrics.jsonl",
            "best.safetensors",
        ),
        ("recipe.yaml", "state/start.safetensors", "state/last.pt"),  # a run that is not over yet
        ("recipe.yaml", "state/start.safetensors"),
    ],
    ids=len,
)
def test_a_folder_that_holds_anything_is_refused_and_kept(
    tmp_path: Path, there: tuple[str, ...]
) -> None:
    fill(tmp_path / "run", *there)
    with pytest.raises(
        RetrofitError, match=r"run exists; give another `folder`, or go on with .* `resume`"
    ):
        owned(tmp_path / "run", resume=False).__enter__()
    assert contents(tmp_path / "run").keys() == set(there)


def test_resuming_removes_the_temporary_files_of_the_dead_alone(tmp_path: Path) -> None:
    dead = ("state/.last.pt.0a1b2c3d.tmp", ".curves.png.0a1b2c3d.tmp")
    fill(tmp_path, *(f"{name}/{file}" for name in dead for file in ("half", "lock")))
    fill(
        tmp_path,
        "state/last.pt",
        ".best.safetensors.11111111.tmp/half",
        ".best.safetensors.notes.tmp",
    )
    with held(tmp_path / ".best.safetensors.11111111.tmp" / "lock"), owned(tmp_path, resume=True):
        left = {path.name for path in tmp_path.rglob("*.tmp")}
    assert left == {".best.safetensors.11111111.tmp", ".best.safetensors.notes.tmp"}


@pytest.mark.parametrize(
    ("folder", "others"), [("run", ()), ("deep/run", ()), ("run", ("somebody.txt",))]
)
def test_a_run_that_fails_removes_what_it_made_alone(
    tmp_path: Path, folder: str, others: tuple[str, ...]
) -> None:
    def fail() -> None:
        with owned(tmp_path / folder, resume=False), beginning(tmp_path / folder) as new:
            fill(new, "recipe.yaml", "state/start.safetensors")
            fill(tmp_path / folder, *others)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.listdir(tmp_path) == (["run"] if others else [])
    assert contents(tmp_path / folder).keys() == set(others)


@pytest.mark.parametrize("place", ["file", "file/inside"])
def test_where_no_folder_can_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RetrofitError, match=r"cannot make the folder .*; give another"):
        owned(tmp_path / place, resume=False).__enter__()


def run_of_three_states(folder: Path, saved: list[int]) -> None:
    with owned(folder, resume=False):
        with beginning(folder) as new:
            fill(new, "recipe.yaml", "state/start.safetensors")
            save_state(new, {"weights": torch.full((9,), 1)})
        saved.append(1)
        for number in (2, 3):
            save_state(folder, {"weights": torch.full((9,), number)})
            saved.append(number)


def test_an_error_at_any_call_of_a_run_removes_nothing_that_was_saved(tmp_path: Path) -> None:
    """And what was not saved is as if it had not begun."""
    folders = map(tmp_path.joinpath, map(str, count()))
    for fault in faults_of(lambda: run_of_three_states(next(folders), [])):
        folder = next(folders)
        saved: list[int] = []
        with injected(fault):
            run_of_three_states(folder, saved)
        if not (folder / "state").exists():
            run_of_three_states(folder, saved)
        assert recipe_file(folder).exists(), fault
        assert "state/start.safetensors" in contents(folder), fault
        with owned(folder, resume=True):
            weights = load_state(folder)["weights"]
            last = saved[-1] if saved else 0
            assert weights.unique().item() in (last, last + 1), fault
            save_state(folder, {"weights": torch.zeros(9)})
        assert not load_state(folder)["weights"].any(), fault


@pytest.mark.parametrize("writer", ["the file system's", "torch's"])
def test_a_full_disk_is_told_to_resume(tmp_path: Path, writer: str) -> None:
    (tmp_path / "state").mkdir()
    full: Exception = OSError(errno.ENOSPC, "No space left on device")
    if writer == "torch's":
        full = RuntimeError("unexpected pos 64 vs 0")
    told = pytest.raises(RetrofitError, match=r"cannot write .*; free space, then go on with `resu")
    with mock.patch("torch.save", side_effect=full), told, resumable():
        save_state(tmp_path, {})


# What a state of this schema keeps besides tensors: another setting, or figure, is another schema.
KEPT = """
pretrained match dataset train_split val_split num_classes img_size crop_pct batch_size
grad_accum_steps epochs seed opt lr weight_decay decay_norms opt_eps momentum layer_decay clip_grad
sched warmup_epochs warmup_lr min_lr decay_epochs decay_milestones decay_rate strength_sched
strength_ramp strength_end noise noise_kind noise_start noise_ramp bn_momentum precise_bn freeze
sync_norm teacher distill_loss_weight task_loss_weight kd_temperature no_aug scale ratio
train_interpolation hflip color_jitter aa reprob smoothing mixup cutmix model_ema model_ema_decay amp
amp_dtype channels_last
"""
FIGURES = "steps step loss_sum images seconds best best_progress rows unreadable"


def test_a_state_keeps_what_its_schema_says() -> None:
    """A run whose state lacks a setting would end in a KeyError, not in one line."""
    kept = set(Recipe.model_fields) - FREE - PLACES
    figures = {field.name for field in fields(Position)}
    assert (SCHEMA, kept, figures) == (4, set(KEPT.split()), set(FIGURES.split()))
