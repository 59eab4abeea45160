"""The loss, what is trained, and with which decay."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.optim import Objective, build_optimizer, build_scheduler, parameter_groups, source_network
from retrofit.finetune.prepare import freeze_all_but_norm
from retrofit.finetune.recipe import Recipe
from retrofit.layers import FrozenBatchNorm, ProxyNorm
from retrofit.layers.frozen_batch_norm import TrainedAffine
from retrofit.networks.models import Network


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_the_teacher_is_the_source(to: str) -> None:
    source = timm.create_model("test_resnet").eval()
    with pytest.raises(RetrofitError, match="needs layers that have a strength"):
        source_network(Network(source))
    images = torch.randn(2, 3, 32, 32)
    scores = source(images)
    model, _ = retrofit.convert(source, to, check=False)
    retrofit.set_strength(model, 1.0)
    with pytest.raises(RetrofitError, match="convert the source anew"):
        source_network(Network(model))
    teacher = source_network(Network(model), resumed=True)
    torch.testing.assert_close(teacher(images), scores, rtol=1e-4, atol=1e-5)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_the_divergence_of_the_softened_probabilities(temperature: float) -> None:
    taught, scores = torch.randn(2, 4, 5, dtype=torch.float64)
    objective = Objective(Recipe(teacher="source", task_loss_weight=0, kd_temperature=temperature), 5, nn.Identity())
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
    groups = parameter_groups(model, 0.1, layer_decay)
    decay = by_parameter(groups, "weight_decay")
    assert sorted(decay) == sorted(id(parameter) for group in groups for parameter in group["params"])
    proxies = [module for module in model.modules() if isinstance(module, ProxyNorm)]
    for proxy in proxies:
        assert decay[id(proxy.proxy_bias)] == decay[id(proxy.proxy_scale)] == 0.1
    assert decay[id(model.bn1.weight)] == decay[id(model.fc.bias)] == 0.0
    assert decay[id(model.fc.weight)] == 0.1
    if layer_decay is not None:
        scale = by_parameter(groups, "lr_scale")
        assert scale[id(model.fc.weight)] == 1.0
        assert scale[id(proxies[0].proxy_bias)] < scale[id(proxies[-1].proxy_bias)]
    everything = by_parameter(parameter_groups(model, 0.1, layer_decay, decay_norms=True), "weight_decay")
    assert everything == dict.fromkeys(map(id, model.parameters()), 0.1)
    assert everything.keys() == decay.keys()


def test_gamma_that_stands_apart_in_a_plain_network_is_not_decayed() -> None:
    """It has three dimensions there, as the weights of convolutions have."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), FrozenBatchNorm(8).plain_layer()[1])
    decay = by_parameter(parameter_groups(model, 0.1), "weight_decay")
    (affine,) = (module for module in model.modules() if isinstance(module, TrainedAffine))
    assert (decay[id(affine.weight)], decay[id(affine.bias)], decay[id(model[0].weight)]) == (0.0, 0.0, 0.1)


def test_only_converted_norms_are_left_to_train() -> None:
    model = converted("ln-pn", ws=True, skip=["layer4"])
    frozen = freeze_all_but_norm(model, ["fc.weight"], lambda note: None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"bn1.weight", "fc.weight"} <= trained
    assert any("proxy_bias" in name for name in trained)
    assert not any("conv" in name and model.get_parameter(name).ndim > 1 for name in trained)
    assert not any(name.startswith("layer4") for name in trained)
    assert frozen == [m for m in model.layer4.modules() if isinstance(m, nn.BatchNorm2d)]
    with pytest.raises(RetrofitError, match="nothing to train"):
        freeze_all_but_norm(nn.Linear(2, 2), (), lambda note: None)


def test_the_optimizer_is_timm_s() -> None:
    model = converted("bnn")
    optimizer = build_optimizer(model, Recipe(opt="sgd", lr=0.1, momentum=0.5, weight_decay=0.01))
    settings = {(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups}
    assert settings == {(0.1, 0.5, 0.0), (0.1, 0.5, 0.01)}
    optimizer = build_optimizer(model, Recipe(opt="rmsproptf", opt_eps=1e-3, weight_decay=0.1, decay_norms=True))
    assert {(group["weight_decay"], group["eps"]) for group in optimizer.param_groups} == {(0.1, 1e-3)}
    with pytest.raises(UsageError, match="the optimizer sgd has no eps"):
        build_optimizer(model, Recipe(opt="sgd", opt_eps=1e-3))
    with pytest.raises(UsageError, match="cannot build the optimizer fusedadam"):
        build_optimizer(model, Recipe(opt="fusedadam"))


@pytest.mark.parametrize("sched", ["constant", "Constant"])
def test_a_constant_rate_is_warmed_up_and_decays_with_the_layers(sched: str) -> None:
    """A capital, which timm does not take, changes nothing."""
    recipe = Recipe(opt="sgd", lr=0.1, sched=sched, warmup_epochs=1, warmup_lr=0.0, layer_decay=0.5, epochs=4)
    optimizer = build_optimizer(converted("bnn"), recipe)
    scheduler = build_scheduler(optimizer, recipe, steps_per_epoch=4)
    for step, rate in ((2, 0.05), (4, 0.1), (15, 0.1)):
        scheduler.step_update(step)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(rate * group["lr_scale"])
    assert build_scheduler(optimizer, Recipe(sched="none"), steps_per_epoch=4) is None
