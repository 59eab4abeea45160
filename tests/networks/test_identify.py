"""Networks that are recognised by building what they claim to be."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import timm
from torch import nn
from torchvision.models import WeightsEnum, get_model

from retrofit.networks.identify import identify
from retrofit.networks.model_sources import build, parse
from retrofit.record import ModelSource
from tests.networks.conftest import refused, shapes


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
