"""`retrofit bake`: what it says, and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

import retrofit
from retrofit.surgery import strength_of
from tests.cli.conftest import Run, answer, complaint, done
from tests.half_resnet import FLAGS


@pytest.fixture
def artifact(run: Run) -> str:
    words = ["test_resnet", *FLAGS, "--img-size", "32", "--to", "ln", "--strength", "1", "-o", "net.safetensors"]
    done(run("convert", *words))
    return "net.safetensors"


def test_bake_and_export(run: Run, artifact: str, pictures: Path) -> None:
    result = run("bake", artifact, "--calibrate", pictures, "--tolerance", "9", "--json")
    layers = len(answer(result)["layers"])
    assert f"baked {layers} of {layers} layers on 6 images" in result.stderr
    assert "next: retrofit export net-baked.safetensors" in result.stderr
    assert strength_of(retrofit.load("net-baked.safetensors")) == 0
    nodes = answer(run("export", "net-baked.safetensors", "--json"))["nodes"]
    assert not [kind for kind in nodes if "Norm" in kind]


def test_refusals(run: Run, artifact: str, pictures: Path) -> None:
    for words, code, said in (
        (["--calibrate", "absent"], 1, "absent"),
        (["--calibrate", str(pictures), "--tolerance", "-1"], 2, "--tolerance must be more than 0"),
        (["--calibrate", str(pictures), "-o", artifact], 1, "--force"),
        ([], 2, "--calibrate"),
    ):
        result = run("bake", artifact, *words)
        assert (result.exit_code, said in complaint(result)) == (code, True)
        assert not Path("net-baked.safetensors").exists()
