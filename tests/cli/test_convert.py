"""`retrofit convert`: what it writes and says."""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import timm
import torch

import retrofit
from retrofit import surgery
from retrofit.cli.network import file_stem
from retrofit.registry import TARGETS
from tests.cli.conftest import Run, answer, complaint, done

BNN = ("test_resnet", "--to", "bnn")


def test_what_people_read(run: Run) -> None:
    result = done(run("convert", *BNN, "--skip", "layer[1]", "--noise", "0.4", "--alpha", "0"))
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert lines[0].startswith("weights: RANDOM (pass --pretrained")
    assert re.search(r"BatchNorm2d +BatchNormalNorm2d", result.stderr)
    assert "options: noise=0.4, alpha=0\n" in result.stderr
    assert "'layer[1]'" in result.stderr  # brackets are not markup
    assert "\x1b" not in result.stderr
    assert "check passed: largest difference" in result.stderr
    assert lines[-2].startswith("wrote test_resnet-bnn.safetensors (")
    assert lines[-1] == "next: retrofit evaluate test_resnet-bnn.safetensors --data-dir DIR"


def test_what_programs_read(run: Run, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = answer(run("convert", *BNN, "--skip", "^bn1$", "-o", "a.safetensors", "--json"))
    assert capfd.readouterr().out == ""  # nor has anything been written past Python
    settled = "schema model library to weights layers counts params check strength output"
    assert set(values) >= set(settled.split())
    assert (values["schema"], values["model"], values["library"], values["to"]) == (
        1,
        "test_resnet",
        "timm",
        "bnn",
    )
    assert values["weights"] == {"kind": "random", "from": None}
    assert set(values["layers"][0]) == {"name", "source", "target", "status", "reason"}
    assert values["counts"] == {"converted": len(values["layers"]) - 1, "kept": 1, "unsupported": 0}
    assert values["params"]["before"] == sum(
        p.numel() for p in timm.create_model("test_resnet").parameters()
    )
    assert set(values["check"]) == {"max_abs_diff", "scale", "tolerance", "passed", "identity"}
    assert (values["check"]["passed"], values["strength"], values["output"]) == (
        True,
        0,
        "a.safetensors",
    )
    assert os.listdir(here) == ["a.safetensors"]


def test_a_second_conversion_leaves_the_first_at_its_strength(run: Run) -> None:
    first = run("convert", "test_coatnet", "--to", "bnn", "--strength", "1", "-o", "a.safetensors")
    done(first)
    # lambda starts at 1
    assert "at strength 1 the output on the example inputs is still the source's" in first.stderr
    result = run(
        "convert",
        "a.safetensors",
        "--to",
        "lnn",
        "-o",
        "b.safetensors",
        "--strength",
        "0.5",
        "--json",
    )
    values = answer(result)
    assert (values["check"]["passed"], values["strength"]) == (True, 0.5)
    assert (
        "note: 7 layers converted before: their strength stays, --strength sets the new ones"
        in result.stderr
    )
    assert (
        "at strength 0.5 the output on the example inputs changes: largest difference"
        in result.stderr
    )
    second = retrofit.load("b.safetensors")
    stand = {
        type(layer).__name__: float(layer.strength) for layer in surgery.strength_layers(second)
    }
    assert stand == {"BatchNormalNormAct2d": 1.0, "LayerNormalNorm2d": 0.5}
    census = run("inspect", "b.safetensors", "--json")
    assert {row["source"]: row["strength"] for row in answer(census)["layers"]} == stand
    assert re.search(r"BatchNormalNormAct2d .* 1 .* already converted", census.stderr)


def test_a_target_without_strength_says_how_much_the_output_changes(
    run: Run, pictures: Path
) -> None:
    result = run("convert", "test_resnet", "--to", "frn-tlu", "--calibrate", pictures, "--json")
    values = answer(result)
    assert (values["strength"], values["check"]["identity"], values["check"]["passed"]) == (
        None,
        False,
        False,
    )
    difference = f"{values['check']['max_abs_diff']:.3g}"
    assert f"frn-tlu does not start as its source: largest difference {difference}" in result.stderr
    assert re.search(r"\nuntrained, \d+\.\d% of the predictions are the source's", result.stderr)


def test_without_a_target_it_advises_three(run: Run) -> None:
    result = run("convert", "test_resnet")
    assert (result.exit_code, result.stdout) == (2, "")
    *advice, error = result.stderr.splitlines()
    assert len(advice) == 3
    assert all("--to " in line for line in advice)
    named = set(re.findall(r"--to (\S+?)[,;]?(?: |$)", result.stderr))
    assert named <= set(TARGETS)
    assert error.startswith("error: Missing option '--to'; see ")


def test_the_report_does_not_grow_with_the_model(run: Run) -> None:
    short = run("inspect", "test_resnet", "--to", "bnn").stderr.splitlines()
    assert len(run("inspect", "resnet50", "--to", "bnn").stderr.splitlines()) == len(short)


def test_the_next_step_fits_a_network_that_does_not_classify(run: Run) -> None:
    network = "nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))"
    Path("dense.py").write_text(f"from torch import nn\ndef build():\n    return {network}\n")
    said = done(run("convert", "py:dense:build", "--to", "bnn", "-o", "dense.safetensors")).stderr
    assert "\nnext: model = retrofit.load('dense.safetensors', into=YOUR_NETWORK)" in said


def test_names_of_output_files() -> None:
    stems = {
        "resnet50.a1_in1k": "resnet50.a1_in1k",
        "tv:resnet50": "resnet50",
        "local-dir:models/mine": "mine",
    }
    stems |= {
        "hf-hub:timm/resnet50.a1_in1k": "resnet50.a1_in1k",
        "out/resnet50-bnn.safetensors": "resnet50-bnn",
    }
    stems |= {"runs/lite0-ln/best.safetensors": "lite0-ln-best"}
    assert {model: file_stem(model) for model in stems} == stems


def test_which_weights_of_a_checkpoint_were_taken_is_said_and_recorded(run: Run) -> None:
    trained = timm.create_model("test_byobnet").state_dict()
    trained["stem.bn.bias"][0] = torch.nan
    backbone = {
        f"net.{name}": value for name, value in trained.items() if not name.startswith("head.fc")
    }
    torch.save(
        {"model": {name: value + 1 for name, value in trained.items()}, "model_ema": backbone},
        "x.pth",
    )
    words = ("convert", "test_byobnet", "--to", "bnn", "--checkpoint", "x.pth", "--json")
    refused = complaint(run(*words))
    assert re.search(r"2 missing \(head.fc.weight, head.fc.bias\); .*--checkpoint-partial", refused)
    result = run(*words, "--checkpoint-partial")
    assert (
        "checkpoint x.pth, its model_ema in PART (it also holds model: --checkpoint-key NAME)"
        in result.stderr
    )
    assert re.search(r"warning: .*NaN.*stem\.bn\.bias", result.stderr)
    assert answer(result)["weights"] == {
        **{"kind": "checkpoint", "from": "x.pth", "key": "model_ema", "others": ["model"]},
        "left_random": ["head.fc.weight", "head.fc.bias"],
    }


def test_a_failed_check_writes_nothing(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = surgery.conversion.execute

    def spoiling(*args: Any) -> Any:
        model, report = execute(*args)
        model.bn1.eps = 10.0
        return model, report

    monkeypatch.setattr(surgery.conversion, "execute", spoiling)
    result = run("convert", *BNN, "--json")
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert (values["check"]["passed"], values["output"]) == (False, None)
    assert "check FAILED: largest difference" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        "error: the converted network is not the function of its source"
    )
    assert os.listdir(here) == []


@pytest.mark.parametrize("name", ["test_resnet", "tv:mobilenet_v3_small"])
def test_a_random_network_asks_nothing_of_the_net(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = Mock(side_effect=OSError("there is no network here"))
    for owner, function in (
        (socket, "getaddrinfo"),
        (socket, "create_connection"),
        (socket.socket, "connect"),
    ):
        monkeypatch.setattr(owner, function, asks)
    done(run("convert", name, "--to", "bnn", "-o", "a.safetensors", "--img-size", "64"))
    retrofit.load("a.safetensors")
    asks.assert_not_called()
