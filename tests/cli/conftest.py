"""Running the command line inside the test's process, in a folder of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import timm
from click.testing import Result

import retrofit
from retrofit.cli import main
from tests.conftest import command_line, heed_signals
from tests.finetune.conftest import undrawn  # noqa: F401
from tests.networks.conftest import HALF
from tests.pictures import write_folder

Run = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RETROFIT_DEBUG", raising=False)
    return folder


@pytest.fixture
def run(here: Path) -> Run:  # run a command line, given as words
    return lambda *words: command_line().invoke(main, [str(word) for word in words])


@pytest.fixture
def pictures(here: Path) -> Path:  # pictures of three classes, four each, in the working folder
    return write_folder(here / "pictures", wrong=0)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with net.safetensors, a converted classifier of three classes."""
    folder = tmp_path_factory.mktemp("classifier")
    model, _ = retrofit.convert(timm.create_model("test_resnet", num_classes=3, **HALF), "ln")
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.2, 0.3, 0.4), "crop_pct": 0.7}
    retrofit.set_strength(model, 1)
    retrofit.save(model, folder / "net.safetensors", labels=["bee", "cat", "ant"])
    return folder


@pytest.fixture(scope="session")
def exported(classifier: Path) -> Result:
    """What `retrofit export` said when it wrote net.onnx and net.json beside the classifier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(classifier)
        words = ["export", "net.safetensors", "--json", "--report", "net.json"]
        return done(command_line().invoke(main, words))


@pytest.fixture
def artifact(here: Path, classifier: Path) -> str:
    return Path(shutil.copy(classifier / "net.safetensors", here)).name


@pytest.fixture
def start(here: Path) -> Start:
    """Start a command line in a process of its own, which heeds signals; `launcher` is a module
    that starts ours.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    how = {
        "env": environment,
        "stdout": PIPE,
        "stderr": PIPE,
        "text": True,
        "preexec_fn": heed_signals,
    }
    return lambda *words, launcher=(): subprocess.Popen(
        [sys.executable, "-m", *launcher, "retrofit", *map(str, words)], **how
    )


def complaint(result: Result) -> str:
    """Return the error line; what else was written must not be an error, a traceback or on
    stdout.
    """
    assert result.stdout == ""
    *others, last = result.stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert "; " in last
    assert not any("Traceback" in line or line.startswith("error") for line in others)
    return last


def done(result: Result) -> Result:  # return what a command answered that did what it was to do
    assert result.exit_code == 0, result.stderr
    return result


def answer(
    result: Result,
) -> dict[str, Any]:  # return the JSON object of a command that did what it was to do
    values: dict[str, Any] = json.loads(done(result).stdout)
    return values
