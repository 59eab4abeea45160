"""A network of one's own through every command."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import retrofit
from tests.cli.conftest import Run, answer, complaint, done
from tests.networks import mynet

NETWORK = ("--network", "py:userfile:small")
DATA = ("--data-dir", "pictures", "-j", "0")


@pytest.fixture
def converted(run: Run, pictures: Path) -> str:
    """The artifact of a converted classifier whose file lies in the working folder, with pictures for it."""
    shutil.copy(mynet.__file__, "userfile.py")
    result = run("convert", "py:userfile:small", "--to", "bnn", "--json")
    values = answer(result)
    assert (values["model"], values["library"]) == ("userfile:small", "own")
    assert result.stderr.splitlines()[-1].startswith("next: retrofit evaluate userfile-small-bnn.safetensors --network")
    return str(values["output"])


def test_every_command_takes_it(run: Run, converted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrofit.diagnose.report_folder.write_report", lambda *_: None)  # painting takes longest
    few = ("-b", "2", "--rounds", "3", "--mode", "eval")
    for words in (
        ("inspect", "py:userfile:small", "--to", "gn"),
        ("inspect", converted, *NETWORK),
        ("evaluate", converted, *NETWORK, *DATA),
        ("evaluate", "py:userfile:small", *DATA),
        ("diagnose", converted, *NETWORK, "--against", "py:userfile:small", *DATA[:2], "--images", "4"),
        ("bench", converted, *NETWORK, *few),
        ("bench", "py:userfile:small", "--against", converted, *NETWORK, *few),
    ):
        result = run(*words)
        assert result.exit_code == 0, (words, result.stderr)
        if converted in words and words[0] != "inspect":
            assert "strength: 0 in 1 converted layer (0 is the source, 1 the target)" in result.stderr
    again = run("convert", converted, *NETWORK, "--to", "bnn", "--from", "bn", "-o", "again.safetensors")
    assert "nothing to convert" in complaint(again)


def test_a_file_alone_imports_nothing(run: Run, converted: str) -> None:
    Path("userfile.py").write_text("raise SystemExit('imported')")
    whose = "holds a network of one's own, py:userfile:small; say what builds it with --network py:MODULE:CALLABLE"
    for command in ("inspect", "export", "bench"):
        assert whose in complaint(run(command, converted))
    Path("mine.yaml").write_text("model: py:userfile:small\ndata_dir: pictures\nepochs: 1\n")
    said = complaint(run("finetune", "--recipe", "mine.yaml"))
    assert "no recipe may have py:userfile:small imported; give it as MODEL yourself" in said


def test_finetune_and_resume(run: Run, converted: str) -> None:
    words = [*DATA, "--val-split", "0.25", "--epochs", "1", "-b", "4", "--device", "cpu"]
    done(run("finetune", converted, *NETWORK, *words, "-o", "run", "--num-classes", "5"))
    best = retrofit.load("run/best.safetensors", into=mynet.small(5))
    assert best(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    done(run("evaluate", "run/best.safetensors", *NETWORK, *DATA))
    assert "holds a network of one's own" in complaint(run("finetune", "--resume", "run"))
    done(run("finetune", "--resume", "run", *NETWORK))


TWO = """
from torch import nn
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
    def forward(self, x, mask):
        return self.norm(self.conv(x) * mask)
"""


def test_a_network_of_two_inputs_is_compared_on_those_of_a_file(run: Run) -> None:
    Path("two.py").write_text(TWO)
    save_file({"mask": torch.ones(2, 1, 6), "x": torch.randn(2, 4, 6)}, "inputs.safetensors")
    words = ("convert", "py:two:Two", "--to", "ln", "--json")
    assert re.search("\nnot checked: .*--inputs", run(*words).stderr)
    checked = run(*words, "--inputs", "inputs.safetensors", "--force")
    assert answer(checked)["check"]["passed"]
    assert "check passed" in checked.stderr
    export = ("export", "two-Two-ln.safetensors", "--network", "py:two:Two", "-o", "two.onnx")
    assert "--inputs" in complaint(run(*export))
    assert answer(run(*export, "--inputs", "inputs.safetensors", "--json"))["parity"]["passed"]
    Path("none.safetensors").write_bytes(b"")
    refused = run(*words, "--inputs", "none.safetensors", "--force")
    assert "none.safetensors holds no example inputs" in complaint(refused)
