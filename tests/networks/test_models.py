"""MODEL on the command line -> a network and whose weights it has."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch.optim.swa_utils import AveragedModel
from torchvision.models import WeightsEnum

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.networks import artifact, models
from retrofit.networks.models import odd_strengths, open_model, weights_sentence
from retrofit.record import ModelSource
from tests.finetune.conftest import small_network
from tests.networks.conftest import refused

OWN = "py:tests.networks.mynet:build"


@pytest.mark.parametrize(("text", "kwargs"), [("test_resnet", {}), ("test_vit", {"img_size": 64, "depth": 1})])
def test_opens_a_name(text: str, kwargs: dict[str, Any]) -> None:
    network = open_model(text, img_size=64, model_kwargs={"depth": 1} if kwargs else None)
    assert network.source == ModelSource("timm", text, kwargs)
    assert network.preprocess.input_size == (3, 64, 64)
    known = (network.labels, network.weights, network.warnings, network.artifact)
    assert known == (None, {"kind": "random", "from": None}, (), None)
    assert network.model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"kind": "random", "from": None}, "RANDOM (pass `pretrained=True` or `checkpoint=FILE`"),
        ({"kind": "pretrained", "from": "resnet50.a1_in1k"}, "pretrained (resnet50.a1_in1k)"),
        (
            {"kind": "checkpoint", "from": "x.pth", "key": "ema", "others": ["model"], "left_random": ["fc.bias"]},
            "checkpoint x.pth, its ema in PART (it also holds model: `checkpoint_key=NAME`)",
        ),
        ({"kind": "checkpoint", "from": "x\n" * 9999}, r"checkpoint x\nx\n"),
        ({"kind": "unknown", "from": None}, "of unknown origin"),
    ],
)
def test_weights_are_told(weights: dict[str, Any], words: str) -> None:
    said = weights_sentence(weights)
    assert said.startswith(f"weights: {words}")
    assert len(said) < 300


# --- weights from elsewhere


def test_loads_timms_pretrained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = timm.create_model("test_byobnet").state_dict()
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(trained))
    network = open_model("test_byobnet", pretrained=True)
    assert torch.equal(network.model.state_dict()["head.fc.weight"], trained["head.fc.weight"])
    assert network.weights == {"kind": "pretrained", "from": "test_byobnet.r160_in1k"}
    assert (network.labels or [])[0] == "n01440764"
    assert network.warnings == ()

    network = open_model("test_byobnet", pretrained=True, num_classes=2)
    assert torch.equal(network.model.state_dict()["stem.conv.weight"], trained["stem.conv.weight"])
    assert network.labels is None
    (warning,) = network.warnings
    assert "the classifier is RANDOM" in warning


def test_loads_torchvisions_pretrained_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained = open_model("tv:mobilenet_v3_large").model.state_dict()
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: dict(trained))
    network = open_model("tv:mobilenet_v3_large", pretrained=True, model_kwargs={"weights": "IMAGENET1K_V1"})
    assert torch.equal(network.model.classifier[3].weight, trained["classifier.3.weight"])
    assert network.weights == {"kind": "pretrained", "from": "tv:mobilenet_v3_large, IMAGENET1K_V1"}
    assert network.preprocess.crop_pct == pytest.approx(224 / 256)
    assert open_model("tv:mobilenet_v3_large", pretrained=True).preprocess.crop_pct == pytest.approx(224 / 232)
    with pytest.raises(UsageError, match="num_classes=2"):
        open_model("tv:mobilenet_v3_large", pretrained=True, num_classes=2)


@pytest.mark.parametrize(("architecture", "fixed"), [("vit_tiny_patch16_224", True), ("test_byobnet", False)])
def test_the_image_size_of_a_local_folder(tmp_path: Path, architecture: str, fixed: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture, "num_classes": 2}))
    text = f"local-dir:{tmp_path}"
    if fixed:
        with pytest.raises(UsageError, match=r"`model_kwargs=\{'img_size': 64\}`"):
            open_model(text, img_size=64)
        network = open_model(text, model_kwargs={"img_size": 64})
    else:
        network = open_model(text, img_size=64)
    assert network.preprocess.input_size == (3, 64, 64)
    assert network.model(torch.zeros(1, 3, 64, 64)).shape == (1, 2)


# --- mistakes


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a.safetensors", {"checkpoint": "x.pth", "num_classes": 3}, "drop `checkpoint`, `num_classes`"),
        ("resnet18", {"pretrained": True, "checkpoint": "x.pth"}, "pass one of them"),
        ("resnet18", {"num_classes": -1}, "`num_classes=-1` is out of range"),
        ("tv:resnet18", {"in_chans": 1}, "has no `in_chans`"),
        ("resnet18", {"model_kwargs": {"pretrained": True}}, "use `pretrained=True`"),
        ("tv:resnet18", {"model_kwargs": {"weights": "DEFAULT"}}, "pass `pretrained=True` too"),
        (OWN, {"pretrained": True}, "drop `pretrained`"),
        (OWN, {"model_kwargs": {"width": 4}}, "`model_kwargs` means nothing to .*write a function"),
        ("test_resnet", {"network": OWN}, "is none, drop it"),
    ],
)
def test_wrong_usage(text: str, options: Any, message: str) -> None:
    with refused(message, UsageError):
        open_model(text, **options)


def test_an_artifact_of_a_librarys_network_is_no_checkpoint_and_needs_no_network(tmp_path: Path) -> None:
    artifact.save(timm.create_model("test_byobnet"), path := tmp_path / "a.safetensors")
    with pytest.raises(RetrofitError, match="pass it as MODEL"):
        open_model("test_byobnet", checkpoint=path)
    with pytest.raises(UsageError, match=r"holds test_byobnet.*, which its library builds; drop `network`"):
        open_model(str(path), network=OWN)


def test_a_bad_checkpoint_is_found_before_weights_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "build", lambda *_: pytest.fail("too early"))
    with pytest.raises(RetrofitError, match="there is no checkpoint"):
        open_model("resnet18", checkpoint=tmp_path / "missing.pth")


# --- averages of weights that others made


def test_an_average_stands_at_no_strength_of_its_network() -> None:
    model = small_network("gn").model
    ours = ModelEmaV3(model, decay=0.999)
    torchs = AveragedModel(model, avg_fn=lambda mean, new, n: mean + 0.02 * (new - mean), use_buffers=True)
    for step in range(1, 51):
        retrofit.set_strength(model, step / 50)
        ours.update(model)
        torchs.update_parameters(model)
    assert odd_strengths(ours) is None  # timm's copies the strength
    assert retrofit.strength_of(ours.module) == 1.0
    for average in (torchs, torchs.eval()):
        assert "layers stand at strength 0." in (odd_strengths(average) or "")


@pytest.mark.parametrize("strength", [0.0, 0.333])
def test_a_strength_that_was_chosen_is_no_one_s_average(strength: float) -> None:
    model = small_network("ln").model
    retrofit.set_strength(model, strength)
    assert odd_strengths(model) is None
    model.layer1[0].bn1.set_strength(0.5)  # of a second conversion
    assert odd_strengths(model) is None
