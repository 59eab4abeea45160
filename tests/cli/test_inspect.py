"""`retrofit inspect`: the census and the plan, and nothing written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run, complaint, done


def test_the_census(run: Run, here: Path) -> None:
    result = run("inspect", "test_efficientnet")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert re.search(r"\d+ +BatchNormAct2d +bn +\d+-\d+ +bn1, ", result.stderr)
    assert result.stderr.splitlines()[-1].endswith("normalization layers; add --to TARGET to see what becomes of them")
    assert os.listdir(here) == []


def test_json_lists_every_layer(run: Run, here: Path) -> None:
    values = json.loads(run("inspect", "tv:resnet18", "--json").stdout)
    assert set(values) == {"schema", "model", "library", "layers", "counts", "functional"}
    assert (values["schema"], values["model"], values["library"]) == (1, "resnet18", "torchvision")
    assert values["counts"] == {"BatchNorm2d": 20}
    first = {"name": "bn1", "source": "BatchNorm2d", "family": "bn", "channels": 64, "status": "known", "reason": ""}
    assert values["layers"][0] == first
    assert len(values["layers"]) == 20


def test_converted_layers_show_their_strength(run: Run, here: Path) -> None:
    done(run("convert", "test_coatnet", "--to", "bnn", "--strength", "0.75", "-o", "a.safetensors"))
    done(run("convert", "a.safetensors", "--to", "lnn", "-o", "b.safetensors"))
    result = run("inspect", "b.safetensors", "--json")
    shown = {row["source"]: row["strength"] for row in json.loads(result.stdout)["layers"]}
    assert shown == {"BatchNormalNormAct2d": 0.75, "LayerNormalNorm2d": 0}
    assert re.search(r"BatchNormalNormAct2d .* 0.75 .* already converted", result.stderr)


def test_the_plan(run: Run, here: Path) -> None:
    result = run("inspect", "test_resnet", "--to", "bnn", "--skip", "layer1", "--json")
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    plan = values["plan"]
    assert [row["name"] for row in plan["layers"]] == [row["name"] for row in values["layers"]]
    assert plan["to"] == "bnn"
    kept = sum("layer1" in row["name"] for row in plan["layers"])
    assert plan["counts"] == {"converted": len(plan["layers"]) - kept, "kept": kept, "unsupported": 0}
    assert re.search(r"\(kept\) .* matched by --skip layer1", result.stderr)
    assert result.stderr.splitlines()[-1] == f"{len(plan['layers']) - kept} converted, {kept} kept, 0 unsupported"
    assert os.listdir(here) == []


def test_activations_are_part_of_the_plan(run: Run, here: Path) -> None:
    stderr = run("inspect", "test_resnet", "--to", "gn-pn").stderr
    assert "proxy-normalized" in stderr
    assert "(left)" in stderr


def test_a_model_without_normalization_layers(run: Run, here: Path) -> None:
    result = run("inspect", "tv:alexnet")
    assert result.exit_code == 0
    assert result.stderr.startswith("0 normalization layers")


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        (["resnet51"], 2, "did you mean"),
        (["notes.txt"], 2, "unknown model 'notes.txt'; give"),
        (["test_resnet", "--skip", "bn1"], 2, "--skip belongs to a conversion; give --to"),
        (["test_resnet", "--from", "bn"], 2, "--from belongs"),
        (["test_resnet", "--no-pn-params"], 2, "--pn-params belongs"),
        (["test_vit", "--to", "bnn"], 1, "--to lnn"),
        (["test_resnet", "--to", "bnn", "--only", "zzz"], 1, "matches none"),
        (["absent.safetensors"], 1, "does not exist"),
        (["."], 2, "is a folder and no network; give an artifact"),
        (["there.txt"], 2, "is a file and no network; give an artifact"),
        (["weights.pth"], 2, "is not a network's name or an artifact; give a name"),
    ],
)
def test_refusals(run: Run, here: Path, words: list[str], code: int, pattern: str) -> None:
    (here / "there.txt").touch()
    result = run("inspect", *words)
    assert result.exit_code == code
    assert re.search(pattern, complaint(result))


@pytest.mark.parametrize(
    "words", [["--to", "ln-pn"], ["--to", "ln-pn", "--from", "gn"], ["--to", "bnn", "--from", "gn"], ["--to", "gn"]]
)
def test_a_hint_never_names_the_command_that_gave_it(run: Run, words: list[str]) -> None:
    result = run("inspect", "test_efficientnet_gn", *words)
    assert result.exit_code in (1, 2)
    line = complaint(result)
    assert "inspect MODEL --to" not in line
    assert "--from gn" not in line
