"""The folder of the hub: opened by us, by timm where it can, and refused by it where it would build another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


class Hub:
    """The hub and its client, with a folder in its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str, str | None]] = []

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, repo_id: str, folder_path: Path, **_: Any) -> Any:
        shutil.copytree(folder_path, self.folder)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    def download(self, repo_id: str, name: str, revision: str | None = None) -> str:
        self.asked.append((repo_id, name, revision))
        return str((self.folder / name).resolve(strict=True))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    return hub


def test_pushed_and_loaded_again(hub: Hub) -> None:
    model = converted("bnn")
    assert retrofit.push_to_hub(model, "net") == "https://hub/me/net/commit/1"
    assert sorted(file.name for file in hub.folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    card = (hub.folder / "README.md").read_text()
    assert "none is given" in card
    assert "US patent" not in card
    assert_same_answers(retrofit.load("hf-hub:me/net@v2"), model, X)
    assert ("me/net", "model.safetensors", "v2") in hub.asked
    assert open_model("hf-hub:me/net").facts["target"] == "bnn"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"library_name": "retrofit"}, "hf-hub:me/net cannot be fetched"),  # its tensors are not there
        ({"architecture": "resnet18"}, "hf-hub:me/net does not exist"),  # left to timm
    ],
)
def test_what_is_not_there_whole_or_not_ours(hub: Hub, config: dict[str, str], message: str) -> None:
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RetrofitError, match=message):
        retrofit.load("hf-hub:me/net")
