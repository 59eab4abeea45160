"""The optimizer and the schedule of the learning rate."""

from typing import Any

import pytest
import timm
from torch import nn

import retrofit
from retrofit.errors import UsageError
from retrofit.finetune import optimization
from retrofit.finetune.optimization import build_optimizer
from retrofit.finetune.recipe import Recipe
from retrofit.layers import FrozenBatchNorm, ProxyNorm
from retrofit.layers.frozen_batch_norm import TrainedAffine


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


@pytest.mark.parametrize("trained", [True, False])
def test_a_proxy_norm_has_the_rate_of_the_layer_before_it(trained: bool) -> None:
    """timm takes a ResNet's `act1` for a part of the last layer."""
    model = converted("gn-pn")
    proxy_norm = model.act1
    proxy_norm.proxy_bias.requires_grad_(trained)
    groups = optimization.parameter_groups(model, 0.1, 0.5)
    scale = by_parameter(groups, "lr_scale")
    assert scale[id(proxy_norm.proxy_scale)] == scale[id(model.bn1.weight)] < 0.5
    wanted = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(id(parameter) for group in groups for parameter in group["params"]) == sorted(
        wanted
    )


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
    with pytest.raises(UsageError, match="the optimizer AdaHessian needs second derivatives"):
        build_optimizer(model, Recipe(opt="AdaHessian"))
    with pytest.raises(UsageError, match="the optimizer sgd has no eps"):
        build_optimizer(model, Recipe(opt="sgd", opt_eps=1e-3))
    with pytest.raises(UsageError, match="cannot build the optimizer fusedadam"):
        build_optimizer(model, Recipe(opt="fusedadam"))


def test_a_constant_rate_is_warmed_up_and_decays_with_the_layers() -> None:
    recipe = Recipe(
        opt="sgd",
        lr=0.1,
        sched="constant",
        warmup_epochs=1,
        warmup_lr=0.0,
        layer_decay=0.5,
        epochs=4,
    )
    optimizer = build_optimizer(converted("bnn"), recipe)
    scheduler = optimization.build_lr_schedule(optimizer, recipe, steps_per_epoch=4)
    for step, rate in ((2, 0.05), (4, 0.1), (15, 0.1)):
        scheduler.step_update(step)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(rate * group["lr_scale"])
    assert (
        optimization.build_lr_schedule(optimizer, Recipe(sched="none"), steps_per_epoch=4) is None
    )
