"""What `retrofit inspect`, `bench` and `export` say, to people and to programs; inspect writes nothing."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from click.testing import Result

from retrofit.cli.export import _show
from retrofit.compare import Comparison
from retrofit.export import api
from tests.cli.conftest import Run, answer, complaint, done

FEW = ["-b", "2", "--rounds", "3", "--json"]


# --- inspect


def test_the_census(run: Run, here: Path) -> None:
    result = done(run("inspect", "test_efficientnet"))
    assert result.stdout == ""
    assert re.search(r"\d+ +BatchNormAct2d +bn +\d+-\d+ +bn1, ", result.stderr)
    assert result.stderr.splitlines()[-1].endswith("normalization layers; add --to TARGET to see what becomes of them")
    assert os.listdir(here) == []
    full = done(run("inspect", "test_efficientnet", "--full")).stderr.splitlines()
    assert full[0].split() == ["bn1", "BatchNormAct2d", "bn"]
    assert done(run("inspect", "tv:alexnet")).stderr.startswith("0 normalization layers;")


def test_json_lists_every_layer(run: Run) -> None:
    values = answer(run("inspect", "tv:resnet18", "--json"))
    assert set(values) == {"schema", "model", "library", "layers", "counts", "functional"}
    assert (values["schema"], values["model"], values["library"]) == (1, "resnet18", "torchvision")
    assert values["counts"] == {"BatchNorm2d": 20}
    first = {"name": "bn1", "source": "BatchNorm2d", "family": "bn", "channels": 64, "status": "known", "reason": ""}
    assert values["layers"][0] == first
    assert len(values["layers"]) == 20


def test_the_plan(run: Run) -> None:
    result = run("inspect", "test_resnet", "--to", "bnn", "--skip", "layer1", "--json")
    values = answer(result)
    plan = values["plan"]
    names = [row["name"] for row in plan["layers"]]
    assert names == [row["name"] for row in values["layers"]]
    kept = sum("layer1" in name for name in names)
    assert plan["counts"] == {"converted": len(names) - kept, "kept": kept, "unsupported": 0}
    assert re.search(r"\(kept\) .* matched by --skip layer1", result.stderr)
    assert result.stderr.splitlines()[-1] == f"{len(names) - kept} converted, {kept} kept, 0 unsupported"
    stderr = run("inspect", "test_resnet", "--to", "gn-pn", "--full").stderr
    assert re.search(r"act1 +ReLU +proxy-normalized", stderr)
    assert "(left)" in stderr


@pytest.mark.parametrize("words", [["--to", "ln-pn"], ["--to", "ln-pn", "--from", "gn"], ["--to", "bnn"]])
def test_a_hint_never_names_the_command_that_gave_it(run: Run, words: list[str]) -> None:
    line = complaint(run("inspect", "test_efficientnet_gn", *words))
    assert "inspect MODEL --to" not in line
    assert "--from gn" not in line


# --- bench


def test_an_artifact_is_measured_against_its_source(run: Run) -> None:
    done(run("convert", "test_resnet", "--to", "bnn", "--img-size", "64", "-o", "net.safetensors"))
    result = run("bench", "net.safetensors", *FEW)
    costs = answer(result)["costs"]
    assert [(cost["mode"], cost["network"]) for cost in costs] == [
        (mode, network) for mode in ("eval", "train") for network in ("net.safetensors", "test_resnet")
    ]
    for converted, source in (costs[:2], costs[2:]):
        assert converted["time_ratio"]["median"] > 0
        assert converted["memory_ratio"] == converted["bytes"] / source["bytes"]
        assert source["time_ratio"] is None
    assert "time ratio" in result.stderr
    assert "batches of 2 at 3 x 64 x 64, " in result.stderr


def test_another_network_gets_images_of_the_same_size(run: Run) -> None:
    words = ["test_resnet", "--img-size", "48", "--against", "test_vit", "--mode", "eval"]
    result = run("bench", *words, *FEW)
    assert [cost["mode"] for cost in answer(result)["costs"]] == ["eval", "eval"]
    assert f"batches of 2 at 3 x 48 x 48, {torch.get_num_threads()} thread of a" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("exported")
def test_exported_files(run: Run, classifier: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        shutil.copy(classifier / "net.onnx", name)
    found = answer(run("bench", "a.onnx", "--against", "b.onnx", *FEW))
    assert found["runtime"] == "onnxruntime"
    one, other = found["costs"]
    assert (one["file"], other["file"]) == ("a.onnx", "b.onnx")
    assert one["time_ratio"]["median"] > 0
    assert other["time_ratio"] is None
    assert one["bytes"] == Path("a.onnx").stat().st_size


# --- export


def test_export_and_report(classifier: Path, exported: Result) -> None:
    found = answer(exported)
    assert (classifier / "net.json").read_text() == exported.stdout
    assert (found["schema"], found["model"], found["fold"], found["opset"]) == (1, "test_resnet.r160_in1k", "exact", 18)
    assert (found["target"], found["strength"], found["weights"]["kind"]) == ("ln", 1.0, "unknown")
    assert (found["output"], found["bytes"]) == ("net.onnx", (classifier / "net.onnx").stat().st_size)
    assert set(found["parity"]) == {"batches", "max_abs_diff", "scale", "top1_agreement", "tolerance", "passed"}
    assert found["parity"]["passed"] is True
    assert found["nodes"]["Conv"] > 0
    assert len(found["layers"]) > 3
    for said in ("check passed: largest difference", "wrote net.onnx (", "wrote net.json"):
        assert said in exported.stderr
    metadata = {entry.key: entry.value for entry in onnx.load(classifier / "net.onnx").metadata_props}
    assert (metadata["model"], metadata["target"], metadata["strength"]) == (found["model"], "ln", "1.0")
    for name in ("input_size", "mean", "std", "crop_pct"):
        assert found["preprocess"][name] == json.loads(metadata[name])


def test_failed_check(run: Run, artifact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = api.fold_program

    def wrong(program: Any, fits: Any) -> None:
        real(program, fits)
        next(program.module.parameters())[0] += 1.0

    monkeypatch.setattr(api, "fold_program", wrong)
    result = run("export", artifact, "--json", "--report", "net.json")
    assert result.exit_code == 1
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("error: the folded network differs")
    assert len(lines) <= 3
    found = json.loads(result.stdout)
    assert (found["parity"]["passed"], found["output"], found["target"]) == (False, None, "ln")
    assert [path.name for path in Path().iterdir()] == [artifact]


def test_what_was_judged_on_noise_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"layers": (), "judged": "3 random inputs", "guessed": True, "output": "a.onnx", "bytes": 1, "nodes": {}}
    _show(SimpleNamespace(**facts, parity=Comparison(0.1, 1.0, top1_agreement=0.5)))  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "the same top-1 for 50.0% of 3 random inputs" in said
    assert "warning: judged on 3 random inputs, which are unlike photographs" in said
