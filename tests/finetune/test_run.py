"""Whole runs on a few pictures: what they leave behind, and that an interruption changes
nothing.
"""

import csv
import json
import math
import os
import shutil
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.figure import Figure
from timm.data import create_transform
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.evaluation import Accuracy
from retrofit.finetune import run, run_report, validation
from retrofit.finetune.accelerator import make_accelerator
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.recipe_files import load_recipe
from retrofit.finetune.run_images import open_data
from retrofit.finetune.run_network import resume_network
from retrofit.finetune.run_report import RunCallback, Step
from retrofit.finetune.run_state import load_state
from retrofit.layers.strength import strength_code, strength_layers
from retrofit.networks import artifact
from retrofit.networks.open_model import open_model
from retrofit.record import record_of
from tests.finetune.conftest import DRAW, SMALL, Listener, Train, assert_same, small_network
from tests.networks.conftest import HALF


def weights(folder: Path, name: str = "last") -> dict[str, Tensor]:
    return retrofit.load(folder / f"{name}.safetensors").state_dict()


def test_a_run_and_its_folder(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "run", []

    class Reader(Listener):
        def epoch(self, row: dict[str, Any]) -> None:
            *_, line = (folder / "metrics.jsonl").read_text().splitlines()
            read.append((row, json.loads(line), (folder / "best.safetensors").exists()))

    monkeypatch.setattr(run_report, "draw", DRAW)
    listener = Reader()
    result = train("run", epochs=6, callback=listener, lr=3e-3)
    assert result.finished
    assert (result.best or 0) > 60  # three classes, one colour each
    assert not any("guessing" in note for note in listener.notes)
    assert [step.strength for step in listener.steps][:3] == pytest.approx(
        [2 / 24, 4 / 24, 6 / 24], abs=0.05
    )
    assert listener.steps[-1].strength == 1.0
    model = retrofit.load(folder / "last.safetensors")
    assert record_of(model).labels == ["ant", "bee", "cat"]
    assert record_of(model).weights["kind"] == "checkpoint"
    assert weights(folder, "best").keys() == model.state_dict().keys()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == result.rows
    assert read == [
        (row, row, True) for row in rows
    ]  # an epoch is told of once its files are there
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5, 6]
    table = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    assert [float(row["train_loss"]) for row in table] == [row["train_loss"] for row in rows]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(folder / "state")) == ["last.pt", "start.safetensors"]


def test_the_best_is_of_the_strength_at_the_end(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[None] = []
    identify = artifact.identify
    monkeypatch.setattr(
        artifact, "identify", lambda *args: (built.append(None), identify(*args))[1]
    )
    falling = iter([8, 7, 5, 6])  # the way costs accuracy
    monkeypatch.setattr(run, "validate", lambda *_: Accuracy(10, next(falling), 9, 3, loss=0.5))
    result = train("run", epochs=4, strength_ramp=0.5)
    assert [row["strength"] for row in result.rows] == [0.5, 1, 1, 1]
    assert result.best == 70
    assert len(built) == 1  # the network is built again for its first file alone
    assert torch.equal(weights(tmp_path / "run", "best")["bn1.strength"], strength_code(1))


def test_a_picture_that_fails_is_a_warning(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no ink\nleft")

    monkeypatch.setattr(run_report, "draw", DRAW)
    monkeypatch.setattr(Figure, "savefig", fail)
    listener = Listener()
    assert train(
        "run", small_network("lnn", "test_vit"), epochs=1, val_split=0.0, callback=listener
    ).finished
    assert (
        "warning: a picture cannot be drawn (no ink left); the run is complete without it"
        in listener.notes
    )


def test_an_interruption_changes_nothing(train: Train, tmp_path: Path) -> None:
    everything: dict[str, Any] = {
        "noise": 0.3,
        "noise_start": 0.2,
        "noise_ramp": 0.3,
        "mixup": 0.4,
        "aa": "rand-m5",
    }
    everything |= {
        "model_ema": True,
        "model_ema_decay": 0.9,
        "reprob": 0.5,
        "grad_accum_steps": 2,
        "clip_grad": 1.0,
    }
    everything |= {
        "warmup_epochs": 1,
        "precise_bn": 5,
        "checkpoint_every": 2,
        "epochs": 3,
        "batch_size": 2,
    }
    whole = train("whole", **everything)
    with pytest.raises(RuntimeError, match="the power went"):
        train("broken", callback=Listener(5), **everything)
    assert load_state(tmp_path / "broken")["positions"][0]["step"] == 4
    torch.rand(7)  # what happens in between does not matter, nor how many processes decode
    again = train("broken", resume=True, **{**everything, "workers": 1})
    for name in ("last", "best"):
        assert_same(weights(tmp_path / "whole", name), weights(tmp_path / "broken", name))
    assert [row["train_loss"] for row in again.rows] == [row["train_loss"] for row in whole.rows]


def test_an_interruption_while_a_state_is_saved_loses_no_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before the new state takes the place of the former one."""
    replace = os.replace
    state = tmp_path / "broken" / "state"

    def interrupted(source: Path, target: Path) -> None:
        if Path(target) == state / "last.pt" and (state / "last.pt").exists():
            raise KeyboardInterrupt
        replace(source, target)

    train("whole")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train("broken")
    assert sorted(os.listdir(state)) == ["last.pt", "start.safetensors"]
    train("broken", resume=True)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))


def test_the_noise_of_the_conversion_stays_unless_the_recipe_names_another(
    train: Train, tmp_path: Path
) -> None:
    for folder, settings, expected in (("kept", {}, 0.25), ("set", {"noise": 0.0}, 0.0)):
        network = small_network()
        for layer in strength_layers(network.model):
            layer.noise = 0.25
        train(folder, network, epochs=1, **settings)
        layers = strength_layers(retrofit.load(tmp_path / folder / "last.safetensors"))
        assert {layer.noise for layer in layers} == {expected}


def test_there_and_back_ends_at_strength_0_with_constants_of_its_own(
    train: Train, tmp_path: Path
) -> None:
    before = small_network("ln-pn").model.state_dict()["bn1.running_mean"]
    settings = {"strength_sched": "there-and-back", "strength_end": 0.0, "epochs": 3}
    listener = Listener()
    result = train(
        "run",
        small_network("ln-pn"),
        callback=listener,
        model_ema=True,
        model_ema_decay=0.5,
        **settings,
    )
    assert max(step.strength or 0.0 for step in listener.steps) == 1.0
    assert result.rows[-1]["strength"] == 0.0
    assert result.best == max(row["val_top1"] for row in result.rows if row["strength"] == 0.0)
    for name in ("last", "best"):
        found = weights(tmp_path / "run", name)
        assert torch.equal(found["bn1.strength"], strength_code(0.0))
        assert not torch.allclose(found["bn1.running_mean"], before)
    raised = small_network()
    retrofit.set_strength(raised.model, 0.5)
    for network in (
        open_model(str(tmp_path / "run" / "last.safetensors")),
        raised,
    ):  # trained since conversion
        with pytest.raises(RetrofitError, match="convert the source anew"):
            train("taught", network, teacher="source")
        assert not (tmp_path / "taught").exists()


@pytest.mark.parametrize(
    ("stood", "at_once"), [(3, True), (4, False)]
)  # within an epoch, at its end
def test_stopped_anywhere_it_goes_on_from_there(
    train: Train, tmp_path: Path, stood: int, at_once: bool
) -> None:
    settings: dict[str, Any] = {"val_split": 0.0, "batch_size": 6}
    asked = iter([*[False] * (stood - 1), True])
    result = train("run", stop=lambda: next(asked), **settings)
    assert (result.finished, result.step) == (False, stood)
    assert (tmp_path / "run" / "last.safetensors").exists()
    result = train("run", resume=True, stop=lambda: at_once, **settings)
    assert result.step == (stood + 1 if at_once else 8)
    assert len(result.rows) == result.step // 4
    assert (tmp_path / "run" / "best.safetensors").exists() == result.finished


def test_a_run_goes_on_with_the_same_data_and_settings_alone(
    train: Train, tmp_path: Path, pictures: Path
) -> None:
    """Without cats, ants and bees alone would be a new classifier's classes."""
    train("run", stop=lambda: True, val_split=0.0)

    def resume(**settings: Any) -> None:
        train("run", resume=True, **{"val_split": 0.0, "workers": 1, **settings})

    began = r"differ from those that the run in .* began with; resume it with"
    with pytest.raises(RetrofitError, match=f"^seed, lr, model_ema {began}"):
        resume(lr=0.5, seed=3, model_ema=True)
    for gone, what in (("cat", "images, classes"), ("cat/0.png", "images")):
        (pictures / gone).rename(tmp_path / "elsewhere")
        with pytest.raises(RetrofitError, match=f"^{what} {began}"):
            resume()
        (tmp_path / "elsewhere").rename(pictures / gone)
    # As many images, but in another order: another part of them is held out.
    (pictures / "bee" / "0.png").rename(pictures / "bee" / "9.png")
    with pytest.raises(RetrofitError, match=f"^images {began}"):
        resume()
    (pictures / "bee" / "9.png").rename(pictures / "bee" / "0.png")
    file = tmp_path / "run" / "state" / "last.pt"
    state, whole = load_state(tmp_path / "run"), file.read_bytes()
    torch.save({**state, "kept": {**state["kept"], "processes": 2}}, file)
    with pytest.raises(RetrofitError, match=f"^processes {began}"):
        resume()
    file.write_bytes(whole)
    resume()


def test_a_damaged_state_and_one_of_another_version_are_refused(
    train: Train, tmp_path: Path
) -> None:
    train("run")
    last = tmp_path / "run" / "state" / "last.pt"
    whole = bytearray(last.read_bytes())
    with zipfile.ZipFile(last) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    whole[largest.header_offset + largest.file_size // 2] ^= 1
    last.write_bytes(whole)
    with pytest.raises(RetrofitError, match=r"no state to resume .*checksum of"):
        train("run", resume=True)
    torch.save({**torch.load(last, weights_only=True), "schema": 1}, last)
    with pytest.raises(
        RetrofitError,
        match=r"last.pt was written by another version of retrofit; resume it with that",
    ):
        train("run", resume=True)
    last.write_bytes(b"half of it")
    with pytest.raises(RetrofitError, match="no state to resume"):
        train("run", resume=True)


GRADIENT = "the gradient of layer2.0.conv1.weight"


@pytest.mark.parametrize(
    ("name", "after", "message", "good"),
    [
        (
            "layer2.0.conv1.weight",
            6,
            r"the loss .* step 7 of 8: layer2\.0\.bn\d .* went first; .*; lower `lr`",
            4,
        ),
        (
            "fc.bias",
            4,
            r"fc\.bias is not finite at step 4 of 8: fc \(Linear\) went first",
            0,
        ),  # and is never saved
        (
            GRADIENT,
            5,
            f"^{GRADIENT} is not finite at step 6 of 8: .* not `lr`; .*; start .* on another `device`$",
            4,
        ),
    ],
)
def test_what_is_not_finite_is_named_and_the_last_good_state_kept(
    train: Train, tmp_path: Path, name: str, after: int, message: str, good: int
) -> None:
    network = small_network()

    class Poison(RunCallback):
        def step(self, step: Step) -> None:
            weight = network.model.get_parameter(name.removeprefix("the gradient of "))
            if step.step == after and name == GRADIENT:
                weight.register_hook(lambda gradient: gradient * math.inf)
            elif step.step == after:
                weight.data[0] = math.nan

    with pytest.raises(RetrofitError, match=message):
        train("run", network, callback=Poison())
    assert load_state(tmp_path / "run")["positions"][0]["step"] == good


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"grad_accum_steps": 9},
            "an epoch has 4 batches, a step takes 9; lower `grad_accum_steps`",
        ),
        ({"sync_norm": True}, "`sync_norm` finds no batch normalization"),
        (
            {"amp": True, "amp_dtype": "float16", "device": "cpu"},
            "bfloat16's; drop `amp_dtype='float16'`",
        ),
    ],
)
def test_what_this_run_cannot_do_is_refused(
    train: Train, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RetrofitError, match=message):
        train("run", small_network("ln"), **settings)


def test_batches_that_cannot_be_trained_on_are_refused(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BatchNorm behind maps of one position, and a device that is full."""
    with pytest.raises(RetrofitError, match=r"a batch of 1 leaves a norm .*; raise `batch_size`"):
        train("single", small_network("bnn", size=4), batch_size=1)
    network = small_network("ln")
    forward_head = network.model.forward_head

    def overflow(features: Tensor) -> Tensor:
        if network.model.fc.training:
            raise torch.OutOfMemoryError("CUDA")
        return forward_head(features)

    monkeypatch.setattr(network.model, "forward_head", overflow)
    with pytest.raises(RetrofitError, match="batches of 4 images do not fit into the memory"):
        train("full", network)


def test_unreadable_images_are_counted_and_listed(train: Train, pictures: Path) -> None:
    for name in ("ant/0.png", "bee/3.png"):
        (pictures / name).write_bytes(b"no picture")
    listener = Listener()
    result = train("run", callback=listener, epochs=3, val_split=0.0)
    assert sorted(result.unreadable) == ["ant/0.png", "bee/3.png"]
    assert sum(note.startswith("warning: cannot read") for note in listener.notes) == 2
    assert result.rows[-1]["unreadable"] == 2
    held_out = train("held-out", epochs=1, val_split=0.5)
    assert sorted(held_out.unreadable) == ["ant/0.png", "bee/3.png"]  # wherever chance has put them
    for file in pictures.rglob("*.png"):
        file.write_bytes(b"no picture")
    with pytest.raises(RetrofitError, match="none of a batch's 4 images can be read"):
        train("other", val_split=0.0)


def test_the_source_teaches_on_unlabelled_images(
    train: Train, pictures: Path, tmp_path: Path
) -> None:
    for number, file in enumerate(sorted(pictures.rglob("*.png"))):
        file.rename(tmp_path / f"{number}.png")
    shutil.rmtree(pictures)
    settings = {
        "teacher": "source",
        "task_loss_weight": 0.0,
        "strength_ramp": 0.0,
        "freeze": "all-but-norm",
    }
    settings |= {"data_dir": str(tmp_path), "epochs": 4, "lr": 1e-2, "no_aug": True}
    result = train("run", small_network("ln-pn"), **settings)
    assert 0 < result.rows[-1]["train_loss"] < result.rows[0]["train_loss"]
    assert result.best is not None
    first, last = weights(tmp_path / "run" / "state", "start"), weights(tmp_path / "run")
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed & {"bn1.weight", "layer1.0.bn1.weight"}
    assert all(".conv" not in name and "fc" not in name for name in changed)


def test_a_trained_network_that_was_converted_teaches_and_its_run_can_be_resumed(
    train: Train, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"teacher": "source", "epochs": 1, "strength_ramp": 0.0}
    train("plain", small_network(None), epochs=1)
    network = open_model(str(tmp_path / "plain" / "last.safetensors"))
    network.model, _ = retrofit.convert(network.model, "bnn")
    assert not train("taught", network, stop=lambda: True, **settings).finished
    assert train("taught", resume=True, **settings).finished


def test_another_mixed_precision_in_one_process_is_refused(train: Train, tmp_path: Path) -> None:
    """Accelerate keeps that of the first run."""
    make_accelerator(Recipe(), tmp_path)
    with pytest.raises(UsageError, match="an earlier run in this process had another device or"):
        train("run", amp=True)
    assert not (tmp_path / "run").exists()


def test_mixed_precision_and_channels_last(train: Train) -> None:
    # At 16 pixels a strided convolution meets a map of 1 x 1, where oneDNN leaves bfloat16's weight
    # gradient unwritten on a CPU with AVX-512 (torch 2.15: torch.nn.Conv2d(16, 16, 3, stride=2,
    # padding=1) on (4, 16, 1, 1)).
    assert train("run", small_network(size=32), epochs=1, amp=True, channels_last=True).finished


def test_statistics_are_those_of_the_training_images(train: Train, tmp_path: Path) -> None:
    network = small_network()
    train("run", network, epochs=1, precise_bn=1000, model_ema=True, model_ema_decay=0.5)
    images = open_data(load_recipe(tmp_path / "run" / "recipe.yaml", {}), None, 3).train.images
    images.transform = create_transform(**network.preprocess.to_dict())
    batch = torch.stack([image for image, _ in images])
    for name in ("last", "best"):
        model = retrofit.load(tmp_path / "run" / f"{name}.safetensors")
        found = {key: value.clone() for key, value in model.named_buffers() if "running" in key}
        update_bn([batch], model)  # torch's
        torch.testing.assert_close(
            found, {key: model.get_buffer(key) for key in found}, rtol=1e-4, atol=1e-4
        )


def test_a_new_head_is_trained_and_unconverted_layers_are_frozen_whole(
    train: Train, tmp_path: Path
) -> None:
    network, listener = open_model("test_resnet", img_size=16, model_kwargs=HALF), Listener()
    network.model, _ = retrofit.convert(network.model, "bnn", skip=["layer2"], check=False)
    settings = {
        "freeze": "all-but-norm",
        "model_ema": True,
        "model_ema_decay": 0.5,
        "strength_ramp": 1.0,
    }
    train("run", network, epochs=1, callback=listener, **settings)
    classifier = "3 outputs (ant, bee, cat) in place of 1000"
    assert f"new classifier: {classifier}, initialized to zero" in listener.notes
    start = weights(tmp_path / "run" / "state", "start")
    assert not start["fc.weight"].any()
    for name in ("last", "best"):
        found = weights(tmp_path / "run", name)
        changed = {key for key in start if not torch.equal(start[key], found[key])}
        assert {"bn1.running_mean", "bn1.running_var", "bn1.weight", "fc.weight"} <= changed
        assert not {key for key in changed if key.startswith("layer2")}
        assert torch.equal(found["bn1.strength"], strength_code(1.0))  # of the average too
    assert not torch.equal(found["fc.weight"], weights(tmp_path / "run")["fc.weight"])


IN_TWO: dict[str, Any] = {**SMALL, "batch_size": 2, "device": "cpu"}


def join(rank: int, folder: str, name: str) -> None:
    """Be one of two processes, as torchrun sets them up; a run's end leaves the group."""
    torch.set_num_threads(1)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    store = f"file://{folder}/store-{name}"
    patience = timedelta(minutes=5)  # where the other process fails
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)


def work(rank: int, folder: str) -> None:
    """Train as one of two processes, and save the buffers of each network that is validated."""
    seen: list[dict[str, Tensor]] = []
    evaluate = validation.evaluate

    def listen(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        return evaluate(model, *args, **kwargs)

    validation.evaluate = listen  # type: ignore[assignment]
    for average in (False, True):
        join(rank, folder, str(average))
        settings = {**IN_TWO, "model_ema": average, "model_ema_decay": 0.5}
        recipe = Recipe(data_dir=f"{folder}/pictures", **settings)
        run.finetune(small_network(), recipe, Path(folder) / f"run-{average}")
    torch.save(seen, f"{folder}/{rank}.pt")


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_all_processes_validate_the_network_that_is_saved(tmp_path: Path) -> None:
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert len(one) == len(other) == 4
    assert_same(one, other)
    saved = weights(tmp_path / "run-False")
    assert_same(one[1], {name: saved[name] for name in one[1]})


def interrupted_work(rank: int, folder: str) -> None:
    """Train an epoch of two steps as one of two processes, at once and with a stop within it."""
    settings = {**IN_TWO, "batch_size": 4, "epochs": 1}
    recipe = Recipe(data_dir=f"{folder}/pictures", **settings)
    join(rank, folder, "whole")
    run.finetune(small_network(), recipe, Path(folder) / "whole")
    join(rank, folder, "stopped")
    run.finetune(small_network(), recipe, Path(folder) / "run", stop=lambda: True)
    join(rank, folder, "resumed")
    network = resume_network(Path(folder) / "run")
    run.finetune(network, recipe, Path(folder) / "run", resume=True)


@pytest.mark.slow
def test_an_interruption_of_two_processes_loses_the_figures_of_none(
    pictures: Path, tmp_path: Path
) -> None:
    """Each has a loss of its own, and its own images that cannot be read."""
    for name in ("ant/0.png", "ant/3.png", "bee/3.png", "bee/5.png", "cat/1.png", "cat/6.png"):
        (pictures / name).write_bytes(b"no picture")
    mp.spawn(interrupted_work, args=(str(tmp_path),), nprocs=2)
    whole, resumed = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in ("whole", "run")
    )
    for name in ("train_loss", "unreadable"):
        assert resumed[name] == whole[name]
