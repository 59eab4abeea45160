"""The loss of a run."""

import pytest
import torch
from torch import nn

from retrofit.finetune.objective import Objective
from retrofit.finetune.recipe import Recipe


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
