"""Whole runs on a few pictures: what they leave behind, and that an interruption changes nothing."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import retrofit
from retrofit.errors import RetrofitError
from retrofit.finetune.loop import resume_network
from retrofit.finetune.state import load_state
from retrofit.finetune.watch import Step, Watcher
from retrofit.models import open_model
from retrofit.surgery import strength_of
from tests.finetune.conftest import Train, small_network


class Listener(Watcher):
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


def weights(folder: Path, name: str = "last") -> dict[str, Tensor]:
    return retrofit.load(folder / f"{name}.safetensors").state_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_the_best_is_of_full_strength(train: Train, tmp_path: Path) -> None:
    result = train("run", epochs=4, lr=1e-9, strength_ramp=0.5)
    assert result.rows[0]["strength"] < 1.0
    assert float(weights(tmp_path / "run", "best")["bn1.strength"]) == 1.0
    assert result.best == max(row["val_top1"] for row in result.rows if row["strength"] == 1.0)


def test_a_run_walks_to_full_strength_and_learns(train: Train, tmp_path: Path) -> None:
    listener = Listener()
    result = train("run", epochs=6, watcher=listener, lr=3e-3)
    assert result.finished
    assert result.best is not None
    assert result.best > 60  # three classes, one colour each
    assert [step.strength for step in listener.steps][:3] == pytest.approx([2 / 24, 4 / 24, 6 / 24], abs=0.05)
    assert listener.steps[-1].strength == 1.0
    model = retrofit.load(tmp_path / "run" / "last.safetensors")
    assert strength_of(model) == 1.0
    assert vars(model)["_retrofit_labels"] == ["ant", "bee", "cat"]
    assert vars(model)["_retrofit_weights"]["kind"] == "checkpoint"
    assert weights(tmp_path / "run", "best").keys() == model.state_dict().keys()


def test_the_folder_of_a_run(train: Train, tmp_path: Path) -> None:
    train("run")
    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    with (folder / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["train_loss"]) for row in table] == [row["train_loss"] for row in rows]
    for name in ("curves.png", "lambda.png"):
        with Image.open(folder / name) as picture:
            assert picture.format == "PNG"
    assert sorted(path.name for path in (folder / "state").iterdir()) == [
        "last.pt",
        "previous.pt",
        "start.safetensors",
    ]


EVERYTHING: dict[str, Any] = {
    "noise": 0.3,
    "noise_start": 0.2,
    "noise_ramp": 0.3,
    "mixup": 0.4,
    "model_ema": True,
    "model_ema_decay": 0.9,
    "aa": "rand-m5",
    "reprob": 0.5,
    "grad_accum_steps": 2,
    "clip_grad": 1.0,
    "warmup_epochs": 1,
    "checkpoint_every": 1,
    "epochs": 3,
    "batch_size": 2,
}


@pytest.mark.parametrize("fail_at", [1, 5])
def test_an_interruption_changes_nothing(train: Train, tmp_path: Path, fail_at: int) -> None:
    torch.manual_seed(1)
    network, same = small_network(), small_network()
    same.model.load_state_dict(network.model.state_dict())
    whole = train("whole", network, **EVERYTHING)
    with pytest.raises(RuntimeError, match="the power went"):
        train("broken", same, watcher=Listener(fail_at), **EVERYTHING)
    assert load_state(tmp_path / "broken" / "state")["position"]["step"] == fail_at - 1
    torch.rand(7)  # what happens in between does not matter, nor how many processes decode
    again = train("broken", resume_network(tmp_path / "broken"), resume=True, **{**EVERYTHING, "workers": 1})
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    assert_same(weights(tmp_path / "whole", "best"), weights(tmp_path / "broken", "best"))
    assert again.best == whole.best
    assert [row["train_loss"] for row in again.rows] == [row["train_loss"] for row in whole.rows]


def test_a_damaged_state_falls_back_to_the_one_before(train: Train, tmp_path: Path) -> None:
    network, same = small_network(), small_network()
    same.model.load_state_dict(network.model.state_dict())
    train("whole", network)
    train("broken", same)
    state = tmp_path / "broken" / "state"
    (state / "last.pt").write_bytes(b"half of it")
    train("broken", resume_network(tmp_path / "broken"), resume=True)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    for name in ("last.pt", "previous.pt"):
        (state / name).write_bytes(b"half of it")
    with pytest.raises(RetrofitError, match="no state to resume"):
        train("broken", resume_network(tmp_path / "broken"), resume=True)


def test_asked_to_stop_it_saves_and_goes_on_later(train: Train, tmp_path: Path) -> None:
    network, same = small_network(), small_network()
    same.model.load_state_dict(network.model.state_dict())
    train("whole", network)
    asked = iter([False, False, True])
    result = train("stopped", same, stop=lambda: next(asked))
    assert (result.finished, result.step) == (False, 3)
    assert (tmp_path / "stopped" / "last.safetensors").exists()
    assert train("stopped", resume_network(tmp_path / "stopped"), resume=True).finished
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_a_loss_that_is_not_finite_names_the_layer_and_keeps_the_last_good_state(train: Train, tmp_path: Path) -> None:
    class Poison(Watcher):
        def __init__(self, layer: torch.nn.Module) -> None:
            self.layer = layer

        def step(self, step: Step) -> None:
            if step.step == 6:
                self.layer.weight.data[0] = math.inf

    network = small_network()
    message = r"loss is not finite at step 7 of 8: layer2\.0\.bn\d .* went first; .* step 4; lower --lr"
    with pytest.raises(RetrofitError, match=message):
        train("run", network, watcher=Poison(network.model.layer2[0].conv1))
    assert load_state(tmp_path / "run" / "state")["position"]["step"] == 4


def test_a_parameter_that_is_not_finite_is_never_saved(train: Train, tmp_path: Path) -> None:
    class Poison(Watcher):
        def __init__(self, layer: torch.nn.Module) -> None:
            self.layer = layer

        def step(self, step: Step) -> None:
            if step.step == 4:
                self.layer.bias.data[0] = math.nan

    network = small_network()
    with pytest.raises(RetrofitError, match="a parameter or statistic is not finite"):
        train("run", network, watcher=Poison(network.model.fc))
    assert load_state(tmp_path / "run" / "state")["position"]["step"] == 0


def test_unreadable_images_are_counted_and_listed(train: Train, pictures: Path) -> None:
    for name in ("ant/0.png", "bee/3.png"):
        (pictures / name).write_bytes(b"no picture")
    listener = Listener()
    result = train("run", watcher=listener, epochs=3, val_split=0.0)
    assert result.finished
    assert sorted(result.unreadable) == ["ant/0.png", "bee/3.png"]
    assert sum(note.startswith("warning: cannot read") for note in listener.notes) == 2
    assert result.rows[-1]["unreadable"] == 2
    held_out = train("held-out", epochs=1, val_split=0.5)
    assert sorted(held_out.unreadable) == ["ant/0.png", "bee/3.png"]  # wherever chance has put them
    for file in pictures.rglob("*.png"):
        file.write_bytes(b"no picture")
    with pytest.raises(RetrofitError, match="none of a batch's 4 images can be read"):
        train("other", val_split=0.0)


def test_the_head_is_replaced_where_classes_differ(train: Train, tmp_path: Path) -> None:
    network = open_model("test_resnet", img_size=16)
    network.model, _ = retrofit.convert(network.model, "bnn")
    listener = Listener()
    train("run", network, epochs=1, watcher=listener)
    assert "new classifier: 3 outputs in place of 1000, zero" in listener.notes
    assert retrofit.load(tmp_path / "run" / "last.safetensors").fc.out_features == 3
    start = weights(tmp_path / "run" / "state", "start")
    assert not start["fc.weight"].any()
    assert start["conv1.0.weight"].any()


@pytest.mark.parametrize("to", ["ln-pn", "gn"])
def test_the_source_teaches_on_unlabelled_images(train: Train, pictures: Path, tmp_path: Path, to: str) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(pictures.rglob("*.png"))):
        file.rename(flat / f"{number}.png")
    network = small_network(to)
    result = train(
        "run",
        network,
        data_dir=str(flat),
        teacher="source",
        task_loss_weight=0.0,
        strength_ramp=0.0,
        freeze="all-but-norm",
        epochs=4,
        lr=1e-2,
        no_aug=True,
    )
    losses = [row["train_loss"] for row in result.rows]
    assert 0 < losses[-1] < losses[0]
    assert result.best is not None
    first, last = weights(tmp_path / "run" / "state", "start"), weights(tmp_path / "run")
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    norms = {name for name in first if ".bn" in name or name.startswith(("bn1", "conv1.1", "conv1.4"))}
    assert changed & {"bn1.weight", "layer1.0.bn1.weight"}
    assert all(".conv" not in name and "fc" not in name for name in changed), changed - norms


def test_mixed_precision_and_channels_last(train: Train) -> None:
    assert train("run", epochs=1, amp=True, channels_last=True).finished


def test_an_unconverted_network_is_trained_plainly(train: Train) -> None:
    listener = Listener()
    assert train("run", small_network(None), epochs=1, watcher=listener).finished
    assert listener.steps[-1].strength is None
    assert any("plain training" in note for note in listener.notes)


@pytest.mark.parametrize(("momentum", "warned"), [(0.01, True), (0.9, False)])
def test_running_statistics_that_will_not_catch_up(train: Train, momentum: float, warned: bool) -> None:
    listener = Listener()
    train("run", epochs=1, bn_momentum=momentum, watcher=listener)
    assert any("raise --bn-momentum" in note for note in listener.notes) is warned
