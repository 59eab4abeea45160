"""An export that fails says so in a few lines, and leaves no file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from retrofit.errors import RetrofitError
from retrofit.export.onnx.write import check_model
from retrofit.export.silence import silence

SCRIPT = """
import sys, torch, retrofit
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x):
        x = self.bn(x)
        return x if x.sum() > 0 else -x

model, _ = retrofit.convert(nn.Sequential(*[Branches() for _ in range(20)]), "bnn")
try:
    retrofit.export_onnx(model, "out.onnx", input_size=(3, 8, 8))
except retrofit.RetrofitError as error:
    sys.exit(f"error: {error}")
"""
COMMAND = "-m retrofit export test_maxvit --img-size 64 --dynamic-size --json"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["-c", SCRIPT], COMMAND.split()], ids=["python", "command"])
def test_a_failing_export_prints_three_lines_at_most(arguments: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    words = [sys.executable, *arguments]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) <= 3
    assert re.match(r"error: torch\.(export cannot capture|onnx cannot export) the network \(", lines[-1])
    assert len(lines[-1]) < 400
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_output_returns_after_silence(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        print("unheard")
        print("unheard", file=sys.stderr)
        raise KeyError

    with pytest.raises(KeyError), silence():
        fail()
    print("heard")
    assert capsys.readouterr() == ("heard\n", "")


def model(operator: str) -> onnx.ModelProto:
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", 2]) for n in ("input", "output")]
    node = onnx.helper.make_node(operator, ["input"], ["output"], domain="" if operator == "Det" else "nowhere")
    graph = onnx.helper.make_graph([node], "network", values[:1], values[1:])
    domains = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("nowhere", 1)]
    return onnx.helper.make_model(graph, opset_imports=domains, ir_version=10)


def test_an_invalid_model_is_one_line() -> None:
    with pytest.raises(RetrofitError, match="not valid ONNX"):
        check_model(model("Det"))
