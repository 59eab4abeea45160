"""`retrofit bake`, run as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import retrofit
from retrofit.surgery import strength_of
from tests.cli.conftest import Run, complaint, done
from tests.half_resnet import FLAGS
from tests.pictures import write_folder


@pytest.fixture
def pictures(here: Path) -> Path:
    return write_folder(here / "pictures", wrong=0, each=4)


@pytest.fixture
def artifact(run: Run, here: Path) -> str:
    words = ["test_resnet", *FLAGS, "--img-size", "32", "--to", "ln", "--strength", "1", "-o", "net.safetensors"]
    done(run("convert", *words))
    return "net.safetensors"


def test_bake_and_export(run: Run, artifact: str, pictures: Path) -> None:
    result = done(run("bake", artifact, "--calibrate", pictures, "--tolerance", "9", "--json"))
    found = json.loads(result.stdout)
    assert found["output"] == "net-baked.safetensors"
    assert found["images"] == [6, 6]
    assert found["chosen"]["layers"] == len(found["layers"])
    assert f"baked {found['chosen']['layers']} of {len(found['layers'])} layers on 6 images" in result.stderr
    assert "next: retrofit export net-baked.safetensors" in result.stderr
    assert strength_of(retrofit.load("net-baked.safetensors")) == 0
    exported = run("export", "net-baked.safetensors", "--json")
    assert exported.exit_code == 0, exported.stderr
    assert not [kind for kind in json.loads(exported.stdout)["nodes"] if "Norm" in kind]


def test_refusals(run: Run, artifact: str, pictures: Path) -> None:
    for words, code, said in (
        (["--calibrate", "absent"], 1, "absent"),
        (["--calibrate", str(pictures), "--tolerance", "-1"], 2, "--tolerance must be more than 0"),
        (["--calibrate", str(pictures), "-o", artifact], 1, "--force"),
        (["--calibrate", str(pictures), "-o", "net.onnx"], 2, "ends in .safetensors"),
        ([], 2, "--calibrate"),
    ):
        result = run("bake", artifact, *words)
        assert said in complaint(result)
        assert result.exit_code == code
        assert not Path("net-baked.safetensors").exists()
    assert "holds no converted layer" in complaint(
        run("bake", "test_resnet", "--img-size", "32", "--calibrate", pictures)
    )
