"""MODEL on the command line -> a network and whose weights it has.

And the folder of the hub: opened by us, by timm where it can, and refused by it where it would
build another.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import timm
import torch
import yaml
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.models import WeightsEnum

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.strength import odd_strengths
from retrofit.networks import artifact
from retrofit.networks.open_model import open_model, weights_sentence
from retrofit.record import ModelSource
from tests.finetune.conftest import small_network
from tests.networks.conftest import assert_same_answers, refused

MINE = "py:tests.networks.mynet"
OWN = f"{MINE}:build"


@pytest.mark.parametrize(
    ("text", "kwargs"), [("test_resnet", {}), ("test_vit", {"img_size": 64, "depth": 1})]
)
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
            {
                "kind": "checkpoint",
                "from": "x.pth",
                "key": "ema",
                "others": ["model"],
                "left_random": ["fc.bias"],
            },
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
    # A file takes no other weights.
    assert "pretrained=True" not in weights_sentence(weights, "a.safetensors")


# --- weights from elsewhere


def test_loads_timms_pretrained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = timm.create_model("test_byobnet").state_dict()
    monkeypatch.setattr(
        "timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(trained)
    )
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


def test_loads_torchvisions_pretrained_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained = open_model("tv:mobilenet_v3_large").model.state_dict()
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: dict(trained))
    network = open_model(
        "tv:mobilenet_v3_large", pretrained=True, model_kwargs={"weights": "IMAGENET1K_V1"}
    )
    assert torch.equal(network.model.classifier[3].weight, trained["classifier.3.weight"])
    assert network.weights == {"kind": "pretrained", "from": "tv:mobilenet_v3_large, IMAGENET1K_V1"}
    assert network.preprocess.crop_pct == pytest.approx(224 / 256)
    assert open_model(
        "tv:mobilenet_v3_large", pretrained=True
    ).preprocess.crop_pct == pytest.approx(224 / 232)
    with pytest.raises(UsageError, match="num_classes=2"):
        open_model("tv:mobilenet_v3_large", pretrained=True, num_classes=2)


@pytest.mark.parametrize(
    ("architecture", "fixed"), [("vit_tiny_patch16_224", True), ("test_byobnet", False)]
)
def test_the_image_size_of_a_local_folder(tmp_path: Path, architecture: str, fixed: bool) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": architecture, "num_classes": 2})
    )
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
    ("text", "options", "error", "message"),
    [
        (
            "a.safetensors",
            {"checkpoint": "x.pth", "num_classes": 3},
            UsageError,
            "drop `checkpoint`, `num_classes`",
        ),
        (
            "a.safetensors",
            {"match": "order", "checkpoint_key": "model", "checkpoint_partial": True},
            UsageError,
            "drop `match`, `checkpoint_key`, `checkpoint_partial`",
        ),
        ("a.safetensors", {"num_classes": 0}, UsageError, "drop `num_classes`"),
        ("resnet18", {"pretrained": True, "checkpoint": "x.pth"}, UsageError, "pass one of them"),
        ("tv:resnet18", {"in_chans": 1}, UsageError, "cannot build tv:resnet18 with in_chans=1: "),
        ("resnet18", {"img_size": 0}, UsageError, r"no images have size \(3, 0, 0\)"),
        ("resnet18", {"model_kwargs": {"pretrained": True}}, UsageError, "use `pretrained=True`"),
        (
            "tv:resnet18",
            {"model_kwargs": {"weights": "DEFAULT"}},
            UsageError,
            "pass `pretrained=True` too",
        ),
        (OWN, {"pretrained": True}, UsageError, "drop `pretrained`"),
        (
            OWN,
            {"model_kwargs": {"width": 4}},
            UsageError,
            "`model_kwargs` means nothing to .*write a function",
        ),
        ("test_resnet", {"network": OWN}, UsageError, "is none, drop it"),
        ("py:", {}, UsageError, "cannot import py: .* write py:package.module:callable"),
        (f"{OWN}()", {}, UsageError, "cannot import .*invalid format"),
        (
            "py:not_here:build",
            {},
            UsageError,
            "cannot import py:not_here:build .*ModuleNotFoundError.* PYTHONPATH",
        ),
        (f"{MINE}:bild", {}, UsageError, "AttributeError.*no attribute 'bild'"),
        (f"{MINE}:NUMBER", {}, UsageError, "is a int; name a function or class"),
        (
            f"{MINE}:broken",
            {},
            RetrofitError,
            r"broken builds no network \(RuntimeError: no weights at all\)",
        ),
        (f"{MINE}:nothing", {}, RetrofitError, "returns a str; let it return a torch.nn.Module"),
    ],
)
def test_wrong_usage_and_names_that_build_nothing(
    text: str, options: Any, error: Any, message: str
) -> None:
    with refused(message, error):
        open_model(text, **options)


def test_an_artifact_is_no_checkpoint(tmp_path: Path) -> None:
    artifact.save(timm.create_model("test_byobnet"), path := tmp_path / "a.safetensors")
    with pytest.raises(RetrofitError, match="pass it as MODEL"):
        open_model("test_byobnet", checkpoint=path)
    with pytest.raises(RetrofitError, match="do not fit"):
        open_model(str(path), network=OWN)


def test_a_bad_checkpoint_is_found_before_weights_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("retrofit.networks.open_model.build", lambda *_: pytest.fail("too early"))
    with pytest.raises(RetrofitError, match="there is no checkpoint"):
        open_model("resnet18", checkpoint=tmp_path / "missing.pth")


# --- averages of weights that others made


def test_an_average_stands_at_no_strength_of_its_network() -> None:
    model = small_network("gn").model
    ours = ModelEmaV3(model, decay=0.999)
    torchs = AveragedModel(
        model, avg_fn=lambda mean, new, n: mean + 0.02 * (new - mean), use_buffers=True
    )
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


# --- the hub

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def converted(to: str, strength: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model, _ = retrofit.convert(
        timm.create_model("test_resnet", num_classes=5).eval(), to, check=False
    )
    if to != "frozen":
        retrofit.set_strength(model, strength)
    return model


def test_a_converted_network_comes_back_and_timm_refuses_it(tmp_path: Path) -> None:
    model = converted("frozen")
    folder = retrofit.save_for_hub(model, tmp_path / "model")
    assert_same_answers(retrofit.load(f"local-dir:{folder}"), model, X)
    network = open_model(f"local-dir:{folder}")
    assert network.facts["target"] == "frozen"
    assert_same_answers(network.model, model, X)
    with pytest.raises(RuntimeError, match=r"frozen of test_resnet.*: open it with retrofit.load"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_a_plain_network_at_its_source_opens_with_timm(tmp_path: Path) -> None:
    model = retrofit.plain(converted("bnn", 0.0))
    folder = retrofit.save_for_hub(model, tmp_path)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert_same_answers(theirs, model, X)
    assert_same_answers(retrofit.load(f"local-dir:{folder}"), model, X)
    assert timm.data.resolve_data_config({}, model=theirs)["input_size"] == (3, 160, 160)


def test_the_card_says_what_the_manifest_knows(tmp_path: Path) -> None:
    weights, details = (
        {"kind": "pretrained", "from": "timm/test_resnet.r160_in1k"},
        {"Accuracy": "12.5% top-1"},
    )
    options = {"license": "apache-2.0", "details": details, "weights": weights}
    folder = retrofit.save_for_hub(converted("ln-pn", 0.3), tmp_path, **options)
    _, head, body = (folder / "README.md").read_text().split("---", 2)
    said = {
        "library_name": "retrofit",
        "tags": ["retrofit", "ln-pn", "timm"],
        "license": "apache-2.0",
    }
    assert yaml.safe_load(head) == said
    for fact in (
        "test_resnet",
        "Strength: 0.3 (0: the base model, 1: the target)",
        "12.5% top-1",
        "pretrained: timm/test_resnet",
        "US patent 12430552",
    ):
        assert fact in body


def test_nothing_is_overwritten_unasked_and_nothing_half_written(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet")
    retrofit.save_for_hub(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(
        RetrofitError, match=r"holds model.safetensors, config.json, README.md already"
    ):
        retrofit.save_for_hub(model, tmp_path)
    with pytest.raises(RetrofitError, match=r"README.md is a file; name a folder"):
        retrofit.save_for_hub(model, tmp_path / "README.md")
    model.reset_classifier(3)
    maxpool, model.maxpool = model.maxpool, nn.Tanh()
    with pytest.raises(RetrofitError):
        retrofit.save_for_hub(model, tmp_path, force=True)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    model.maxpool = maxpool
    retrofit.save_for_hub(model, tmp_path, force=True)
    assert (tmp_path / "model.safetensors").read_bytes() != before


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the hub, whose client writes and reads it."""
    folder = tmp_path / "hub"

    def upload(repo_id: str, folder_path: Path, **_: Any) -> Any:
        shutil.copytree(folder_path, folder)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    create = Mock(side_effect=lambda repo_id, **_: SimpleNamespace(repo_id=f"me/{repo_id}"))
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda **_: Mock(create_repo=create, upload_folder=upload)
    )
    download = Mock(
        side_effect=lambda _repo_id, name, **_: str((folder / name).resolve(strict=True))
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return folder


def test_pushed_and_loaded_again(hub: Path) -> None:
    model = converted("bnn")
    assert retrofit.push_to_hub(model, "net") == "https://hub/me/net/commit/1"
    assert sorted(file.name for file in hub.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    card = (hub / "README.md").read_text()
    assert "none is given" in card
    assert "US patent" not in card
    assert_same_answers(retrofit.load("hf-hub:me/net@v2"), model, X)
    huggingface_hub.hf_hub_download.assert_called_with("me/net", "model.safetensors", revision="v2")
    assert open_model("hf-hub:me/net").facts["target"] == "bnn"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"library_name": "retrofit"},
            "hf-hub:me/net cannot be fetched",
        ),  # its tensors are not there
        ({"architecture": "resnet18"}, "there is no artifact at hf-hub:me/net"),  # left to timm
    ],
)
def test_what_is_not_there_whole_or_not_ours(
    hub: Path, config: dict[str, str], message: str
) -> None:
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(config))
    with pytest.raises(RetrofitError, match=message):
        retrofit.load("hf-hub:me/net")
