"""Networks recognised by building what they claim to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.networks.identify import identify, skeleton
from retrofit.networks.library import build
from retrofit.record import ModelSource


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (
            lambda: timm.create_model("test_resnet", features_only=True, out_indices=(1, 2)),
            ModelSource("timm", "test_resnet.r160_in1k", {"features_only": True, "out_indices": [1, 2]}),
        ),
        (
            lambda: timm.create_model("test_vit", img_size=64, act_layer="relu"),
            ModelSource("timm", "test_vit.r160_in1k", {"img_size": 64, "act_layer": "relu"}),
        ),
        (
            lambda: torchvision.models.mobilenet_v3_small(num_classes=5),
            ModelSource("torchvision", "mobilenet_v3_small", {"num_classes": 5}),
        ),
    ],
)
def test_recognises_what_the_user_built(make: Callable[[], nn.Module], source: ModelSource) -> None:
    model = make()
    assert identify(model)[0] == source
    assert {k: v.shape for k, v in build(source).state_dict().items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }


@pytest.mark.parametrize("make", [timm.create_model, lambda name: build(ModelSource("timm", name))])
def test_follows_reset_classifier(make: Callable[[str], nn.Module]) -> None:
    model = make("test_vit")
    model.reset_classifier(7)
    assert identify(model)[0].kwargs == {"num_classes": 7}


def test_a_hint_settles_it() -> None:
    model = timm.create_model("resnet18")
    del model.pretrained_cfg
    assert identify(model) == (ModelSource("own", "timm.models.resnet:ResNet"), model)
    assert identify(model, ModelSource("timm", "resnet18"))[0] == ModelSource("timm", "resnet18")
    with pytest.raises(
        RetrofitError,
        match=r"of the tensors of resnet34 here are \d+ missing \(.*say which it is with `save",
    ):
        identify(model, ModelSource("timm", "resnet34"))
    with pytest.raises(RetrofitError, match="build it from names and numbers"):
        identify(timm.create_model("test_vit", act_layer=nn.ReLU))


def test_a_network_that_does_not_build_on_the_meta_device_is_built_for_real() -> None:
    source = ModelSource("torchvision", "regnet_y_400mf")
    before = torch.get_rng_state()
    built = skeleton(source)
    assert not next(built.parameters()).is_meta
    assert torch.equal(torch.get_rng_state(), before)
