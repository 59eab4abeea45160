"""The folder of the hub: opened by us, by timm where it can, and refused by it where it would build another."""

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
from torch import nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.networks.models import open_model
from tests.networks.conftest import assert_same_answers

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def converted(to: str, strength: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model, _ = retrofit.convert(timm.create_model("test_resnet", num_classes=5).eval(), to, check=False)
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
    weights, details = {"kind": "pretrained", "from": "timm/test_resnet.r160_in1k"}, {"Accuracy": "12.5% top-1"}
    options = {"license": "apache-2.0", "details": details, "weights": weights}
    folder = retrofit.save_for_hub(converted("ln-pn", 0.5), tmp_path, **options)
    _, head, body = (folder / "README.md").read_text().split("---", 2)
    said = {"library_name": "retrofit", "tags": ["retrofit", "ln-pn", "timm"], "license": "apache-2.0"}
    assert yaml.safe_load(head) == said
    for fact in ("test_resnet", "Strength: 0.5", "12.5% top-1", "pretrained: timm/test_resnet", "US patent 12430552"):
        assert fact in body


def test_nothing_is_overwritten_unasked_and_nothing_half_written(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet")
    retrofit.save_for_hub(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(RetrofitError, match=r"holds model.safetensors, config.json, README.md already"):
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
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: Mock(create_repo=create, upload_folder=upload))
    download = Mock(side_effect=lambda _repo_id, name, **_: str((folder / name).resolve(strict=True)))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return folder


def test_pushed_and_loaded_again(hub: Path) -> None:
    model = converted("bnn")
    assert retrofit.push_to_hub(model, "net") == "https://hub/me/net/commit/1"
    assert sorted(file.name for file in hub.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    card = (hub / "README.md").read_text()
    assert "none is given" in card
    assert "US patent" not in card
    assert_same_answers(retrofit.load("hf-hub:me/net@v2"), model, X)
    huggingface_hub.hf_hub_download.assert_called_with("me/net", "model.safetensors", revision="v2")
    assert open_model("hf-hub:me/net").facts["target"] == "bnn"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"library_name": "retrofit"}, "hf-hub:me/net cannot be fetched"),  # its tensors are not there
        ({"architecture": "resnet18"}, "hf-hub:me/net does not exist"),  # left to timm
    ],
)
def test_what_is_not_there_whole_or_not_ours(hub: Path, config: dict[str, str], message: str) -> None:
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(config))
    with pytest.raises(RetrofitError, match=message):
        retrofit.load("hf-hub:me/net")
