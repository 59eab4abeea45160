"""`retrofit bench`: the ratios and the JSON."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run, answer, done

FEW = ["-b", "2", "--rounds", "3", "--json"]


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
