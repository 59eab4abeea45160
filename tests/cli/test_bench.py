"""`retrofit bench`: the ratios, the JSON, and the refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run, complaint, done
from tests.half_resnet import FLAGS

FEW = ["-b", "2", "--rounds", "3"]


def test_an_artifact_is_measured_against_its_source(run: Run) -> None:
    done(run("convert", "test_resnet", "--to", "bnn"))
    result = done(run("bench", "test_resnet-bnn.safetensors", *FEW, "--json"))
    costs = json.loads(result.stdout)["costs"]
    assert [(cost["network"], cost["mode"]) for cost in costs] == [
        ("test_resnet-bnn.safetensors", "eval"),
        ("test_resnet", "eval"),
        ("test_resnet-bnn.safetensors", "train"),
        ("test_resnet", "train"),
    ]
    for converted, source in (costs[:2], costs[2:]):
        assert converted["time_ratio"]["median"] > 0
        assert converted["memory_ratio"] == converted["bytes"] / source["bytes"]
        assert source["time_ratio"] is None
    assert "time ratio" in result.stderr


def test_against_another(run: Run) -> None:
    words = ["test_resnet", "--against", "test_resnet2"]
    assert "test_resnet2" in complaint(run("bench", *words))
    result = run("bench", "test_resnet", "--against", "test_efficientnet", "--mode", "eval", *FEW, "--json")
    assert [cost["mode"] for cost in json.loads(result.stdout)["costs"]] == ["eval", "eval"]


def test_against_a_network_at_the_same_size(run: Run) -> None:
    done(run("convert", "test_resnet", "--to", "bnn", "--img-size", "48"))
    result = done(run("bench", "test_resnet-bnn.safetensors", "--against", "test_vit", "--mode", "eval", *FEW))
    assert f"batches of 2 at 3 x 48 x 48, {torch.get_num_threads()}" in result.stderr.replace("\n", " ")


def test_exported_files(run: Run) -> None:
    done(run("export", "test_resnet", *FLAGS, "--img-size", "32", "-o", "a.onnx"))
    done(run("export", "test_efficientnet", "--img-size", "48", "-o", "b.onnx"))
    result = done(run("bench", "a.onnx", "--against", "b.onnx", "--runtime", "onnxruntime", *FEW, "--json"))
    found = json.loads(result.stdout)
    assert found["runtime"] == "onnxruntime"
    one, other = found["costs"]
    assert (one["file"], other["file"]) == ("a.onnx", "b.onnx")
    assert one["time_ratio"]["median"] > 0
    assert other["time_ratio"] is None
    assert one["bytes"] == Path("a.onnx").stat().st_size
    Path("damaged.onnx").write_bytes(b"no protobuf")
    for words, message in (
        (["a.onnx", "--against", "b.onnx"], "--runtime"),
        (["a.onnx", "--runtime", "onnxruntime"], "--against"),
        (["a.onnx", "--against", "b.onnx", "--runtime", "onnxruntime", "--amp"], "drop --amp"),
        (["a.onnx", "--against", "absent.onnx", "--runtime", "onnxruntime"], "there is no file absent.onnx"),
        (["damaged.onnx", "--against", "b.onnx", "--runtime", "onnxruntime"], "is not an ONNX file"),
    ):
        assert message in complaint(run("bench", *words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["test_resnet"], "--against"),
        (["test_resnet", "--against", "test_resnet"], "against itself"),
        (["test_resnet", "--against", "net.onnx"], "compare two of a kind"),
        (["test_resnet", "--against", "test_vit", "--amp-dtype", "bfloat16"], "--amp"),
        (["test_resnet", "--device", "abacus"], "abacus"),
        (["test_resnet", "--rounds", "1"], "rounds"),
    ],
)
def test_refusals(run: Run, words: list[str], message: str) -> None:
    result = run("bench", *words)
    assert result.exit_code == 2
    assert message in complaint(result)
