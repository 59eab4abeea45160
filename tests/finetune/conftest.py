"""Tiny networks and pictures, and a clean slate for accelerate, which keeps its state in class attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

import retrofit
from retrofit.finetune import run_report
from retrofit.finetune.loop import finetune
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_callback import Result, RunCallback
from retrofit.networks.models import Network, open_model
from tests.half_resnet import HALF
from tests.pictures import write_folder

Train = Callable[..., Result]


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Take nothing of accelerate's state from another test, and leave nothing to the next."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


PAINT = run_report._save
"""Paints a picture and saves it, which takes as long as the training of a small run."""


@pytest.fixture(autouse=True)
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a run's pictures, but do not paint them: `test_the_folder_of_a_run` does."""
    monkeypatch.setattr(run_report, "_save", lambda figure, path: None)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three classes of eight pictures each, all in their own colour."""
    return write_folder(tmp_path / "pictures", wrong=0, each=8)


def small_network(to: str | None = "bnn", name: str = "test_resnet", size: int = 16) -> Network:
    """A converted network of random weights for small pictures."""
    kwargs = HALF if name == "test_resnet" else {}
    network = open_model(name, num_classes=3, img_size=size, model_kwargs=kwargs)
    if to is not None:
        network.model, _ = retrofit.convert(network.model, to, check=False)
    return network


SMALL: dict[str, Any] = {"batch_size": 4, "epochs": 2, "workers": 0, "lr": 1e-3, "val_split": 0.25}


@pytest.fixture
def train(pictures: Path, tmp_path: Path) -> Train:
    """Run `finetune` on the pictures: train(folder name, network, **settings)."""

    def run(
        name: str,
        network: Network | None = None,
        *,
        resume: bool = False,
        callback: RunCallback | None = None,
        stop: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> Result:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        recipe = Recipe(**{"data_dir": str(pictures), **SMALL, **settings})
        return finetune(network or small_network(), recipe, folder, resume=resume, callback=callback, stop=stop)

    return run
