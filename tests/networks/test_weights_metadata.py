"""What a library says of its weights: how images are prepared, and what the outputs are called."""

import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from torch import nn
from torchvision.models import get_model_weights, list_models

from retrofit.errors import RetrofitError
from retrofit.networks.model_sources import build
from retrofit.networks.weights_metadata import labels_of, preprocess_of
from retrofit.record import ModelSource

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


# --- labels


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
