"""How far a network is on its way stands in the output of every command that opens one, and in its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrofit.diagnose.plots import Plot
from tests.cli.conftest import Run, done
from tests.half_resnet import FLAGS
from tests.pictures import write_folder

DATA = ["--data-dir", "pictures"]


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["evaluate", *DATA, "-j", "0"], []),
        (["export", "-o", "net.onnx"], []),
        (["bench", "-b", "2", "--rounds", "3"], ["networks", "net.safetensors"]),
        (["diagnose", *DATA, "--images", "4", "-b", "2", "--channels", "2"], ["models", "net"]),
    ],
)
def test_strength_is_visible(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], where: list[str]
) -> None:
    monkeypatch.setattr(Plot, "png", lambda *_: b"")  # painting takes seconds
    write_folder(here / "pictures", each=2)
    made = ["--to", "bnn", "--strength", "0.5", "--num-classes", "3", "--img-size", "32", "-o", "net.safetensors"]
    done(run("convert", "test_resnet", *FLAGS, *made))
    result = done(run(words[0], "net.safetensors", *words[1:], "--json"))
    assert "strength: 0.5 in 8 converted layers" in result.stderr
    found = json.loads(result.stdout)
    for key in where:
        found = found[key]
    assert (found["target"], found["strength"]) == ("bnn", 0.5)


def test_a_plain_network_has_none(run: Run, here: Path) -> None:
    write_folder(here / "pictures", each=2)
    result = run("evaluate", "test_resnet", "--num-classes", "3", *DATA, "-j", "0", "--json")
    assert "strength" not in result.stderr
    assert json.loads(result.stdout)["strength"] is None
