"""`retrofit finetune`: whole runs through the command line, and interruptions from outside."""

import json
import os
import re
import resource
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from torch import Tensor

import retrofit
from retrofit.cli import finetune, main
from retrofit.cli.finetune import _GROUPS
from retrofit.finetune.recipe import Recipe
from tests.cli.conftest import Run, Start, answer, done
from tests.conftest import command_line
from tests.networks.conftest import FLAGS
from tests.pictures import write_folder

QUICK = ["--epochs", "2", "-b", "4", "-j", "0", "--val-split", "0.25", "--lr", "1e-3"]
DATA = ["--data-dir", "pictures"]


@pytest.fixture
def pictures(here: Path) -> Path:
    return write_folder(here / "pictures", wrong=0, each=8)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("converted") / "small.safetensors"
    words = [*FLAGS, "--to", "bnn", "--num-classes", "3", "--img-size", "16", "-o", str(path)]
    done(command_line().invoke(main, ["convert", "test_resnet", *words]))
    return path


@pytest.fixture
def network(
    pictures: Path, converted: Path
) -> str:  # an artifact in the working folder, beside pictures for it
    shutil.copy(converted, ".")
    return "small.safetensors"


def weights(folder: str) -> dict[str, Tensor]:
    return retrofit.load(Path(folder) / "last.safetensors").state_dict()


exact = partial(torch.testing.assert_close, rtol=0, atol=0)


def test_a_run_and_what_it_says(run: Run, network: str) -> None:
    Path("runs/small").mkdir(parents=True)  # taken: the run gets a folder of its own
    result = run("finetune", network, *DATA, *QUICK, "--bn-momentum", "0.9", "--json")
    values = answer(result)
    said = result.stderr.splitlines()
    assert said[0].startswith("weights: RANDOM")
    assert said[1:3] == [
        "strength: 0 in 8 converted layers (0 is the source, 1 the target)",
        "run: runs/small-2",
    ]
    assert [line.partition(":")[0] for line in said[3:5]] == ["epoch 1", "epoch 2"]
    assert "strength 1.00" in said[4]
    assert said[-1] == "wrote runs/small-2/best.safetensors"
    assert (values["finished"], values["step"], values["steps"], values["unreadable"]) == (
        True,
        8,
        8,
        [],
    )
    rows = [
        json.loads(line) for line in Path("runs/small-2/metrics.jsonl").read_text().splitlines()
    ]
    assert values["best_top1"] == max(row["val_top1"] for row in rows)
    assert Path(values["output"]).is_file()
    # A finished run has nothing left to do, and nothing of it changes.
    before = weights("runs/small-2")
    done(run("finetune", "--resume", "runs/small-2"))
    exact(weights("runs/small-2"), before)
    assert rows == [
        json.loads(line) for line in Path("runs/small-2/metrics.jsonl").read_text().splitlines()
    ]
    # The saved recipe is the whole run, network and data included.
    done(run("finetune", "--recipe", "runs/small-2/recipe.yaml", "-o", "again"))
    exact(weights("runs/small-2"), weights("again"))


@pytest.mark.usefixtures("pictures")
def test_a_control_run_whose_flags_win_over_the_recipe(run: Run) -> None:
    source = timm.create_model("test_vit", num_classes=3, img_size=16)
    torch.save(source.state_dict(), "source.pth")
    Path("mine.yaml").write_text(
        "epochs: 7\nbatch_size: 4\nworkers: 0\nlr: 0.5\nopt: sgd\nscale: [0.9, 1]\n"
    )
    words = "finetune test_vit --checkpoint source.pth --num-classes 3 --img-size 16 --data-dir pictures"
    flags = "--recipe mine.yaml --epochs 1 --lr 1e-12 --scale 0.5,0.8 --model-ema -o out"
    result = done(run(*words.split(), *flags.split()))
    assert result.stderr.startswith("weights: checkpoint source.pth\n")
    assert "this is plain training" in result.stderr
    torch.testing.assert_close(weights("out"), source.state_dict(), rtol=0, atol=1e-9)
    saved = yaml.safe_load(Path("out/recipe.yaml").read_text())
    expected = {"epochs": 1, "lr": 1e-12, "opt": "sgd", "scale": [0.5, 0.8], "model_ema": True}
    assert {name: saved[name] for name in expected} == expected


def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with finetune._signals() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        monkeypatch.setattr(finetune, "_ONE_REQUEST", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "start"), [("1", "retrofit"), ("4", "torchrun --nproc-per-node 4 -m retrofit")]
)
def test_sigterm_saves_and_ends_and_resume_goes_on(
    processes: str, start: str, run: Run, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)  # as torchrun sets it
    words = [network, *DATA, *QUICK, "--epochs", "4"]
    done(run("finetune", *words, "-o", "whole"))

    def terminate() -> None:
        while not Path("broken/metrics.jsonl").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate)
    sender.start()
    result = run("finetune", *words, "-o", "broken", "--json")
    sender.join()
    values = json.loads(result.stdout)
    assert (result.exit_code, values["finished"], 4 <= values["step"] < 16) == (
        128 + signal.SIGTERM,
        False,
        True,
    )
    assert f"stopped and saved at step {values['step']} of 16" in result.stderr
    assert result.stderr.splitlines()[-1] == f"next: {start} finetune --resume broken"
    assert Path(values["output"]).exists()
    again = done(run("finetune", "--resume", "broken"))
    assert f"resumed at step {values['step']} of 16" in again.stderr
    exact(weights("whole"), weights("broken"))


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_ends_the_same(
    run: Run, network: str, start: Start
) -> None:
    words = [network, *DATA, *QUICK, "--epochs", "6", "--noise", "0.3", "--checkpoint-every", "1"]
    done(run("finetune", *words, "-o", "whole"))
    with start("finetune", *words, "-o", "broken") as process:
        while not Path("broken/state/last.pt").exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.5 * torch.rand(()).item())  # about the time that the 24 steps take
        process.kill()
    done(run("finetune", "--resume", "broken"))
    exact(weights("whole"), weights("broken"))


def test_a_full_disk_leaves_no_half_of_a_state(run: Run, network: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        result = run("finetune", network, *DATA, *QUICK, "-o", "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(r"\nerror: cannot write full/.*; free", result.stderr)
    assert not Path("full").exists()


@pytest.mark.slow
def test_digits_from_nothing(run: Run) -> None:
    done(run("convert", "test_resnet", "--to", "bnn", "--img-size", "32", "-o", "d.safetensors"))
    done(run("finetune", "d.safetensors", "--recipe", "digits", "-o", "digits"))
    assert (
        answer(run("evaluate", "digits/best.safetensors", "--dataset", "digits", "--json"))["top1"]
        > 97
    )


@pytest.mark.slow
def test_torchrun(run: Run, pictures: Path, network: str, start: Start) -> None:
    generator = np.random.default_rng(0)
    for file in pictures.rglob(
        "*.png"
    ):  # of one colour, they leave channels without variance, where rounding decides
        Image.fromarray(generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(file)
    same = ["finetune", network, *DATA, *QUICK, "--no-aug", "--opt", "sgd"]
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    with start(*same, "-b", "2", "--sync-norm", "-o", "two", launcher=launcher) as process:
        _, said = process.communicate()
    assert process.returncode == 0, said
    assert said.count("epoch 2:") == 1  # the first process speaks for all
    done(run(*same, "-o", "one"))
    torch.testing.assert_close(weights("two"), weights("one"), rtol=1e-4, atol=1e-5)


def test_the_help_shows_options_in_groups(run: Run) -> None:
    text = run("finetune", "--help").stdout
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE)[1:] == list(_GROUPS.values())
    assert "--no-aug / --aug " in text
    strength = text[text.index("Strength, noise and statistics:") : text.index("Distillation:")]
    assert all(flag in strength for flag in ("--strength-ramp", "--noise-kind", "--sync-norm"))
    assert all(
        f"--{name.replace('_', '-')}" in text for name in Recipe.model_fields if name != "model"
    )
