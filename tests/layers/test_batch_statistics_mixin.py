"""What torch's and timm's functions that walk through networks do with layers of batch statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from timm.layers import convert_splitbn_model, convert_sync_batchnorm, freeze_batch_norm_2d, unfreeze_batch_norm_2d
from timm.utils import freeze
from torch import nn
from torch.nn.utils import fuse_conv_bn_eval
from torch.optim.swa_utils import update_bn

import retrofit
from retrofit.layers import BatchNormalNorm2d, BatchNormalNormAct2d, DecorrelatedBatchNormalNorm2d, SyncBatchNormalNorm

LAYERS = {
    "bnn": lambda: BatchNormalNorm2d(8, noise=0.0),
    "act": lambda: BatchNormalNormAct2d(8, noise=0.0),
    "sync": lambda: SyncBatchNormalNorm(8, noise=0.0),
    "dbnn": lambda: DecorrelatedBatchNormalNorm2d(8, group_size=4, noise=0.0),
}
BATCHES = [torch.randn(16, 8, 4, 4).exp() for _ in range(3)]


def model(name: str) -> nn.Sequential:
    return nn.Sequential(LAYERS[name](), nn.BatchNorm2d(8)).train()


def statistics(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers() if "running" in name}


@pytest.mark.parametrize("name", LAYERS)
def test_torchs_update_bn_does_what_ours_does(name: str) -> None:
    one, other = model(name), model(name)
    other.load_state_dict(one.state_dict())
    update_bn(BATCHES, one)
    retrofit.update_bn(BATCHES, other)
    assert not torch.equal(one[0].running_lambda, torch.ones(8))
    torch.testing.assert_close(statistics(one), statistics(other))
    assert one[0].momentum == 0.1


@pytest.mark.parametrize("estimate", [update_bn, retrofit.update_bn])
def test_frozen_statistics_are_not_estimated_anew(estimate: Callable[..., object]) -> None:
    network = nn.Sequential(model("bnn")[0], nn.Linear(4, 4))
    network(BATCHES[0])
    retrofit.freeze_norms(network)
    before = statistics(network)
    estimate(BATCHES, network)
    torch.testing.assert_close(statistics(network), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "replace", [nn.SyncBatchNorm.convert_sync_batchnorm, convert_sync_batchnorm, convert_splitbn_model]
)
@pytest.mark.parametrize("name", LAYERS)
def test_what_would_replace_a_layer_is_refused(name: str, replace: Callable[[nn.Module], nn.Module]) -> None:
    network = model(name)
    with pytest.raises(retrofit.RetrofitError, match=f"in the place of {type(network[0]).__name__}, without its tr"):
        replace(network)
    assert type(network[0]) is type(LAYERS[name]())


def by_hand(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Module:
    """As mmcv, ultralytics and many networks of their own fuse a BatchNorm."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    fused = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size).eval()
    fused.weight = nn.Parameter(conv.weight * scale.view(-1, 1, 1, 1))
    fused.bias = nn.Parameter((conv.bias - norm.running_mean) * scale + norm.bias)
    return fused


def by_numpy(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Module:
    """As converters to other frameworks do."""
    scale = norm.weight.detach().numpy() / np.sqrt(norm.running_var.numpy() + norm.eps)
    fused = copy.deepcopy(conv)
    fused.weight.data *= torch.from_numpy(scale).view(-1, 1, 1, 1)
    fused.bias.data = (fused.bias.data - norm.running_mean) * torch.from_numpy(scale) + norm.bias.data
    return fused


@pytest.mark.parametrize("fuse", [fuse_conv_bn_eval, by_hand, by_numpy])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "act"])
def test_what_fuses_a_batch_norm_is_right_at_strength_0_and_refused_above(
    name: str, fuse: Callable[[nn.Module, nn.Module], nn.Module]
) -> None:
    conv, layer = nn.Conv2d(3, 8, 3).eval(), LAYERS[name]().train()
    layer(BATCHES[0])
    x = torch.randn(2, 3, 6, 6)
    layer.eval().set_strength(0.0)
    torch.testing.assert_close(fuse(conv, layer)(x), layer(conv(x)), rtol=1e-4, atol=1e-5)
    layer.set_strength(0.4)
    assert layer.eps == 1e-5  # to look at
    with pytest.raises(retrofit.RetrofitError, match=f"takes {type(layer).__name__} for a BatchNorm"):
        fuse(conv, layer)
    with pytest.raises(TypeError, match="EpsOfNoBatchNorm"):  # torch asks a number itself
        nn.functional.batch_norm(layer(conv(x)), layer.running_mean, layer.running_var, eps=layer.eps)


def test_layers_without_batch_statistics_may_be_walked_through() -> None:
    network, _ = retrofit.convert(timm.create_model("test_resnet").eval(), "ln-pn")
    types = [type(module) for module in network.modules()]
    for walk in (convert_sync_batchnorm, freeze_batch_norm_2d):
        assert [type(module) for module in walk(network).modules()] == types


@pytest.mark.parametrize("name", LAYERS)
def test_timm_freezes_and_thaws(name: str) -> None:
    network = model(name)
    network(BATCHES[0])
    frozen = freeze_batch_norm_2d(network)
    assert frozen[0] is network[0]
    before = statistics(frozen)
    frozen.train()(BATCHES[1])
    torch.testing.assert_close(statistics(frozen), before, rtol=0, atol=0)
    unfreeze_batch_norm_2d(frozen).train()(BATCHES[1])
    assert not torch.equal(frozen[0].running_lambda, before["0.running_lambda"])


@pytest.mark.parametrize("submodules", [[], ["0"]])
def test_timm_freezes_with_the_parameters(submodules: list[str]) -> None:
    network = model("bnn")
    freeze(network, submodules)
    assert network[0].frozen
    assert not network[0].training
    assert not network[0].weight.requires_grad
