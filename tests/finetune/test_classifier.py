"""Another number of classes, or another size of images, for a converted network."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import get_model_weights

import retrofit
from retrofit.errors import RetrofitError
from retrofit.finetune.classifier import outputs_of, with_classes
from retrofit.networks.library import build
from retrofit.networks.models import Network, open_model
from retrofit.record import ModelSource, record_of, set_record


def converted(name: str, to: str = "bnn", **options: object) -> Network:
    network = open_model(name, **options)
    network.model, _ = retrofit.convert(network.model, to, check=False)
    return network


@pytest.mark.parametrize("name", ["test_resnet", "tv:squeezenet1_1"])
def test_only_the_classifier_is_new_and_it_is_zero(name: str) -> None:
    network = open_model(name) if "squeeze" in name else converted(name)
    old = {key: tensor.clone() for key, tensor in network.model.state_dict().items()}
    changed, fresh = with_classes(network, 7)
    assert outputs_of(changed.model) == 7
    new = changed.model.state_dict()
    assert new.keys() == old.keys()
    for key, tensor in new.items():
        assert not tensor.any() if key in fresh else torch.equal(tensor, old[key]), key
    assert changed.labels is None


@pytest.mark.slow
def test_what_torchvision_builds_for_weights_stays(tmp_path: object) -> None:
    source = ModelSource("torchvision", "googlenet", {"weights": "IMAGENET1K_V1"})
    model, _ = retrofit.convert(build(source), "bnn", check=False)
    network = Network(model)
    changed, fresh = with_classes(network, 7)
    assert fresh == ("fc.weight", "fc.bias")
    assert changed.source.kwargs == {"weights": "IMAGENET1K_V1", "num_classes": 7}
    assert changed.model.transform_input
    assert changed.model.aux1 is None
    retrofit.save(changed.model, f"{tmp_path}/seven.safetensors")
    again = retrofit.load(f"{tmp_path}/seven.safetensors")
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(again.eval()(images), changed.model.eval()(images))
    assert again.transform_input
    assert len(get_model_weights("googlenet")["IMAGENET1K_V1"].meta["categories"]) == 1000  # as it was


def test_what_a_run_sets_on_a_layer_stays_and_what_was_set_by_hand_is_refused() -> None:
    network = converted("test_resnet")
    network.model.layer1[0].bn1.noise, network.model.bn1.momentum = 0.25, 0.01
    changed, _ = with_classes(network, 7)
    assert (changed.model.layer1[0].bn1.noise, changed.model.bn1.momentum) == (0.25, 0.01)
    assert changed.model.fc.out_features == 7
    network.model.bn1.eps = 0.3
    with pytest.raises(RetrofitError, match=r"eps of bn1 is 0.3 here, 1e-05 in test_resnet"):
        with_classes(network, 7)


def test_outputs_without_a_word_from_the_model() -> None:
    assert outputs_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))) == 5
    assert outputs_of(nn.Sequential(nn.Conv2d(3, 6, 1))) == 6
    assert outputs_of(nn.ReLU()) is None


def test_a_network_whose_classifier_cannot_be_told() -> None:
    network = converted("test_resnet")
    record = record_of(network.model)
    network.model = nn.Sequential(nn.BatchNorm2d(3))
    set_record(network.model, **vars(record))
    with pytest.raises(RetrofitError, match="cannot tell the classifier"):
        with_classes(network, 7)
