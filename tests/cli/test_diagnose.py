"""`retrofit diagnose`: the report and the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, answer, complaint, done

SMALL = ["--images", "4", "-b", "2", "--channels", "2"]


@pytest.mark.slow
def test_two_networks(run: Run, pictures: Path) -> None:
    done(run("convert", "test_resnet", "--to", "bnn", "--num-classes", "3"))
    words = ["test_resnet", "--num-classes", "3", "--against", "test_resnet-bnn.safetensors", "--data-dir", pictures]
    result = run("diagnose", *words, *SMALL, "--json")
    found = answer(result)
    assert list(found["networks"]) == ["test_resnet", "test_resnet-bnn"]
    assert found["networks"]["test_resnet"]["images"] == 4
    assert found["networks"]["test_resnet"]["input_noise"][0]["top1"] is not None  # as many classes as outputs
    assert "wrote test_resnet-diagnosis/index.html" in result.stderr
    saved = json.loads(Path("test_resnet-diagnosis/results.json").read_text())
    assert saved["networks"] == found["networks"]
    assert "--force" in complaint(run("diagnose", *words, *SMALL))
