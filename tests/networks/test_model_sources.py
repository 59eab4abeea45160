"""Networks found by name and built."""

import json
import re
import socket
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from torchvision.models import WeightsEnum

from retrofit.errors import UsageError
from retrofit.networks.model_sources import build, parse, with_options
from retrofit.record import ModelSource, record_of
from tests.networks.conftest import refused, shapes


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No name resolves, and no cache holds anything."""
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        mock.Mock(side_effect=socket.gaierror(-2, "Name or service not known")),
    )
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


# --- names


FOUND = {
    "resnet50.a1_in1k": ModelSource("timm", "resnet50.a1_in1k"),
    "torchvision:resnet18": ModelSource("torchvision", "resnet18"),
    "googlenet": ModelSource("torchvision", "googlenet"),
    "tf_efficientnet_b0_ns": ModelSource(
        "timm", "tf_efficientnet_b0.ns_jft_in1k"
    ),  # what timm calls it today
    "hf_hub:timm/resnet18.a1_in1k": ModelSource("timm", "hf-hub:timm/resnet18.a1_in1k"),
}
CLOSEST = {
    "resnet500": "resnet50", "ResNet50": "resnet50", "resnet50.a1": "resnet50.a1_in1k", "tv:resnet5": "tv:resnet50",
    "googlnet": "tv:googlenet", "": "local-dir:", "hf-hub:": "local-dir:",
}  # fmt: skip


@pytest.mark.parametrize(("text", "source"), FOUND.items())
def test_finds(text: str, source: ModelSource) -> None:
    assert parse(text) == source


# --- options


@pytest.mark.parametrize(
    ("source", "options", "kwargs"),
    [
        (ModelSource("timm", "resnet18"), {"img_size": 64, "in_chans": 1}, {"in_chans": 1}),
        (ModelSource("timm", "vit_tiny_patch16_224"), {"img_size": 64}, {"img_size": 64}),
        (ModelSource("torchvision", "vit_b_16"), {"img_size": 64}, {"image_size": 64}),
        (ModelSource("timm", "resnet18", {"a": 1}), {"num_classes": 0}, {"a": 1, "num_classes": 0}),
    ],
)
def test_options_become_the_builders_arguments(
    source: ModelSource, options: Any, kwargs: dict[str, Any]
) -> None:
    assert with_options(source, **options).kwargs == kwargs


# --- building


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        *((partial(parse, text), re.escape(closest)) for text, closest in CLOSEST.items()),
        (
            lambda: build(ModelSource("timm", "vgg11", {"img_size": 64})),
            "cannot build vgg11 with img_size=64: .*img_size",
        ),
        (
            lambda: build(ModelSource("torchvision", "vgg11", {"in_chans": 1})),
            "cannot build tv:vgg11 with in_chans=1",
        ),
        (
            lambda: build(ModelSource("torchvision", "resnet18", {"weights": "NO_SUCH"})),
            "weights='NO_SUCH'",
        ),
        (lambda: build(ModelSource("timm", "no_such_network")), "unknown model"),
        # A source never says where weights are.
        (
            lambda: ModelSource("torchvision", "fcn_resnet50", {"pretrained_cfg": {"file": "/"}}),
            "not a model argument",
        ),
        (
            lambda: ModelSource("torchvision", "fcn_resnet50", {"weights_backbone": "DEFAULT"}),
            "not a model argument",
        ),
    ],
)
def test_unknown_names_get_the_closest_and_errors_of_building_one_line(
    ask: Callable[[], object], message: str
) -> None:
    with refused(message, UsageError):
        ask()


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize("text", ["resnet18", "tv:resnet18", "hf-hub:timm/resnet18.a1_in1k"])
def test_without_a_network_the_error_says_so_at_once(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with refused(r"cannot download .* check the network.* `checkpoint=FILE`"):
        build(parse(text), pretrained=True)
    assert (
        "Retrying" not in capfd.readouterr().err
    )  # the hub's client alone would retry for 20 s a file


@pytest.mark.parametrize("content", [None, "{", "[1]", "[" * 100_000])
def test_a_folder_that_describes_no_network_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    said = "there is no description of a network at .*/absent/config.json; give a folder"
    with refused(said):
        build(parse(f"local-dir:{tmp_path}/absent"))
    with refused("folder/config.json.*; give a folder"):
        build(parse(f"local-dir:{folder}"))


def test_weights_that_do_not_exist() -> None:
    name = next(
        name for name in timm.list_models("resnet*") if not timm.models.is_model_pretrained(name)
    )
    with pytest.raises(UsageError, match=f"cannot build {name} .*: No pretrained weights exist"):
        build(parse(name), pretrained=True)


def test_a_local_folder_is_remembered_as_its_architecture(tmp_path: Path) -> None:
    cfg, arguments = {"tag": "mine", "input_size": [1, 64, 64]}, {"drop_rate": 0.25}
    config = {
        "architecture": "resnet18",
        "num_classes": 5,
        "pretrained_cfg": cfg,
        "model_args": arguments,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build(parse(f"local-dir:{tmp_path}"))
    source = record_of(model).source
    assert source == ModelSource(
        "timm", "resnet18", {"num_classes": 5, "in_chans": 1, "drop_rate": 0.25}
    )
    assert shapes(build(source)) == shapes(model)  # without the folder


def test_torchvisions_structure_for_weights_is_built_again_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = build(ModelSource("torchvision", "googlenet"))
    with monkeypatch.context() as patched:
        patched.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: dict(plain.state_dict()))
        trained = build(ModelSource("torchvision", "googlenet"), pretrained=True)
    source = record_of(trained).source
    assert source.kwargs == {"weights": "IMAGENET1K_V1"}
    monkeypatch.setattr(
        WeightsEnum, "get_state_dict", lambda *_, **__: pytest.fail("nothing may be fetched")
    )
    again = build(source)
    assert (
        (again.transform_input, again.aux1)
        == (trained.transform_input, trained.aux1)
        == (True, None)
    )
    assert shapes(again) == shapes(trained) != shapes(plain)
    again.load_state_dict(trained.state_dict())  # the real method is back in its place
    assert torch.equal(again.conv1.conv.weight, plain.conv1.conv.weight)
