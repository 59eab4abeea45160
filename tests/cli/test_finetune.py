"""`retrofit finetune`: whole runs through the command line, interruptions from outside, and the refusals."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from click.testing import CliRunner
from PIL import Image
from torch import Tensor

import retrofit
from retrofit.cli import main
from retrofit.cli.finetune import _GROUPS
from retrofit.finetune import run_report, setup
from retrofit.finetune.recipe import Recipe
from retrofit.record import record_of
from tests.cli.conftest import Run, complaint, done
from tests.conftest import heed_signals
from tests.half_resnet import FLAGS
from tests.pictures import write_folder, write_tar

QUICK = ["--epochs", "2", "-b", "4", "-j", "0", "--val-split", "0.25", "--lr", "1e-3"]


@pytest.fixture
def pictures(here: Path) -> Path:
    return write_folder(here / "pictures", wrong=0, each=8)


@pytest.fixture(autouse=True)
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a run's pictures, but do not paint them, as in tests/finetune."""
    monkeypatch.setattr(run_report, "_save", lambda figure, path: None)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert once for all tests."""
    path = tmp_path_factory.mktemp("converted") / "small.safetensors"
    words = [*FLAGS, "--to", "bnn", "--num-classes", "3", "--img-size", "16", "-o", str(path)]
    done(CliRunner().invoke(main, ["convert", "test_resnet", *words]))
    return path


@pytest.fixture
def network(here: Path, converted: Path) -> str:
    shutil.copy(converted, here)
    return "small.safetensors"


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact for pictures of 160 pixels alone."""
    path = tmp_path_factory.mktemp("vit") / "vit.safetensors"
    retrofit.save(timm.create_model("test_vit", dynamic_img_size=False), path)
    return path


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def weights(folder: str) -> dict[str, Tensor]:
    return retrofit.load(Path(folder) / "last.safetensors").state_dict()


def assert_same(one: str, other: str) -> None:
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name


def test_a_run_and_what_it_says(run: Run, pictures: Path, network: str) -> None:
    result = done(run("finetune", network, "--data-dir", pictures, *QUICK, "--bn-momentum", "0.9", "--json"))
    said = result.stderr.splitlines()
    assert said[0].startswith("weights: RANDOM")
    assert said[1] == "run: runs/small"
    assert [line.partition(":")[0] for line in said[2:4]] == ["epoch 1", "epoch 2"]
    assert "strength 1.00" in said[3]
    assert said[-1] == "wrote runs/small/best.safetensors"
    values = json.loads(result.stdout)
    assert (values["finished"], values["step"], values["steps"], values["unreadable"]) == (True, 8, 8, [])
    rows = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]
    assert values["best_top1"] == max(row["val_top1"] for row in rows)
    done(run("evaluate", values["output"], "--data-dir", pictures, "-j", "0"))
    # The saved recipe is the whole run, network and data included.
    done(run("finetune", "--recipe", "runs/small/recipe.yaml", "-o", "again"))
    assert_same("runs/small", "again")
    # The next run of the same name gets a folder of its own.
    assert "run: runs/small-2" in run("finetune", network, "--data-dir", pictures, *QUICK, "--epochs", "1").stderr


@pytest.mark.slow
def test_the_control_run_is_one_command(run: Run, pictures: Path) -> None:
    source = timm.create_model("test_vit", num_classes=3, img_size=16)
    torch.save(source.state_dict(), "source.pth")
    words = ["test_vit", "--checkpoint", "source.pth", "--num-classes", "3", "--img-size", "16"]
    result = run("finetune", *words, "--data-dir", pictures, *QUICK, "--epochs", "1", "--lr", "1e-12", "-o", "out")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("weights: checkpoint source.pth\n")
    assert "this is plain training" in result.stderr
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(weights("out")[name], tensor, rtol=0, atol=1e-9)
    done(run("finetune", "--recipe", "out/recipe.yaml", "-o", "again"))
    assert_same("out", "again")


@pytest.mark.parametrize("scale", ["0.5,0.8", "0.5 0.8", "[0.5, 0.8]"])
def test_flags_win_over_the_recipe(run: Run, pictures: Path, network: str, scale: str) -> None:
    Path("mine.yaml").write_text(
        "epochs: 7\nbatch_size: 4\nworkers: 0\nlr: 0.5\nstrength_sched: cosine\nscale: [0.9, 1]\n"
    )
    words = ["--recipe", "mine.yaml", "--data-dir", pictures, "--epochs", "1", "--lr", "1e-3", "-o", "out"]
    done(run("finetune", network, *words, "--scale", scale, "--model-ema"))
    saved = yaml.safe_load(Path("out/recipe.yaml").read_text())
    wanted = {"epochs": 1, "lr": 1e-3, "strength_sched": "cosine", "scale": [0.5, 0.8], "model_ema": True}
    assert {name: saved[name] for name in wanted} == wanted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's reader leaves the tar open
def test_a_tar_with_a_class_map_gives_labels(run: Run, pictures: Path, network: str) -> None:
    write_tar(pictures, Path("pictures.tar"))
    Path("map.txt").write_text("cat\nbee\nant\n")
    words = ["--data-dir", "pictures.tar", "--class-map", "map.txt", *QUICK, "--epochs", "1", "-o", "out"]
    done(run("finetune", network, *words))
    assert record_of(retrofit.load("out/last.safetensors")).labels == ["cat", "bee", "ant"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "command"), [("1", "retrofit"), ("4", "torchrun --nproc-per-node 4 -m retrofit")]
)
def test_sigterm_saves_and_ends_and_resume_goes_on(
    processes: str, command: str, run: Run, pictures: Path, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)  # as torchrun sets it
    words = [network, "--data-dir", pictures, *QUICK, "--epochs", "4"]
    done(run("finetune", *words, "-o", "whole"))

    def terminate() -> None:
        while not Path("broken/metrics.jsonl").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate)
    sender.start()
    result = run("finetune", *words, "-o", "broken", "--json")
    sender.join()
    assert result.exit_code == 128 + signal.SIGTERM
    values = json.loads(result.stdout)
    assert not values["finished"]
    assert 4 <= values["step"] < 16
    assert f"stopped and saved at step {values['step']} of 16" in result.stderr
    assert result.stderr.splitlines()[-1] == f"next: {command} finetune --resume broken"
    assert Path(values["output"]).exists()
    again = run("finetune", "--resume", "broken")
    assert again.exit_code == 0
    assert f"resumed at step {values['step']} of 16" in again.stderr
    assert_same("whole", "broken")


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_ends_the_same(
    run: Run, pictures: Path, network: str, environment: dict[str, str]
) -> None:
    words = [network, "--data-dir", str(pictures), *QUICK, "--epochs", "6", "--noise", "0.3", "--checkpoint-every", "1"]
    done(run("finetune", *words, "-o", "whole"))
    command = [sys.executable, "-m", "retrofit", "finetune", *words, "-o", "broken"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        state = Path("broken/state/last.pt")
        while not state.exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.5 * torch.rand(()).item())  # about the time that the 24 steps take
        process.kill()
    again = run("finetune", "--resume", "broken")
    assert again.exit_code == 0, again.stderr
    assert_same("whole", "broken")


def test_a_full_disk_leaves_the_state_before(run: Run, pictures: Path, network: str) -> None:
    words = ["--data-dir", pictures, *QUICK, "-o", "out"]
    done(run("finetune", network, *words, "--epochs", "1"))
    before = Path("out/state/last.pt").stat().st_mtime_ns
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        result = run("finetune", network, "--data-dir", pictures, *QUICK, "-o", "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 1
    assert re.search(r"^error: cannot write full/state/.*; free", result.stderr.splitlines()[-1])
    assert Path("out/state/last.pt").stat().st_mtime_ns == before
    assert not list(Path("full").rglob("*.tmp"))


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        ([], 2, "there is no network to train"),
        (["small.safetensors"], 2, "nothing to read images from"),
        (["small.safetensors", "--data-dir", "nowhere"], 1, "no data at nowhere"),
        (
            ["small.safetensors", "--data-dir", "pictures", "-o", "pictures"],
            1,
            "pictures exists; give another --output, ",
        ),
        (["small.safetensors", "--lr", "-1", "--opt", "sdg", "--epochs", "x"], 2, "3 mistakes in the settings"),
        (["small.safetensors", "--recipe", "digit"], 2, "did you mean digits"),
        (["small.safetensors", "--data-dir", "pictures", "--device", "tpu"], 2, "cannot use --device tpu"),
        (["small.safetensors", "--data-dir", "pictures", "--log-with", "nothing"], 2, "no tracker of accelerate"),
        (["small.safetensors", "--data-dir", "pictures", "--val-split", "exam"], 2, "no part 'exam'"),
        (["small.safetensors", "--data-dir", "pictures", "--class-map", "absent"], 1, "cannot read the class map"),
        (["small.safetensors", "--dataset", "torch/nothing", "--data-dir", "."], 1, "no images found"),
        (["--resume", "nowhere"], 1, "no run to resume in nowhere"),
        (["--resume", "out", "--lr", "1"], 2, "--lr would change the run"),
        (["small.safetensors", "--resume", "out"], 2, "--resume takes MODEL"),
        (["unheard_of", "--data-dir", "pictures"], 2, "unheard_of"),
        (["test_resnet", "--data-dir", "pictures", "--teacher", "source"], 1, "cannot teach"),
        (["broken.safetensors", "--data-dir", "pictures"], 1, "broken.safetensors"),
        (["small.safetensors", "--data-dir", "pictures", "--dataset", "digits"], 2, "drop --dataset digits or"),
        (["small.safetensors", "--data-dir", "pictures", "--pretrained"], 2, "drop --pretrained"),
        (["small.safetensors", "--data-dir", "pictures", "--match", "order"], 2, "set checkpoint too"),
        (["test_resnet", "--data-dir", "pictures", "--checkpoint", "absent.pth"], 1, "absent.pth"),
        (["vit.safetensors", "--recipe", "digits"], 1, "does not take images of 32 x 32 pixels"),
        (["test_vit", "--data-dir", "pictures", "--img-size", "9"], 1, "; give another --img-size"),
    ],
)
def test_refusals(run: Run, pictures: Path, network: str, vit: Path, words: list[str], code: int, pattern: str) -> None:
    Path("broken.safetensors").write_bytes(b"half of it")
    shutil.copy(vit, ".")
    before = sorted(os.listdir())
    result = run("finetune", *words)
    assert result.exit_code == code, result.stderr
    assert pattern in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert sorted(os.listdir()) == before  # no run folder either


def test_a_tracker_that_is_not_installed(
    run: Run, pictures: Path, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "get_available_trackers", list)
    result = run("finetune", network, "--data-dir", pictures, "--log-with", "tensorboard")
    assert result.exit_code == 2
    assert "tensorboard" in complaint(result)


@pytest.mark.slow
def test_digits_from_nothing(run: Run, here: Path) -> None:
    done(run("convert", "test_resnet", "--to", "bnn", "--img-size", "32", "-o", "d.safetensors"))
    done(run("finetune", "d.safetensors", "--recipe", "digits", "-o", "digits"))
    result = run("evaluate", "digits/best.safetensors", "--dataset", "digits", "--json")
    assert json.loads(result.stdout)["top1"] > 97


@pytest.mark.slow
def test_torchrun(run: Run, pictures: Path, network: str, environment: dict[str, str]) -> None:
    words = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "retrofit",
        "finetune",
        network,
        "--data-dir",
        str(pictures),
    ]
    generator = np.random.default_rng(0)
    for file in pictures.rglob("*.png"):  # of one colour, they leave channels without variance, where rounding decides
        Image.fromarray(generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(file)
    same = [*QUICK, "--no-aug", "--opt", "sgd"]
    quick = [*same, "-b", "2", "--sync-norm"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, *quick]
    ran = subprocess.run(
        [*command, "-o", "two"], env=environment, capture_output=True, text=True, check=False, preexec_fn=heed_signals
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("epoch 2:") == 1  # the first process speaks for all
    done(run("finetune", network, "--data-dir", pictures, *same, "-o", "one"))
    for name, tensor in weights("one").items():
        torch.testing.assert_close(weights("two")[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_the_help_shows_options_in_groups(run: Run) -> None:
    text = run("finetune", "--help").stdout
    places = [text.index(f"\n{title}:\n") for title in _GROUPS.values()]
    assert places == sorted(places)
    assert "\nOptions:" not in text
    assert "\n:\n" not in text  # a group without a title
    strength = text[text.index("Strength, noise and statistics:") : text.index("Distillation:")]
    for flag in ("--strength-ramp", "--noise-kind", "--sync-norm"):
        assert flag in strength
    for name in Recipe.model_fields:
        assert name == "model" or f"--{name.replace('_', '-')}" in text
