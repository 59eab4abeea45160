"""A network of one's own through every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import retrofit
from tests.cli.conftest import Run, complaint, done
from tests.networks import mynet
from tests.pictures import write_folder

NETWORK = ("--network", "py:userfile:small")


@pytest.fixture
def converted(run: Run, here: Path) -> str:
    """The artifact of a converted classifier whose file lies in the working folder."""
    shutil.copy(mynet.__file__, here / "userfile.py")
    write_folder(here / "photos", each=4)
    result = done(run("convert", "py:userfile:small", "--to", "bnn", "--json"))
    values = json.loads(result.stdout)
    assert (values["model"], values["library"]) == ("userfile:small", "own")
    assert result.stderr.splitlines()[-1].startswith("next: retrofit evaluate userfile-small-bnn.safetensors --network")
    return str(values["output"])


def test_every_command_takes_it(run: Run, here: Path, converted: str) -> None:
    commands = [
        ("inspect", "py:userfile:small", "--to", "gn"),
        ("inspect", converted, *NETWORK),
        ("convert", converted, *NETWORK, "--to", "bnn", "--from", "bn", "-o", "again.safetensors"),
        ("evaluate", converted, *NETWORK, "--data-dir", "photos", "-j", "0"),
        ("evaluate", "py:userfile:small", "--data-dir", "photos", "-j", "0"),
        ("export", converted, *NETWORK, "-o", "a.onnx"),
        ("export", "py:userfile:small", "-o", "b.onnx"),
        ("diagnose", converted, *NETWORK, "--against", "py:userfile:small", "--data-dir", "photos", "--images", "4"),
        ("bench", converted, *NETWORK, "-b", "2", "--rounds", "3", "--mode", "eval"),
        ("bench", "py:userfile:small", "--against", converted, *NETWORK, "-b", "2", "--rounds", "3", "--mode", "eval"),
    ]
    for words in commands:
        result = run(*words)
        if words[0] == "convert":  # everything is converted already
            assert "nothing to convert" in complaint(result)
        else:
            assert result.exit_code == 0, (words, result.stderr)


@pytest.mark.parametrize("command", ["inspect", "export", "bench"])
def test_an_artifact_alone_imports_nothing(run: Run, here: Path, converted: str, command: str) -> None:
    Path("userfile.py").write_text("raise SystemExit('imported')")
    assert (
        "holds a network of one's own, py:userfile:small; say what builds it with --network py:MODULE:CALLABLE"
        in complaint(run(command, converted))
    )


def test_finetune_and_resume(run: Run, here: Path, converted: str) -> None:
    words = ["--data-dir", "photos", "--val-split", "0.25", "--epochs", "1", "-b", "4", "-j", "0", "--device", "cpu"]
    done(run("finetune", converted, *NETWORK, *words, "-o", "run", "--num-classes", "5"))
    best = retrofit.load("run/best.safetensors", into=mynet.small(5))
    assert best(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    done(run("evaluate", "run/best.safetensors", *NETWORK, "--data-dir", "photos", "-j", "0"))
    assert "holds a network of one's own" in complaint(run("finetune", "--resume", "run"))
    again = run("finetune", "--resume", "run", *NETWORK)
    assert again.exit_code == 0, again.stderr


def test_a_recipe_imports_nothing(run: Run, here: Path, converted: str) -> None:
    Path("mine.yaml").write_text("model: py:userfile:small\ndata_dir: photos\nepochs: 1\n")
    result = run("finetune", "--recipe", "mine.yaml")
    assert result.exit_code == 2
    assert "no recipe may have py:userfile:small imported; give it as MODEL yourself" in complaint(result)


TWO = """
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)

    def forward(self, x, mask):
        return self.norm(self.conv(x) * mask)
"""


def test_a_network_of_two_inputs_is_compared_on_those_of_a_file(run: Run, here: Path) -> None:
    Path("two.py").write_text(TWO)
    save_file({"mask": torch.ones(2, 1, 6), "x": torch.randn(2, 4, 6)}, "inputs.safetensors")
    words = ("convert", "py:two:Two", "--to", "ln", "--json")
    unchecked = run(*words)
    assert "\nnot checked: " in unchecked.stderr
    assert "--inputs" in unchecked.stderr
    checked = done(run(*words, "--inputs", "inputs.safetensors", "--force"))
    assert json.loads(checked.stdout)["check"]["passed"]
    assert "check passed" in checked.stderr
    words_of_export = ("export", "two-Two-ln.safetensors", "--network", "py:two:Two", "-o", "two.onnx")
    assert "--inputs" in complaint(run(*words_of_export))
    exported = done(run(*words_of_export, "--inputs", "inputs.safetensors", "--json"))
    assert json.loads(exported.stdout)["parity"]["passed"]
    Path("none.safetensors").write_bytes(b"")
    assert "none.safetensors holds no example inputs" in complaint(
        run(*words, "--inputs", "none.safetensors", "--force")
    )
