"""The teacher: the source network, and the loss it gives."""

from __future__ import annotations

import pytest
import timm
import torch

import retrofit
from retrofit.errors import RetrofitError
from retrofit.finetune.objective import Distillation, source_network


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_the_teacher_is_the_source(to: str) -> None:
    source = timm.create_model("test_resnet").eval()
    images = torch.randn(2, 3, 32, 32)
    scores = source(images)
    model, _ = retrofit.convert(source, to, check=False)
    retrofit.set_strength(model, 1.0)
    teacher = source_network(model)
    torch.testing.assert_close(teacher(images), scores, rtol=1e-4, atol=1e-5)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_unconverted_network_has_no_source() -> None:
    with pytest.raises(RetrofitError, match="needs a converted network"):
        source_network(timm.create_model("test_resnet"))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_the_divergence_of_the_softened_probabilities(temperature: float) -> None:
    taught, scores = torch.randn(2, 4, 5, dtype=torch.float64)
    loss = Distillation(torch.nn.Identity(), temperature)(scores, taught)
    p, q = (torch.softmax(values.float().double() / temperature, 1) for values in (taught, scores))
    expected = (p * (p / q).log()).sum(1).mean() * temperature**2
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert Distillation(torch.nn.Identity(), temperature)(taught, taught) == pytest.approx(0, abs=1e-6)
