"""A network that a run trains: its classes, images, loss and decay, and what is refused before the
first step.
"""

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
from retrofit.finetune import fitting, optimization, prepare
from retrofit.finetune.data import open_data
from retrofit.finetune.objective import Objective
from retrofit.finetune.optimization import build_optimizer
from retrofit.finetune.recipe import Recipe
from retrofit.layers import FrozenBatchNorm, ProxyNorm
from retrofit.layers.frozen_batch_norm import TrainedAffine
from retrofit.networks.library import build
from retrofit.networks.models import Network, open_model
from retrofit.record import ModelSource, record_of, set_record
from tests.finetune.conftest import assert_same, small_network


@pytest.mark.parametrize("name", ["test_resnet", "tv:squeezenet1_1"])
def test_only_the_classifier_is_new_and_it_is_zero(name: str) -> None:
    network = open_model(name) if "squeeze" in name else small_network()
    old = {key: tensor.clone() for key, tensor in network.model.state_dict().items()}
    changed, fresh = fitting.with_classes(network, 7)
    assert fitting.scores_of(changed) == 7
    new = changed.model.state_dict()
    assert new.keys() == old.keys()
    for key, tensor in new.items():
        assert not tensor.any() if key in fresh else torch.equal(tensor, old[key]), key
    assert changed.labels is None


@pytest.mark.slow
def test_what_torchvision_builds_for_weights_stays() -> None:
    source = build(ModelSource("torchvision", "googlenet", {"weights": "IMAGENET1K_V1"}))
    changed, fresh = fitting.with_classes(
        Network(retrofit.convert(source, "bnn", check=False)[0]), 7
    )
    assert fresh == ("fc.weight", "fc.bias")
    assert changed.source.kwargs == {"weights": "IMAGENET1K_V1", "num_classes": 7}
    assert (changed.model.transform_input, changed.model.aux1) == (True, None)


def test_what_a_run_sets_on_a_layer_stays_and_what_was_set_by_hand_is_refused() -> None:
    network = small_network()
    network.model.layer1[0].bn1.noise, network.model.bn1.momentum = 0.25, 0.01
    changed, _ = fitting.with_classes(network, 7)
    assert (changed.model.layer1[0].bn1.noise, changed.model.bn1.momentum) == (0.25, 0.01)
    assert changed.model.fc.out_features == 7
    network.model.bn1.eps = 0.3
    with pytest.raises(RetrofitError, match=r"eps of bn1 is 0.3 here, 1e-05 in test_resnet"):
        fitting.with_classes(network, 7)


def standing_for(
    network: Network, model: nn.Module
) -> Network:  # a network that claims to be another
    set_record(model, **vars(record_of(network.model)))
    return Network(model)


def test_a_network_whose_classifier_cannot_be_told() -> None:
    with pytest.raises(RetrofitError, match="cannot tell the classifier"):
        fitting.with_classes(standing_for(small_network(), nn.Sequential(nn.BatchNorm2d(3))), 7)


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
    with pytest.raises(
        RetrofitError, match=r"test_resnet gives tuple in training, not class scores; use an image"
    ):
        fitting.scores_of(network, (3, 16, 16))
    assert_same(network.model.state_dict(), before)
    assert all(module.training for module in network.model.modules())
    network = standing_for(network, body)
    assert fitting.scores_of(network, (3, 16, 16)) == 4 * 12 * 12
    set_record(network.model, preprocess=replace(network.preprocess, input_size=(3, 4, 4)))
    with pytest.raises(
        RetrofitError,
        match=r"of 4 x 4 pixels \(.*\); give `img_size=16`, or build it for this size",
    ):
        fitting.scores_of(network, (3, 16, 16))


def test_a_network_that_is_not_finite_is_refused(pictures: Path) -> None:
    network, recipe = small_network(), Recipe(data_dir=str(pictures))
    network.model.layer1[0].bn1.running_lambda[0] = math.inf
    message = r"^layer1.0.bn1.running_lambda of test_resnet holds NaN or infinity before the first step; train from oth"
    with pytest.raises(RetrofitError, match=message):
        fitting.fit_network(network, open_data(recipe, None, 3), recipe, lambda note: None)


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
    unlike = rf"the data's classes \(ant, bee, cat\) are not what the network calls its outputs \({labels[0]}, "
    if said == "error":
        with pytest.raises(
            RetrofitError, match=rf"{unlike}.*; give `class_map`, .* `task_loss_weight=0`"
        ):
            fitting.fit_network(network, images, recipe, notes.append)
        return
    network, _ = fitting.fit_network(network, images, recipe, notes.append)
    found = [note for note in notes if "new classifier" not in note]
    assert len(found) == bool(said), notes
    assert all(re.match(rf"{unlike}.*if that is wrong, give `class_map`", note) for note in found)
    assert network.labels == expected
    if recipe.labelled and expected is not None:
        images.train.images.transform = np.asarray
        for pixels, target in (
            images.train.images[number] for number in range(len(images.train.images))
        ):
            assert expected[target] == SORTED[pixels[0, 0].argmax()]


def test_a_network_gets_the_recipes_images(pictures: Path) -> None:
    network, recipe = small_network(), Recipe(data_dir=str(pictures), img_size=48, crop_pct=0.9)
    network, _ = fitting.fit_network(network, open_data(recipe, None, 3), recipe, lambda note: None)
    assert (network.preprocess.input_size, network.preprocess.crop_pct) == ((3, 48, 48), 0.9)


@pytest.mark.parametrize(
    ("to", "settings", "said"),
    [
        *(
            (None, {}, "this is plain training"),
            ("ln", {"precise_bn": 8}, "`precise_bn` does nothing"),
        ),
        *(("bnn", {}, None), ("bnn", {"noise": 0.4, "noise_kind": "unscaled"}, None)),
        ("gn", {"noise": 0.4}, "no layer of the network draws noise"),
        (
            "bnn",
            {"bn_momentum": 0.01},
            "after 8 batches 92% of them are those from before; raise `bn_momentum`",
        ),
        (
            "bnn",
            {"strength_sched": "off"},
            "layers stand at strength 0.0253",
        ),  # as an average of weights leaves it
    ],
    ids=str,
)
def test_settings_that_do_nothing_are_said(
    to: str | None, settings: dict[str, Any], said: str | None
) -> None:
    model, notes = small_network(to).model, list[str]()
    if to == "bnn":
        retrofit.set_strength(model, 0.02531)
    prepare.adjust_layers(model, Recipe(**{"bn_momentum": 0.9, **settings}), 8, notes.append)
    assert len(notes) == (said is not None), notes
    assert said is None or said in notes[0]


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_the_teacher_is_the_source(to: str) -> None:
    source = timm.create_model("test_resnet").eval()
    with pytest.raises(RetrofitError, match="needs layers that have a strength"):
        prepare.source_network(Network(source))
    images = torch.randn(2, 3, 32, 32)
    scores = source(images)
    model, _ = retrofit.convert(source, to, check=False)
    retrofit.set_strength(model, 1.0)
    with pytest.raises(RetrofitError, match="convert the source anew"):
        prepare.source_network(Network(model))
    teacher = prepare.source_network(Network(model), resumed=True)
    torch.testing.assert_close(teacher(images), scores, rtol=1e-4, atol=1e-5)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_the_divergence_of_the_softened_probabilities(temperature: float) -> None:
    taught, scores = torch.randn(2, 4, 5, dtype=torch.float64)
    objective = Objective(
        Recipe(teacher="source", task_loss_weight=0, kd_temperature=temperature), 5, nn.Identity()
    )
    loss = objective.loss(scores, taught, torch.zeros(4))
    p, q = (torch.softmax(values.float().double() / temperature, 1) for values in (taught, scores))
    expected = (p * (p / q).log()).sum(1).mean() * temperature**2
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert objective.loss(taught, taught, torch.zeros(4)) == pytest.approx(0, abs=1e-6)


def converted(to: str, **options: object) -> nn.Module:
    return retrofit.convert(timm.create_model("test_resnet"), to, check=False, **options)[0]


def by_parameter(groups: list[dict[str, Any]], setting: str) -> dict[int, float]:
    return {id(parameter): group[setting] for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_proxy_parameters_are_decayed_and_norms_are_not(layer_decay: float | None) -> None:
    model = converted("ln-pn")
    groups = optimization.parameter_groups(model, 0.1, layer_decay)
    decay = by_parameter(groups, "weight_decay")
    assert sorted(decay) == sorted(
        id(parameter) for group in groups for parameter in group["params"]
    )
    proxies = [module for module in model.modules() if isinstance(module, ProxyNorm)]
    for proxy in proxies:
        assert decay[id(proxy.proxy_bias)] == decay[id(proxy.proxy_scale)] == 0.1
    assert decay[id(model.bn1.weight)] == decay[id(model.fc.bias)] == 0.0
    assert decay[id(model.fc.weight)] == 0.1
    if layer_decay is not None:
        scale = by_parameter(groups, "lr_scale")
        assert scale[id(model.fc.weight)] == 1.0
        assert scale[id(proxies[0].proxy_bias)] < scale[id(proxies[-1].proxy_bias)]
    everything = by_parameter(
        optimization.parameter_groups(model, 0.1, layer_decay, decay_norms=True), "weight_decay"
    )
    assert everything == dict.fromkeys(map(id, model.parameters()), 0.1)
    assert everything.keys() == decay.keys()


def test_gamma_that_stands_apart_in_a_plain_network_is_not_decayed() -> None:
    """It has three dimensions there, as the weights of convolutions have."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), FrozenBatchNorm(8).plain_layer()[1])
    decay = by_parameter(optimization.parameter_groups(model, 0.1), "weight_decay")
    (affine,) = (module for module in model.modules() if isinstance(module, TrainedAffine))
    assert (decay[id(affine.weight)], decay[id(affine.bias)], decay[id(model[0].weight)]) == (
        0.0,
        0.0,
        0.1,
    )


def test_only_converted_norms_are_left_to_train() -> None:
    model = converted("ln-pn", ws=True, skip=["layer4"])
    frozen = prepare.freeze_all_but_norm(model, ["fc.weight"], lambda note: None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"bn1.weight", "fc.weight"} <= trained
    assert any("proxy_bias" in name for name in trained)
    assert not any("conv" in name and model.get_parameter(name).ndim > 1 for name in trained)
    assert not any(name.startswith("layer4") for name in trained)
    assert frozen == [m for m in model.layer4.modules() if isinstance(m, nn.BatchNorm2d)]
    with pytest.raises(RetrofitError, match="nothing to train"):
        prepare.freeze_all_but_norm(nn.Linear(2, 2), (), lambda note: None)


def test_the_optimizer_is_timm_s() -> None:
    model = converted("bnn")
    optimizer = build_optimizer(model, Recipe(opt="sgd", lr=0.1, momentum=0.5, weight_decay=0.01))
    settings = {
        (group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups
    }
    assert settings == {(0.1, 0.5, 0.0), (0.1, 0.5, 0.01)}
    optimizer = build_optimizer(
        model, Recipe(opt="rmsproptf", opt_eps=1e-3, weight_decay=0.1, decay_norms=True)
    )
    assert {(group["weight_decay"], group["eps"]) for group in optimizer.param_groups} == {
        (0.1, 1e-3)
    }
    with pytest.raises(UsageError, match="the optimizer sgd has no eps"):
        build_optimizer(model, Recipe(opt="sgd", opt_eps=1e-3))
    with pytest.raises(UsageError, match="cannot build the optimizer fusedadam"):
        build_optimizer(model, Recipe(opt="fusedadam"))


@pytest.mark.parametrize("sched", ["constant", "Constant"])
def test_a_constant_rate_is_warmed_up_and_decays_with_the_layers(sched: str) -> None:
    """A capital, which timm does not take, changes nothing."""
    recipe = Recipe(
        opt="sgd", lr=0.1, sched=sched, warmup_epochs=1, warmup_lr=0.0, layer_decay=0.5, epochs=4
    )
    optimizer = build_optimizer(converted("bnn"), recipe)
    scheduler = optimization.build_scheduler(optimizer, recipe, steps_per_epoch=4)
    for step, rate in ((2, 0.05), (4, 0.1), (15, 0.1)):
        scheduler.step_update(step)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(rate * group["lr_scale"])
    assert optimization.build_scheduler(optimizer, Recipe(sched="none"), steps_per_epoch=4) is None
