"""`retrofit inspect`: the census and the plan, and nothing written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run, answer, complaint, done


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
