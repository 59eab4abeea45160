"""Networks found by name and built, and what they expect of their images.

And networks built again: recognised by building what they claim to be, and never larger than a
file's tensors.
"""

import json
import math
import re
import socket
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from torch import nn
from torchvision.models import WeightsEnum, get_model, get_model_weights, list_models

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks.artifact import load
from retrofit.networks.identify import identify
from retrofit.networks.model_sources import build, parse, with_options
from retrofit.networks.rebuild import TooLargeError, bounded_by, check_numbers, skeleton
from retrofit.networks.weights_metadata import labels_of, preprocess_of
from retrofit.record import ModelSource, record_of
from tests.networks.conftest import refused, rewrite, shapes


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
    "googlnet": "tv:googlenet", "": "local-dir:", "hf-hub:": "local-dir:", "local-dir:/absent/folder": "/absent/folder",
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


def test_weights_that_do_not_exist() -> None:
    name = next(
        name for name in timm.list_models("resnet*") if not timm.models.is_model_pretrained(name)
    )
    with pytest.raises(
        RetrofitError, match=f"no pretrained weights for {name}; pass `checkpoint=FILE`"
    ):
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


# --- preprocessing, against what torchvision's own transforms do to an image


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v3_small", "resnet50", "inception_v3", "efficientnet_b3"]
)
def test_torchvisions_images_come_out_the_same(name: str) -> None:
    weights = get_model_weights(name)["DEFAULT"]
    preprocess = preprocess_of(
        nn.Identity(), ModelSource("torchvision", name, {"weights": weights.name})
    )
    pixels = np.random.default_rng(0).integers(0, 255, (40, 53, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((530, 400), Image.Resampling.BICUBIC)
    ours, theirs = create_transform(**preprocess.to_dict())(image), weights.transforms()(image)
    assert ours.shape == preprocess.input_size == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_every_torchvision_network_has_some() -> None:
    for name in list_models():
        preprocess = preprocess_of(nn.Identity(), ModelSource("torchvision", name))
        assert preprocess.input_size[0] == len(preprocess.mean) == len(preprocess.std) == 3, name
        resize = getattr(get_model_weights(name)["DEFAULT"].transforms(), "resize_size", None)
        if resize:  # timm divides back and rounds down
            assert math.floor(preprocess.input_size[1] / preprocess.crop_pct) == resize[0], name


@pytest.mark.parametrize(
    ("kwargs", "size"),
    [
        *(
            ({}, (3, 160, 160)),
            ({"img_size": 96}, (3, 96, 96)),
            ({"img_size": [96, 64]}, (3, 96, 64)),
        ),
        *(({"in_chans": 1}, (1, 160, 160)), ({"in_chans": 4}, (4, 160, 160))),
    ],
)
def test_timms_follows_the_networks_input(kwargs: Any, size: tuple[int, ...]) -> None:
    model = build(source := ModelSource("timm", "test_vit", kwargs))
    preprocess = preprocess_of(model, source)
    assert (preprocess.input_size, preprocess.mean, len(preprocess.std)) == (
        size,
        (0.5,) * size[0],
        size[0],
    )
    model(torch.zeros(1, *preprocess.input_size))


@pytest.mark.parametrize(
    "cfg", [{"std": (0.0, 0.0, 0.0)}, {"interpolation": "area"}, {"input_size": (3, 0, 64)}]
)
def test_what_a_network_says_of_images_is_checked(cfg: dict[str, object]) -> None:
    model = nn.Conv2d(3, 4, 1)
    model.pretrained_cfg = {"input_size": (3, 64, 64), **cfg}
    with pytest.raises(RetrofitError, match=r"the network's `pretrained_cfg` is wrong \(no images"):
        preprocess_of(model, ModelSource("own", "mine:Net"))


@pytest.mark.parametrize(
    "source",
    [
        ModelSource("torchvision", "resnet18", {"weights": "IMAGENET1K_V1"}),
        ModelSource("timm", "resnet18"),
    ],
)
def test_imagenets_labels_are_the_names_of_its_folders(source: ModelSource) -> None:
    with torch.device("meta"):
        model = build(source)
    labels = labels_of(model, source) or []
    assert (len(labels), labels[:2]) == (1000, ["n01440764", "n01443537"])
    assert labels == sorted(labels)


def test_labels_of_other_data() -> None:
    coco = ModelSource("torchvision", "fcn_resnet50", {"weights": "DEFAULT"})
    assert "cat" in (labels_of(nn.Identity(), coco) or [])
    assert (
        labels_of(nn.Identity(), ModelSource("torchvision", "raft_small", {"weights": "DEFAULT"}))
        is None
    )
    model, source = (
        timm.create_model("resnet18", num_classes=3),
        ModelSource("timm", "resnet18", {"num_classes": 3}),
    )
    assert labels_of(model, source) is None
    model.pretrained_cfg["label_names"] = ["a", "b", "c"]
    assert labels_of(model, source) == ["a", "b", "c"]


# --- built again


def _with_a_trained_backbone() -> nn.Module:
    with pytest.MonkeyPatch.context() as patched:  # as if the backbone's weights had been fetched
        patched.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: {})
        patched.setattr(nn.Module, "load_state_dict", lambda *_, **__: None)
        return get_model("fasterrcnn_mobilenet_v3_large_320_fpn", num_classes=3)


Make = Callable[[], nn.Module]
BARE = {"weights": None, "weights_backbone": None}
RCNN = "fasterrcnn_mobilenet_v3_large_320_fpn"
SSD, DEEPLAB = "ssdlite320_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"
TIMMS: list[tuple[str, dict[str, Any]]] = [
    ("test_resnet", {"features_only": True, "out_indices": [1, 2]}),
    ("test_vit", {"img_size": 64, "act_layer": "relu"}),
]
BUILT: list[tuple[Make, str, dict[str, Any]]] = [
    *(
        (partial(timm.create_model, name, **kwargs), f"{name}.r160_in1k", kwargs)
        for name, kwargs in TIMMS
    ),
    (
        lambda: get_model("mobilenet_v3_small", num_classes=5),
        "tv:mobilenet_v3_small",
        {"num_classes": 5},
    ),
    (lambda: get_model(DEEPLAB, aux_loss=True, **BARE), f"tv:{DEEPLAB}", {"aux_loss": True}),
    (lambda: get_model(RCNN, num_classes=5, **BARE), f"tv:{RCNN}", {"num_classes": 5}),
    (_with_a_trained_backbone, f"tv:{RCNN}", {"trained_backbone": True, "num_classes": 3}),
    (lambda: get_model(SSD, **BARE), f"tv:{SSD}", {}),  # its builder is in another file
]


@pytest.mark.parametrize(("make", "name", "kwargs"), BUILT)
def test_recognises_what_the_user_built(
    make: Make, name: str, kwargs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    monkeypatch.setattr(
        WeightsEnum, "get_state_dict", lambda *_, **__: pytest.fail("nothing may be fetched")
    )
    source = identify(model)[0]
    assert source == replace(parse(name), kwargs=kwargs)
    assert shapes(build(source)) == shapes(model)


@pytest.mark.parametrize("make", [timm.create_model, lambda name: build(ModelSource("timm", name))])
def test_follows_reset_classifier(make: Callable[[str], nn.Module]) -> None:
    (model := make("test_vit")).reset_classifier(7)
    assert identify(model)[0].kwargs == {"num_classes": 7}


def test_a_hint_settles_it() -> None:
    model = timm.create_model("resnet18")
    del model.pretrained_cfg
    assert identify(model) == (ModelSource("own", "timm.models.resnet:ResNet"), model)
    assert identify(model, ModelSource("timm", "resnet18"))[0] == ModelSource("timm", "resnet18")
    with refused(r"of the tensors of resnet34 here are \d+ missing \(.*say which it is with `save"):
        identify(model, ModelSource("timm", "resnet34"))
    (other := get_model("resnet34")).conv1 = nn.Conv2d(3, 64, 3)
    with refused(
        "of the tensors of tv:resnet34 here"
    ):  # of several that are none, what differs least
        identify(other)
    with refused("build it from names and numbers"):
        identify(timm.create_model("test_vit", act_layer=nn.ReLU))


def test_a_network_that_does_not_build_on_the_meta_device_is_built_for_real() -> None:
    before = torch.get_rng_state()
    assert not next(skeleton(ModelSource("torchvision", "regnet_y_400mf")).parameters()).is_meta
    assert torch.equal(torch.get_rng_state(), before)


# --- limits on what a manifest may request

SECONDS = 5  # of this process's own time: the machine may be busy


def _many_samples(manifest: dict[str, Any]) -> None:
    row = next(
        row for row in manifest["conversion"]["steps"][1]["edits"] if row["status"] == "converted"
    )
    row["options"]["samples"] = 1_000_000_000


SWIN = {"name": "swin_tiny_patch4_window7_224", "kwargs": {"img_size": 9_999, "window_size": 2_000}}
GREEDY: dict[str, Callable[[dict[str, Any]], None]] = {
    "a giant network": lambda m: m["model"].update(
        library="torchvision", name="regnet_y_128gf", kwargs={}
    ),
    "a million layers": lambda m: m["model"]["kwargs"].update(layers=[1_000_000, 1, 1, 1]),
    "wide": lambda m: m["model"].update(name="resnet50", kwargs={"base_width": 9_999}),
    "large images": lambda m: m["model"].update(SWIN),
    "a long argument": lambda m: m["model"]["kwargs"].update(block_args=["x" * 20_000]),
    "a nested argument": lambda m: m["model"]["kwargs"].update(
        layers=json.loads("[" * 500 + "]" * 500)
    ),
    "many samples": _many_samples,
    "huge images": lambda m: m["preprocess"].update(input_size=[3, 100_000, 100_000]),
    "a number beyond all floats": lambda m: m["preprocess"].update(mean=[10**400] * 3),
    "large images to run it on": lambda m: m["sampled_outputs"].update(size=[3, 16_000, 16_000]),
}


@pytest.mark.parametrize("ask", GREEDY.values(), ids=GREEDY)
def test_what_a_manifest_asks_for_is_bounded_by_its_tensors(
    saved: Path, ask: Callable[[dict[str, Any]], None]
) -> None:
    rewrite(saved, lambda manifest, _: ask(manifest))
    began = time.process_time()
    with refused("."):
        load(saved)
    assert time.process_time() - began < SECONDS


def test_building_stops_at_the_first_tensor_too_much() -> None:
    with bounded_by({"a": torch.zeros(10, 10)}):
        nn.Linear(100, 100)
        with pytest.raises(TooLargeError, match="far larger than the 1 tensors"):
            nn.Linear(100_000, 1_000, device="meta")
        with pytest.raises(TooLargeError):
            nn.ModuleList(nn.ReLU() for _ in range(100_000))
        with pytest.raises(TooLargeError):
            nn.ParameterList(torch.zeros(1) for _ in range(10_000))
    nn.Linear(100_000, 1_000, device="meta")  # the bound ends with its context


def test_numbers_in_proportion() -> None:
    for value in ([1, [2, {"a": -1_000_000}]], 1e300, [0] * 200_000, {"a": "x" * 200_000}):
        with pytest.raises(TooLargeError):
            check_numbers({"x": value}, {"a": torch.zeros(64, 3, 7, 7)})
    values = {
        "num_classes": 21_841,
        "img_size": 448,
        "rates": [0.1, None, True],
        "name": "x",
        "most": float("inf"),
    }
    check_numbers(values, {"head": torch.zeros(21_841, 768)})
