"""Constants of migrated norms brought up to date: the same function at strength 1, nearer to it at strength 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.layers import MigratedGroupNorm


def network(groups: int) -> nn.Module:
    """Two migrated norms whose moments are far from 0 and 1."""
    torch.manual_seed(0)
    norms = [MigratedGroupNorm(groups, 8, eps=0.01, group_eps=1e-5, strength=1.0) for _ in range(2)]
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.2, 0.6)
        norm.gain.uniform_(0.7, 1.4)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norms[0], nn.ReLU(), nn.Conv2d(8, 8, 3), norms[1]).double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [1 + 2 * torch.randn(4, 3, 12, 12, generator=generator).double() for _ in range(3)]


@pytest.mark.parametrize("groups", [1, 2])
def test_recentred_is_the_same_at_strength_1_and_nearer_at_strength_0(groups: int) -> None:
    model, x = network(groups), torch.cat(batches())
    before = model(x)
    retrofit.set_strength(model, 0.0)
    far = (model(x) - before).square().mean()
    retrofit.set_strength(model, 1.0)
    assert retrofit.recentre(batches(), model) == 2
    assert model.training
    after = model(x)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 if groups == 1 else 1e-3)
    retrofit.set_strength(model, 0.0)
    assert (model(x) - after).square().mean() < 0.2 * far


def test_the_moments_are_those_of_torchs_own_group_norm() -> None:
    model = network(2)
    retrofit.recentre(batches(), model)
    scale, shift = model[1].input_affine()
    standardised = model[0](torch.cat(batches())) * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
    grouped = standardised.reshape(12, 2, -1)
    k = torch.rsqrt(grouped.var(2, correction=0) + model[1].group_eps)
    torch.testing.assert_close(k.mean(0), torch.ones(2).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close((grouped.mean(2) * k).mean(0), torch.zeros(2).double(), rtol=0, atol=1e-6)


def test_a_network_without_migrated_norms_needs_no_data() -> None:
    assert retrofit.recentre([], nn.Linear(2, 2)) == 0
    with pytest.raises(RetrofitError, match="the loader held no batch"):
        retrofit.recentre([], network(1))


@pytest.mark.parametrize("value", [float("nan"), 1.7e308])
def test_images_that_are_not_finite_change_nothing(value: float) -> None:
    model = network(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RetrofitError, match="the moments of 1 are not finite"):
        retrofit.recentre([*batches(), torch.full((1, 3, 12, 12), value, dtype=torch.float64)], model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
