"""The state of a folded network."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import retrofit
from retrofit.errors import RetrofitError
from tests.export.networks import batch_norm

X = torch.randn(2, 3, 9, 9)


def folded_at(strength: float) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), batch_norm(nn.BatchNorm2d(8)), nn.ReLU()).eval()
    model, _ = retrofit.convert(model, "ln", inputs=X, strength=strength)
    return retrofit.fold(model, inputs=X)


def read_back(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def test_a_state_fits_the_strength_that_it_was_folded_at() -> None:
    folded = folded_at(0.25)
    state = read_back(folded.state_dict())
    other = folded_at(0.75)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RetrofitError, match="folded at another strength"):
        other.load_state_dict(state)
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    for same in (folded_at(0.25), copy.deepcopy(folded)):
        same.load_state_dict(state)
        torch.testing.assert_close(same(X), folded(X))
