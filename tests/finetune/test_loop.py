"""Whole runs on a few pictures: what they leave behind, and that an interruption changes nothing."""

from __future__ import annotations

import csv
import json
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.evaluation.accuracy import Accuracy
from retrofit.finetune import loop, run, run_report, validation
from retrofit.finetune.data import open_data
from retrofit.finetune.loop import resume_network
from retrofit.finetune.recipe import Recipe, load_recipe
from retrofit.finetune.run_callback import RunCallback, Step
from retrofit.finetune.run_state import load_state
from retrofit.layers import NormalityMixin
from retrofit.layers.base import strength_code
from retrofit.networks import artifact
from retrofit.networks.models import open_model
from retrofit.record import record_of
from retrofit.surgery import strength_of
from tests.finetune.conftest import PAINT, SMALL, Train, small_network


class Listener(RunCallback):
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


@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_best_is_of_the_strength_at_the_end(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: float, end: float
) -> None:
    falling = iter([8, 7, 5, 6])  # the way costs accuracy
    monkeypatch.setattr(run, "validate", lambda *_: Accuracy(10, next(falling), 9, 3, loss=0.5))
    result = train("run", epochs=4, strength_ramp=0.5, strength_start=start, strength_end=end)
    assert [row["strength"] for row in result.rows] == [0.5, end, end, end]
    assert torch.equal(weights(tmp_path / "run", "best")["bn1.strength"], strength_code(end))
    assert result.best == 70


def test_the_network_is_built_again_for_its_first_file_alone(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[None] = []
    identified = artifact._identified
    monkeypatch.setattr(artifact, "_identified", lambda *args: (built.append(None), identified(*args))[1])
    rising = iter([1, 2, 3])
    monkeypatch.setattr(run, "validate", lambda *_: Accuracy(10, next(rising), 9, 3, loss=0.5))
    result = train("run", epochs=3)
    assert (len(built), result.best) == (1, 30)
    assert_same(weights(tmp_path / "run", "best"), weights(tmp_path / "run"))  # both come back, by `retrofit.load`


def test_a_network_that_was_raised_is_not_taken_back(train: Train, tmp_path: Path) -> None:
    train("first", epochs=1, strength_ramp=0.0)
    listener = Listener()
    train("second", open_model(str(tmp_path / "first" / "last.safetensors")), epochs=1, callback=listener)
    assert [step.strength for step in listener.steps] == [1, 1, 1, 1]


def test_there_and_back_ends_at_strength_0_with_constants_of_its_own(train: Train, tmp_path: Path) -> None:
    torch.manual_seed(1)
    network, same = small_network("ln-pn"), small_network("ln-pn")
    same.model.load_state_dict(network.model.state_dict())
    before = network.model.state_dict()["bn1.running_mean"].clone()
    settings = {"strength_sched": "there-and-back", "strength_end": 0.0, "epochs": 3, "checkpoint_every": 1}
    settings |= {"model_ema": True, "model_ema_decay": 0.5}
    listener = Listener()
    result = train("whole", network, callback=listener, **settings)
    assert max(step.strength or 0.0 for step in listener.steps) == 1.0
    assert result.rows[-1]["strength"] == 0.0
    returned = [row["val_top1"] for row in result.rows if row["strength"] == 0.0]
    assert result.best == max(returned)
    for name in ("last", "best"):
        found = weights(tmp_path / "whole", name)
        assert torch.equal(found["bn1.strength"], strength_code(0.0))
        assert not torch.allclose(found["bn1.running_mean"], before)
    with pytest.raises(RuntimeError, match="the power went"):
        train("broken", same, callback=Listener(6), **settings)  # after the turn
    train("broken", resume_network(tmp_path / "broken"), resume=True, **settings)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))


def test_a_run_walks_to_full_strength_and_learns(train: Train, tmp_path: Path) -> None:
    listener = Listener()
    result = train("run", epochs=6, callback=listener, lr=3e-3)
    assert result.finished
    assert result.best is not None
    assert result.best > 60  # three classes, one colour each
    assert [step.strength for step in listener.steps][:3] == pytest.approx([2 / 24, 4 / 24, 6 / 24], abs=0.05)
    assert listener.steps[-1].strength == 1.0
    model = retrofit.load(tmp_path / "run" / "last.safetensors")
    assert strength_of(model) == 1.0
    assert record_of(model).labels == ["ant", "bee", "cat"]
    assert record_of(model).weights["kind"] == "checkpoint"
    assert weights(tmp_path / "run", "best").keys() == model.state_dict().keys()


def test_the_folder_of_a_run(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "_save", PAINT)
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


@pytest.mark.parametrize(("name", "to"), [("test_resnet", "bnn"), ("test_vit", "lnn"), ("test_efficientnet_gn", "gnn")])
def test_lambda_is_drawn_of_every_kind_of_layer(
    train: Train, monkeypatch: pytest.MonkeyPatch, name: str, to: str
) -> None:
    drawn: dict[str, Tensor] = {}
    monkeypatch.setattr(run_report, "plot_lambdas", lambda path, values: drawn.update(values))
    listener = Listener()
    network = small_network(to, name)
    train("run", network, epochs=1, val_split=0.0, callback=listener)
    assert drawn.keys() == {key for key, one in network.model.named_modules() if isinstance(one, NormalityMixin)}
    assert all(found.isfinite().all() and found.ne(1).any() for found in drawn.values())
    assert not [note for note in listener.notes if note.startswith("warning: a picture")]


def test_a_picture_that_fails_is_a_warning(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path, _what: object) -> None:
        raise ValueError("no ink\nleft")

    monkeypatch.setattr(run_report, "plot_curves", fail)
    listener = Listener()
    assert train("run", callback=listener).finished
    assert [note for note in listener.notes if "ink" in note] == [
        "warning: a picture cannot be drawn (no ink left); the run is complete without it"
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
    "precise_bn": 5,
    "checkpoint_every": 1,
    "epochs": 3,
    "batch_size": 2,
}


def test_an_interruption_changes_nothing(train: Train, tmp_path: Path) -> None:
    torch.manual_seed(1)
    network, same = small_network(), small_network()
    same.model.load_state_dict(network.model.state_dict())
    whole = train("whole", network, **EVERYTHING)
    with pytest.raises(RuntimeError, match="the power went"):
        train("broken", same, callback=Listener(5), **EVERYTHING)
    assert load_state(tmp_path / "broken")["position"]["step"] == 4
    torch.rand(7)  # what happens in between does not matter, nor how many processes decode
    again = train("broken", resume_network(tmp_path / "broken"), resume=True, **{**EVERYTHING, "workers": 1})
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    assert_same(weights(tmp_path / "whole", "best"), weights(tmp_path / "broken", "best"))
    assert again.best == whole.best
    assert [row["train_loss"] for row in again.rows] == [row["train_loss"] for row in whole.rows]


@pytest.mark.parametrize(("gone", "what"), [("cat", "classes"), ("cat/0.png", "images")])
def test_a_run_does_not_go_on_with_other_data(
    gone: str, what: str, train: Train, tmp_path: Path, pictures: Path
) -> None:
    """Without cats, ants and bees alone would be a new classifier's classes."""
    train("run", stop=lambda: True, val_split=0.0)
    lost = pictures / gone
    lost.rename(tmp_path / "elsewhere")
    with pytest.raises(RetrofitError, match=f"the {what} to train on are not those that the run in .* began with"):
        train("run", resume_network(tmp_path / "run"), resume=True, val_split=0.0)
    (tmp_path / "elsewhere").rename(lost)
    assert train("run", resume_network(tmp_path / "run"), resume=True, val_split=0.0).finished


@pytest.mark.parametrize(
    ("settings", "named"), [({"lr": 0.5}, "lr"), ({"seed": 3, "model_ema": True}, "seed, model_ema")]
)
def test_a_run_does_not_go_on_with_other_settings(
    train: Train, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    train("run", stop=lambda: True)
    with pytest.raises(RetrofitError, match=rf"^{named} of the recipe differ from those that the run in .* began with"):
        train("run", resume_network(tmp_path / "run"), resume=True, **settings)
    assert train("run", resume_network(tmp_path / "run"), resume=True, workers=1).finished


def test_a_state_of_another_version_is_refused(train: Train, tmp_path: Path) -> None:
    train("run", stop=lambda: True)
    for name in ("last.pt", "previous.pt"):
        path = tmp_path / "run" / "state" / name
        torch.save({**torch.load(path, weights_only=True), "schema": 1}, path)
    with pytest.raises(RetrofitError, match=r"last.pt was written by another version of retrofit; resume it with that"):
        train("run", resume_network(tmp_path / "run"), resume=True)


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


@pytest.mark.parametrize(
    ("stood", "at_once", "val_split"),  # nowhere yet, within an epoch, at an epoch's end, at the run's end
    [(0, True, 0.25), (3, True, 0.0), (3, False, 0.25), (4, False, 0.0), (8, False, 0.25)],
)
def test_stopped_anywhere_it_goes_on_from_there(
    train: Train, tmp_path: Path, stood: int, at_once: bool, val_split: float
) -> None:
    listener = Listener()
    network, same = small_network(), small_network()
    same.model.load_state_dict(network.model.state_dict())
    settings: dict[str, Any] = {"val_split": val_split, "batch_size": 4 if val_split else 6}
    resume = stood > 0
    if resume:
        asked = iter([*[False] * (stood - 1), True])
        result = train("broken", same, stop=lambda: next(asked), **settings)
        assert (result.finished, result.step) == (stood == 8, stood)
        assert (tmp_path / "broken" / "last.safetensors").exists()
        same = resume_network(tmp_path / "broken")
    result = train("broken", same, resume=resume, stop=lambda: at_once, callback=listener, **settings)
    assert not [note for note in listener.notes if "picture" in note]
    assert result.step == (min(stood + 1, 8) if at_once else 8)
    assert len(result.rows) == result.step // 4
    if not at_once:
        train("whole", network, **settings)
        for name in ("last", "best"):
            assert_same(weights(tmp_path / "whole", name), weights(tmp_path / "broken", name))


class Poison(RunCallback):
    """Makes a value of a parameter not finite after a step."""

    def __init__(self, parameter: torch.Tensor, step: int) -> None:
        self.parameter, self.after = parameter, step

    def step(self, step: Step) -> None:
        if step.step == self.after:
            self.parameter.data[0] = math.nan


def test_a_loss_that_is_not_finite_names_the_layer_and_keeps_the_last_good_state(train: Train, tmp_path: Path) -> None:
    network = small_network()
    message = r"loss is not finite at step 7 of 8: layer2\.0\.bn\d .* went first; .* step 4; lower `lr`"
    with pytest.raises(RetrofitError, match=message):
        train("run", network, callback=Poison(network.model.layer2[0].conv1.weight, step=6))
    assert load_state(tmp_path / "run")["position"]["step"] == 4


def test_a_parameter_that_is_not_finite_is_never_saved(train: Train, tmp_path: Path) -> None:
    network = small_network()
    with pytest.raises(RetrofitError, match=r"fc\.bias is not finite at step 4 of 8: fc \(Linear\) went first"):
        train("run", network, callback=Poison(network.model.fc.bias, step=4))
    assert load_state(tmp_path / "run")["position"]["step"] == 0


@pytest.mark.parametrize("name", ["layer1.0.bn1.running_lambda", "layer2.0.bn2.running_var", "fc.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_network_that_is_not_finite_is_refused_before_the_first_step(
    train: Train, tmp_path: Path, name: str, value: float
) -> None:
    network, listener = small_network(), Listener()
    network.model.state_dict()[name].view(-1)[0] = value
    message = rf"^{name} of test_resnet holds NaN or infinity before the first step; train from other weights$"
    with pytest.raises(RetrofitError, match=message):
        train("run", network, callback=listener)
    assert not listener.steps
    assert os.listdir(tmp_path / "run") == []


def test_unreadable_images_are_counted_and_listed(train: Train, pictures: Path) -> None:
    for name in ("ant/0.png", "bee/3.png"):
        (pictures / name).write_bytes(b"no picture")
    listener = Listener()
    result = train("run", callback=listener, epochs=3, val_split=0.0)
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
    network.model, _ = retrofit.convert(network.model, "bnn", check=False)
    listener = Listener()
    train("run", network, epochs=1, callback=listener)
    assert "new classifier: 3 outputs in place of 1000, zero" in listener.notes
    assert retrofit.load(tmp_path / "run" / "last.safetensors").fc.out_features == 3
    start = weights(tmp_path / "run" / "state", "start")
    assert not start["fc.weight"].any()
    assert start["conv1.0.weight"].any()


def test_the_source_teaches_on_unlabelled_images(train: Train, pictures: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(pictures.rglob("*.png"))):
        file.rename(flat / f"{number}.png")
    result = train(
        "run",
        small_network("ln-pn"),
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


def test_a_network_that_was_trained_since_its_conversion_cannot_stand_for_its_source(
    train: Train, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"teacher": "source", "epochs": 1}
    train("run", strength_end=0.0, epochs=1)
    raised = small_network()
    retrofit.set_strength(raised.model, 0.5)
    for network in (open_model(str(tmp_path / "run" / "last.safetensors")), raised):
        with pytest.raises(RetrofitError, match="convert the source anew"):
            train("taught", network, **settings)
        assert not list((tmp_path / "taught").iterdir())
    # One that was trained before its conversion can, and a run whose strength rose can be resumed.
    train("plain", small_network(None), epochs=1)
    network = open_model(str(tmp_path / "plain" / "last.safetensors"))
    network.model, _ = retrofit.convert(network.model, "bnn")
    assert not train("taught", network, stop=lambda: True, strength_ramp=0.0, **settings).finished
    assert train("taught", resume_network(tmp_path / "taught"), resume=True, strength_ramp=0.0, **settings).finished


@pytest.mark.parametrize(("amp", "advice"), [(False, "on another `device`"), (True, "with `amp=False`")])
def test_a_gradient_that_is_not_finite_is_blamed_itself(train: Train, tmp_path: Path, amp: bool, advice: str) -> None:
    network = small_network(size=32)
    passed: list[int] = []

    def poison(gradient: Tensor) -> Tensor:
        passed.append(1)
        return gradient * (math.inf if len(passed) == 6 else 1.0)

    network.model.layer2[0].conv1.weight.register_hook(poison)
    message = (
        r"the gradient of layer2\.0\.conv1\.weight is not finite at step 6 of 8: the loss and all layers are finite, "
        rf"so the cause is not `lr`; .* step 4; start again {advice}$"
    )
    with pytest.raises(RetrofitError, match=message):
        train("run", network, amp=amp)
    assert load_state(tmp_path / "run")["position"]["step"] == 4


def test_mixed_precision_and_channels_last(train: Train) -> None:
    # At 16 pixels a strided convolution meets a map of 1 x 1, where oneDNN leaves bfloat16's weight gradient unwritten
    # on a CPU with AVX-512 (torch 2.15: torch.nn.Conv2d(16, 16, 3, stride=2, padding=1) on (4, 16, 1, 1)).
    assert train("run", small_network(size=32), epochs=1, amp=True, channels_last=True).finished


@pytest.mark.parametrize("to", ["bnn", "gn-pn"])
def test_an_average_of_the_weights_keeps_what_is_constant(train: Train, tmp_path: Path, to: str) -> None:
    network = small_network(to)
    train("run", network, epochs=1, batch_size=6, model_ema=True, model_ema_decay=0.9, strength_ramp=1.0)
    start, last, average = (weights(tmp_path / "run", file) for file in ("state/start", "last", "best"))
    assert any(not torch.equal(average[key], last[key]) for key in last)
    layers = retrofit.load(tmp_path / "run" / "best.safetensors")
    buffers = {key for key, _ in layers.named_buffers()}
    constant = {key for key in buffers if torch.equal(start[key], last[key])}
    strengths = {key for key in last if key.endswith(".strength") or key == "strength"}
    assert strengths
    for key in constant | strengths:
        assert torch.equal(average[key], last[key]), key


@pytest.mark.parametrize(("to", "average"), [(None, False), ("bnn", True)])
def test_statistics_are_those_of_the_training_images(
    train: Train, tmp_path: Path, to: str | None, average: bool
) -> None:
    network = small_network(to)
    result = train("run", network, epochs=1, precise_bn=1000, model_ema=average, model_ema_decay=0.5)
    assert result.finished
    images = open_data(load_recipe(tmp_path / "run" / "recipe.yaml", {}), None, 3).train.images
    images.transform = create_transform(**network.preprocess.to_dict())
    batch = torch.stack([image for image, _ in images])
    for name in ("last", "best"):
        model = retrofit.load(tmp_path / "run" / f"{name}.safetensors")
        found = {key: value.clone() for key, value in model.named_buffers() if "running" in key}
        update_bn([batch], model)  # torch's
        assert found
        for key, value in found.items():
            torch.testing.assert_close(value, model.get_buffer(key), rtol=1e-4, atol=1e-4)


def test_statistics_of_layers_that_are_not_converted_are_frozen_with_their_weights(
    train: Train, tmp_path: Path
) -> None:
    network = small_network(None)
    network.model, _ = retrofit.convert(network.model, "bnn", skip=["layer2"], check=False)
    train("run", network, freeze="all-but-norm", model_ema=True, model_ema_decay=0.5)
    start = weights(tmp_path / "run" / "state", "start")
    for name in ("last", "best"):
        found = weights(tmp_path / "run", name)
        changed = {key for key in start if not torch.equal(start[key], found[key])}
        assert {"bn1.running_mean", "bn1.running_var", "bn1.weight"} <= changed
        assert not {key for key in changed if key.startswith("layer2")}


def work(rank: int, folder: str) -> None:
    """Train as one of two processes, and save the buffers of each network that is validated."""
    torch.set_num_threads(1)
    own = str(rank)  # as torchrun sets it
    os.environ |= {
        "RANK": own,
        "LOCAL_RANK": own,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }
    seen: list[dict[str, Tensor]] = []
    evaluate = validation.evaluate

    def listen(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        return evaluate(model, *args, **kwargs)

    validation.evaluate = listen  # type: ignore[assignment]
    for average in (False, True):
        store, patience = f"file://{folder}/store-{average}", timedelta(minutes=5)  # where the other process fails
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
        settings = {**SMALL, "batch_size": 2, "model_ema": average, "model_ema_decay": 0.5, "device": "cpu"}
        recipe = Recipe(data_dir=f"{folder}/pictures", **settings)
        torch.manual_seed(0)
        loop.finetune(small_network(), recipe, Path(folder) / f"run-{average}")
    torch.save(seen, f"{folder}/{rank}.pt")


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_all_processes_validate_the_network_that_is_saved(tmp_path: Path) -> None:
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert len(one) == len(other) == 4
    for ours, theirs in zip(one, other, strict=True):
        assert_same(ours, theirs)
    saved = weights(tmp_path / "run-False")
    assert_same(one[1], {name: saved[name] for name in one[1]})


@pytest.mark.parametrize("error", [KeyboardInterrupt, RetrofitError])
def test_a_run_without_a_state_leaves_no_folder(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def stop(*_: Any) -> None:
        assert (tmp_path / "run" / "recipe.yaml").exists()
        raise error("stop")

    monkeypatch.setattr(run, "save_state", stop)
    with pytest.raises(error):
        train("run")
    assert os.listdir(tmp_path / "run") == []
