"""A network fitted to the images of a run: their size, and the data's classes."""

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune import run_network
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_images import open_data
from retrofit.networks.model_sources import build
from retrofit.networks.open_model import Network, open_model
from retrofit.record import ModelSource, record_of, set_record
from tests.finetune.conftest import assert_same, small_network


@pytest.mark.parametrize("name", ["test_resnet", "tv:mnasnet0_5"])
def test_only_the_classifier_is_new_and_it_is_zero(name: str) -> None:
    network = open_model(name) if "mnasnet" in name else small_network()
    old = {key: tensor.clone() for key, tensor in network.model.state_dict().items()}
    changed, fresh = run_network.with_classes(network, 7)
    assert run_network.scores_of(changed) == 7
    new = changed.model.state_dict()
    assert new.keys() == old.keys()
    for key, tensor in new.items():
        assert not tensor.any() if key in fresh else torch.equal(tensor, old[key]), key
    assert changed.labels is None


def test_a_classifier_before_an_activation_does_not_start_where_it_learns_nothing() -> None:
    changed, fresh = run_network.with_classes(open_model("tv:squeezenet1_1"), 7)
    scores = changed.model.eval()(torch.rand(2, 3, 64, 64))
    scores.sum().backward()
    gradients = [changed.model.get_parameter(name).grad for name in fresh]
    assert all(gradient is not None and gradient.any() for gradient in gradients)


@pytest.mark.slow
def test_what_torchvision_builds_for_weights_stays() -> None:
    source = build(ModelSource("torchvision", "googlenet", {"weights": "IMAGENET1K_V1"}))
    changed, fresh = run_network.with_classes(
        Network(retrofit.convert(source, "bnn", check=False)[0]), 7
    )
    assert fresh == ("fc.weight", "fc.bias")
    assert changed.source.kwargs == {"weights": "IMAGENET1K_V1", "num_classes": 7}
    assert (changed.model.transform_input, changed.model.aux1) == (True, None)


def test_what_a_run_sets_on_a_layer_stays_and_what_was_set_by_hand_is_refused() -> None:
    network = small_network()
    network.model.layer1[0].bn1.noise, network.model.bn1.momentum = 0.25, 0.01
    changed, _ = run_network.with_classes(network, 7)
    assert (changed.model.layer1[0].bn1.noise, changed.model.bn1.momentum) == (0.25, 0.01)
    assert changed.model.fc.out_features == 7
    network.model.bn1.eps = 0.3
    with pytest.raises(RetrofitError, match=r"eps of bn1 is 0.3 here, 1e-05 in test_resnet"):
        run_network.with_classes(network, 7)


def standing_for(
    network: Network, model: nn.Module
) -> Network:  # a network that claims to be another
    set_record(model, **vars(record_of(network.model)))
    return Network(model)


def test_a_network_whose_classifier_cannot_be_told() -> None:
    with pytest.raises(RetrofitError, match="cannot tell the classifier"):
        run_network.with_classes(standing_for(small_network(), nn.Sequential(nn.BatchNorm2d(3))), 7)


class TwoHeads(
    nn.Sequential
):  # gives the scores of both in training, as torchvision's Inception does
    def forward(self, x: Tensor) -> Any:
        scores = self[0](x)
        return (scores, scores) if self.training else scores


def test_a_network_is_tried_as_it_trains_and_left_as_it_was() -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 5), nn.BatchNorm2d(4), nn.Flatten())
    network = standing_for(small_network(None), TwoHeads(body))
    before = copy.deepcopy(network.model.state_dict())
    with pytest.raises(RetrofitError, match=r"no class scores \(its output: tuple\); use an image"):
        run_network.scores_of(network)
    assert_same(network.model.state_dict(), before)
    assert all(module.training for module in network.model.modules())
    network = standing_for(network, body)
    assert run_network.scores_of(network) == 4 * 12 * 12
    set_record(network.model, preprocess=replace(network.preprocess, input_size=(3, 4, 4)))
    with pytest.raises(
        RetrofitError,
        match=r"of 4 x 4 pixels \(.*\); give another `img_size`, or build it .* --img-size 4",
    ):
        run_network.scores_of(network)


def test_a_network_that_is_not_finite_is_refused(pictures: Path) -> None:
    network, recipe = small_network(), Recipe(data_dir=str(pictures))
    network.model.layer1[0].bn1.running_lambda[0] = math.inf
    message = r"^layer1.0.bn1.running_lambda of test_resnet holds NaN or infinity before the first step; train from oth"
    with pytest.raises(RetrofitError, match=message):
        run_network.fit_network(network, open_data(recipe, None, 3), recipe, lambda note: None)


def test_fewer_outputs_than_classes_are_refused(pictures: Path) -> None:
    recipe = Recipe(data_dir=str(pictures), num_classes=2)
    images = open_data(recipe, None, 3)
    message = "^the data needs 3 outputs, one for each class; give `num_classes=3` or leave it out$"
    with pytest.raises(UsageError, match=message):
        run_network.fit_network(small_network(), images, recipe, lambda note: None)


DISTILLED = {"teacher": "source"}
SORTED = ["ant", "bee", "cat"]


@pytest.mark.parametrize(
    ("labels", "settings", "said", "expected"),
    [
        *((["x", "y", "z"], {}, "note", SORTED), (["x", "y", "z"], DISTILLED, "error", None)),
        (["x", "y", "z"], {**DISTILLED, "task_loss_weight": 0}, "", ["x", "y", "z"]),
        (["x", "y", "z"], {**DISTILLED, "class_map": "map.txt"}, "", SORTED),
        (["cat", "bee", "ant"], DISTILLED, "", ["cat", "bee", "ant"]),
        (["w", "x", "y", "z"], {}, "", SORTED),  # the classifier is new
        *(
            (["w", "x", "y", "z"], {"num_classes": number}, said, None)
            for number, said in ((4, "note"), (5, ""))
        ),
        (["cat", "dog", "bee", "ant"], {"num_classes": 4}, "", ["cat", "dog", "bee", "ant"]),
        (["cat", "dog", "bee", "ant"], DISTILLED, "", ["cat", "dog", "bee", "ant"]),
        (["cat", "dog", "bee", "ant"], {}, "", SORTED),
        (["x", "y", "z"], {"class_map": "four.txt"}, "", ["cat", "bee", "dog", "ant"]),
    ],
    ids=str,
)
def test_outputs_are_called_as_the_data_trains_them_and_an_order_that_was_guessed_is_said(
    labels: list[str],
    settings: Any,
    said: str,
    expected: Any,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(pictures.parent)
    Path("map.txt").write_text("ant\nbee\ncat\n")
    Path("four.txt").write_text("cat\nbee\ndog\nant\n")
    network = open_model("test_resnet", num_classes=len(labels), img_size=16)
    set_record(network.model, labels=labels)
    recipe = Recipe(data_dir=str(pictures), **settings)
    images, notes = open_data(recipe, labels, 3), []
    unlike = rf"the data's classes \(ant, bee, cat\) are not what the model calls its outputs \({labels[0]}, "
    if said == "error":
        with pytest.raises(
            RetrofitError, match=rf"{unlike}.*; give `class_map`, .* `task_loss_weight=0`"
        ):
            run_network.fit_network(network, images, recipe, notes.append)
        return
    network, _ = run_network.fit_network(network, images, recipe, notes.append)
    found = [note for note in notes if "new classifier" not in note]
    assert len(found) == bool(said), notes
    doubt = (
        rf"({unlike}|the data has 3 classes and the model 4 outputs).*if that is wrong, give `cl"
    )
    assert all(re.match(doubt, note) for note in found)
    assert network.labels == expected
    if recipe.labelled and expected is not None:
        images.train.images.transform = np.asarray
        for pixels, target in (
            images.train.images[number] for number in range(len(images.train.images))
        ):
            assert expected[target] == SORTED[pixels[0, 0].argmax()]


def test_a_network_gets_the_recipes_images(pictures: Path) -> None:
    network, recipe = small_network(), Recipe(data_dir=str(pictures), img_size=48, crop_pct=0.9)
    network, _ = run_network.fit_network(
        network, open_data(recipe, None, 3), recipe, lambda note: None
    )
    assert (network.preprocess.input_size, network.preprocess.crop_pct) == ((3, 48, 48), 0.9)


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_the_teacher_is_the_source(to: str) -> None:
    source = timm.create_model("test_resnet").eval()
    with pytest.raises(RetrofitError, match="needs layers that have a strength"):
        run_network.source_network(Network(source))
    images = torch.randn(2, 3, 32, 32)
    scores = source(images)
    model, _ = retrofit.convert(source, to, check=False)
    retrofit.set_strength(model, 1.0)
    with pytest.raises(RetrofitError, match="convert the source anew"):
        run_network.source_network(Network(model))
    teacher = run_network.source_network(Network(model), resumed=True)
    torch.testing.assert_close(teacher(images), scores, rtol=1e-4, atol=1e-5)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
