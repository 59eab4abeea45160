"""Copies of networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import retrofit
from retrofit.utils.copying import copied


def test_a_copy_is_another() -> None:
    model = nn.Linear(2, 2)
    other = copied(model)
    assert other.weight is not model.weight
    assert torch.equal(other.weight, model.weight)


def test_weights_that_pruning_computed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(retrofit.RetrofitError, match=r"make them permanent first, by torch.nn.utils.prune.remove"):
        copied(model)
    prune.remove(model[0], "weight")
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(retrofit.fold(model, input_size=(3, 4, 4))(x), model(x))
