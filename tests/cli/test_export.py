"""`retrofit export`, run as a user would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import retrofit
from retrofit.cli import main
from retrofit.export import api
from tests.cli.conftest import Run, complaint, done
from tests.half_resnet import FLAGS
from tests.pictures import write_folder

MODEL = ["test_resnet", *FLAGS, "--num-classes", "7"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert once for all tests."""
    path = tmp_path_factory.mktemp("converted") / "net.safetensors"
    words = ["convert", *MODEL, "--to", "bnn", "--strength", "1", "-o", str(path)]
    done(CliRunner().invoke(main, words))
    return path


@pytest.fixture
def artifact(here: Path, converted: Path) -> Path:
    return Path(shutil.copy(converted, here))


def test_export(run: Run, artifact: Path) -> None:
    result = done(run("export", artifact.name, "--json"))
    found = json.loads(result.stdout)
    assert found["schema"] == 1
    assert found["model"] == "test_resnet"
    assert found["fold"] == "exact"
    assert found["opset"] == 18
    assert found["output"] == "net.onnx"
    assert found["bytes"] == Path("net.onnx").stat().st_size
    assert set(found["parity"]) == {"batches", "max_abs_diff", "scale", "top1_agreement", "tolerance", "passed"}
    assert found["parity"]["passed"] is True
    assert found["nodes"]["Conv"] > 0
    assert "check passed" in result.stderr
    assert "wrote net.onnx" in result.stderr
    metadata = {entry.key: entry.value for entry in onnx.load("net.onnx").metadata_props}
    assert metadata["model"] == "test_resnet"
    assert metadata["target"] == "bnn"
    assert metadata["strength"] == "1.0"
    assert len(json.loads(metadata["mean"])) == 3
    for name in ("input_size", "mean", "std", "crop_pct"):
        assert found["preprocess"][name] == json.loads(metadata[name])


def test_report(run: Run, artifact: Path) -> None:
    result = run("export", artifact.name, "--json", "--report", "net.json")
    assert result.exit_code == 0, result.stderr
    assert "wrote net.json" in result.stderr
    assert Path("net.json").read_text() == result.stdout
    found = json.loads(result.stdout)
    assert (found["target"], found["strength"], found["weights"]["kind"]) == ("bnn", 1.0, "random")
    words = ("export", artifact.name, "--report", "other.json")
    assert "net.onnx exists; pass --force" in complaint(run(*words))
    assert len(found["layers"]) > 3


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("net.html", 2, "a report is a .json file, not net.html; give --report a name that ends in .json"),
        ("nowhere/net.json", 1, "does not exist"),
        ("mine.json", 1, "mine.json exists; pass --force"),
        ("same.json", 2, "the exported file itself"),
    ],
)
def test_wrong_reports(name: str, code: int, message: str, run: Run) -> None:
    Path("mine.json").write_text("mine")
    Path("same.json").symlink_to("net.onnx")
    result = run("export", "test_resnet", "-o", "net.onnx", "--report", name)
    assert result.exit_code == code
    assert message in complaint(result)
    assert len(result.stderr.strip().splitlines()) == 1  # the network was not even opened
    assert Path("mine.json").read_text() == "mine"
    assert sorted(path.name for path in Path().iterdir()) == ["mine.json", "same.json"]


def test_less_than_32_bits(run: Run, artifact: Path) -> None:
    folder = write_folder(Path("pictures"), wrong=0, each=4)
    assert "choose one" in complaint(run("export", artifact.name, "--half", "--int8"))
    assert "give --calibrate images" in complaint(run("export", artifact.name, "--int8"))
    result = done(run("export", artifact.name, "--int8", "--calibrate", folder, "--tolerance", "5", "--json"))
    found = json.loads(result.stdout)
    assert found["precision"] == "int8"
    assert found["nodes"]["QuantizeLinear"] > 0


def test_existing_file(run: Run, artifact: Path) -> None:
    Path("net.onnx").write_text("mine")
    assert "--force" in complaint(run("export", artifact.name, "--json"))
    assert Path("net.onnx").read_text() == "mine"


def test_unknown_opset(run: Run, artifact: Path) -> None:
    result = run("export", artifact.name, "--opset", "9")
    assert result.exit_code == 2
    assert "18 to 22" in complaint(result)


def test_folder_that_is_missing(run: Run, artifact: Path) -> None:
    result = run("export", artifact.name, "-o", "nowhere/net.onnx")
    assert result.exit_code == 1
    assert "does not exist" in complaint(result)


def test_the_file_must_be_recognisable(run: Run, artifact: Path) -> None:
    before = artifact.read_bytes()
    result = run("export", artifact.name, "-o", artifact.name, "--force")  # would have replaced the network
    assert result.exit_code == 2
    assert "ends in .onnx" in complaint(result)
    assert artifact.read_bytes() == before


def test_failed_check(run: Run, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = api.fold_program

    def wrong(program: Any, fits: Any) -> None:
        real(program, fits)
        next(program.module.parameters())[0] += 1.0

    monkeypatch.setattr(api, "fold_program", wrong)
    result = run("export", artifact.name, "--json", "--report", "net.json")
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: the folded network differs")
    assert len(result.stderr.strip().splitlines()) <= 3
    found = json.loads(result.stdout)
    assert found["parity"]["passed"] is False
    assert found["output"] is None
    assert [path.name for path in Path().iterdir()] == [artifact.name]


@pytest.fixture
def bent(artifact: Path) -> str:
    """An artifact with lambdas away from 1."""
    model = retrofit.load(artifact.name)
    for module in model.modules():
        if isinstance(module, retrofit.layers.BatchNormalNorm2d):
            torch.nn.init.uniform_(module.running_lambda, 0.5, 1.5)
    retrofit.save(model, "bent.safetensors")
    return "bent.safetensors"


def test_what_was_judged_on_noise_says_so(run: Run, bent: str) -> None:
    result = done(run("export", bent, "--fold", "poly", "--degree", "2", "--tolerance", "0.9"))
    assert "% of 3 random inputs" in result.stderr
    assert "warning: judged on 3 random inputs, which are unlike pictures" in result.stderr


@pytest.mark.parametrize("runtime", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.slow)])
def test_poly(run: Run, bent: str, runtime: str) -> None:
    folder = Path("photos/one")
    folder.mkdir(parents=True)
    for number in range(6):
        Image.effect_noise((200, 200), 20 + 20 * number).convert("RGB").save(folder / f"{number}.png")
    result = run(
        "export",
        bent,
        "-o",
        "net.onnx",
        "--fold",
        "poly",
        "--for",
        runtime,
        "--calibrate",
        "photos",
        "--tolerance",
        "0.9",
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["parity"]["batches"] == [1, 2]
    assert {layer["form"] for layer in found["layers"]} <= {
        "polynomial" if runtime == "onnxruntime" else "lines",
        "folded",
        "affine",
        "one branch",
        "two branches",
    }
    assert "rms error" in result.stderr
    assert "% of 3 images" in result.stderr
    assert "warning" not in result.stderr


def test_calibrate_folder_that_is_missing(run: Run, artifact: Path) -> None:
    result = run("export", artifact.name, "--fold", "poly", "--calibrate", "nowhere")
    assert result.exit_code == 1
    assert "nowhere" in complaint(result)
    assert not Path("net.onnx").exists()


def test_freezing_needs_images(run: Run, artifact: Path) -> None:
    result = run("export", artifact.name, "--freeze-lambda")
    assert result.exit_code == 2
    assert "--calibrate" in complaint(result)
