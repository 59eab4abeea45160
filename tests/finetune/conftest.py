"""Tiny networks and pictures, whole runs on them, and a clean slate for accelerate."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import retrofit
from retrofit.finetune import run_report
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run import finetune
from retrofit.finetune.run_network import resume_network
from retrofit.finetune.run_position import Position
from retrofit.finetune.run_report import RunCallback, Step
from retrofit.networks.open_model import Network, open_model
from tests.networks.conftest import HALF
from tests.pictures import write_folder

Train = Callable[..., Position]
SMALL: dict[str, Any] = {"batch_size": 4, "epochs": 2, "workers": 0, "lr": 1e-3, "val_split": 0.25}
DRAW = run_report.draw
"""Draws a run's curves, which takes as long as the training of a small run."""


class Listener(RunCallback):  # keeps what a run says, and ends it at a step, as a power cut would
    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.fail_at = fail_at

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: Step) -> None:
        self.steps.append(step)
        if step.step == self.fail_at:
            raise RuntimeError("the power went")


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Take nothing of accelerate's state, which is in class attributes, from another test, and
    leave nothing behind.
    """
    _reset()
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def undrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # let runs draw nothing, but for two in test_run.py
    monkeypatch.setattr(run_report, "draw", lambda folder, rows: None)


@pytest.fixture
def pictures(
    tmp_path: Path,
) -> Path:  # three classes of eight pictures each, all in their own colour
    return write_folder(tmp_path / "pictures", wrong=0, each=8)


def small_network(to: str | None = "bnn", name: str = "test_resnet", size: int = 16) -> Network:
    """A converted network for small pictures, of the same random weights each time."""
    torch.manual_seed(1)
    kwargs = HALF if name == "test_resnet" else {}
    network = open_model(name, num_classes=3, img_size=size, model_kwargs=kwargs)
    if to is not None:
        network.model, _ = retrofit.convert(network.model, to, check=False)
    return network


def assert_same(
    one: object, other: object
) -> None:  # compare tensors, or mappings of them, bit by bit
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture
def train(pictures: Path, tmp_path: Path) -> Train:
    """Run `finetune` on the pictures: train(folder name, network, **settings)."""

    def run(
        name: str, network: Network | None = None, *, resume: bool = False, **settings: Any
    ) -> Position:
        options = {key: settings.pop(key) for key in ("callback", "stop") if key in settings}
        recipe, folder = Recipe(**{"data_dir": str(pictures), **SMALL, **settings}), tmp_path / name
        network = network or (resume_network(folder) if resume else small_network())
        return finetune(network, recipe, folder, resume=resume, **options)

    return run
