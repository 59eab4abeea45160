"""A command gives what the Python function of its name gives: the same answer, and the same file."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import retrofit
from retrofit.images.dataset import sample_batches
from retrofit.networks.models import Network, open_model
from tests.cli.conftest import Run, answer, complaint, done
from tests.networks.conftest import FLAGS


def plain(values: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(values).replace("Infinity", "null"))
    return read


def assert_same(path: str, model: nn.Module) -> None:
    written, state = retrofit.load(path).state_dict(), model.state_dict()
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], value) for name, value in state.items())


def artifact(run: Run, *words: str) -> Network:
    """A converted network, in a.safetensors too."""
    size = ["--num-classes", "3", "--img-size", "32"]
    done(run("convert", "test_resnet", *FLAGS, *size, *words, "-o", "a.safetensors"))
    return open_model("a.safetensors")


@pytest.mark.parametrize(
    ("to", "words", "options"),
    [
        ("gn", "--groups 4 --skip layer1 --strength 0.5 --calibrate pictures",
         {"groups": 4, "skip": ["layer1"], "strength": 0.5}),
        ("bnn", "--noise paper --noise-kind gaussian-dropout --alpha 0.5",
         {"noise": "paper", "noise_kind": "gaussian-dropout", "alpha": 0.5}),
        ("gn-pn", "--groups auto --calibrate pictures --no-pn-params --ws --from bn",
         {"groups": "auto", "pn_params": False, "ws": True, "source": "bn"}),
    ],
)  # fmt: skip
def test_convert(run: Run, pictures: Path, to: str, words: str, options: dict[str, Any]) -> None:
    network = artifact(run, "--to", "bnn", "--only", "^bn1$")
    result = answer(run("convert", "a.safetensors", "--json", "--to", to, *words.split()))
    if "calibrate" in words:
        options["calibrate"] = sample_batches(pictures, network.preprocess)
    model, report = retrofit.convert(network.model, to, **options, input_size=(3, 32, 32))
    expected = plain(report.to_dict())
    assert ("agreement" in expected) == ("calibrate" in words)
    assert {name: result[name] for name in expected} == expected
    assert_same(result["output"], model)


def test_bake(run: Run, pictures: Path) -> None:
    network = artifact(run, "--to", "ln", "--strength", "1")
    called = run("bake", "a.safetensors", "--calibrate", pictures, "--tolerance", "9", "--json")
    result = answer(called)
    layers = len(result["layers"])
    assert f"baked {layers} of {layers} layers on 6 images" in called.stderr
    assert "next: retrofit export a-baked.safetensors" in called.stderr
    images = sample_batches(pictures, network.preprocess)
    model, report = retrofit.bake(network.model, images, tolerance=9)
    assert result == {"model": "test_resnet", "output": "a-baked.safetensors", **plain(report.to_dict())}
    assert_same(result["output"], model)


def test_export(run: Run, pictures: Path) -> None:
    network = artifact(run, "--to", "bnn", "--strength", "1")
    for name, buffer in network.model.named_buffers():
        if name.endswith("running_lambda"):
            nn.init.uniform_(buffer, 0.5, 1.5)
    retrofit.save(network.model, "a.safetensors", force=True)
    words = ["--fold", "poly", "--calibrate", pictures, "--tolerance", "0.9", "--opset", "20"]
    called = run("export", "a.safetensors", *words, "--json")
    images = sample_batches(pictures, network.preprocess, images=256)
    report = retrofit.export_onnx(network.model, "b.onnx", fold="poly", opset=20, calibrate=images, tolerance=0.9)
    assert answer(called) == plain({**report.to_dict(), "output": "a.onnx"})
    assert onnx.load("a.onnx") == onnx.load("b.onnx")
    assert "rms error" in called.stderr
    assert "% of 6 images" in called.stderr
    assert "warning" not in called.stderr


@pytest.mark.slow
def test_diagnose_writes_what_it_says(run: Run, pictures: Path) -> None:
    done(run("convert", "test_resnet", "--to", "bnn", "--num-classes", "3"))
    words = ["test_resnet", "--num-classes", "3", "--against", "test_resnet-bnn.safetensors", "--data-dir", pictures]
    words += ["--images", "4", "-b", "2", "--channels", "2"]
    result = run("diagnose", *words, "--json")
    found = answer(result)
    assert list(found["networks"]) == ["test_resnet", "test_resnet-bnn"]
    assert found["networks"]["test_resnet"]["images"] == 4
    assert found["networks"]["test_resnet"]["input_noise"][0]["top1"] is not None  # as many classes as outputs
    assert "wrote test_resnet-diagnosis/index.html" in result.stderr
    saved = json.loads(Path("test_resnet-diagnosis/results.json").read_text())
    assert saved["networks"] == found["networks"]
    assert "--force" in complaint(run("diagnose", *words))
