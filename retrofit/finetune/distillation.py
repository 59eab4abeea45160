"""Distillation: the source network, rebuilt from the converted one at strength 0, teaches it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.errors import RetrofitError
from retrofit.networks.models import Network, strengths
from retrofit.surgery import set_strength


def check_untrained(network: Network) -> None:
    """Refuse a network that is not its source at strength 0, because it was trained since it was converted.

    Training raises the strength, and `finetune` writes its steps down beside the weights.

    Raises:
        RetrofitError: If that is so.
    """
    if network.weights.get("steps") or any(strengths(network.model)):
        raise RetrofitError(
            "`teacher='source'` is the network at strength 0, but this one was trained since its conversion, or its "
            "strength raised; convert the source anew, at strength 0, and train that, or drop `teacher`"
        )


def source_network(model: nn.Module) -> nn.Module:
    """Return the network that `model` was converted from, in evaluation, frozen.

    At strength 0 a converted network is its source's function in evaluation, as long as it has not been trained since.

    Raises:
        RetrofitError: If the model holds no converted layer.
    """
    source = copy.deepcopy(model)
    try:
        set_strength(source, 0.0)
    except RetrofitError:
        raise RetrofitError(
            "`teacher='source'` needs a converted network whose layers have a strength; convert it first, with "
            "`retrofit.convert` or `retrofit convert`"
        ) from None
    return source.eval().requires_grad_(False)


class Distillation(nn.Module):
    """The loss that a teacher gives: Kullback-Leibler divergence of the class probabilities at a temperature.

    Args:
        teacher: Network in evaluation that gives class scores (N, classes).
        temperature: Divides both networks' scores; the loss is multiplied by its square, so that gradients keep their
            size (Hinton et al. 2015).
    """

    def __init__(self, teacher: nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        self.teacher = teacher
        self.temperature = temperature

    def forward(self, scores: Tensor, images: Tensor) -> Tensor:
        """Return the mean loss of the student's `scores`, (N, classes), on `images`, (N, C, H, W)."""
        with torch.no_grad():
            wanted = functional.log_softmax(self.teacher(images).float() / self.temperature, dim=1)
        given = functional.log_softmax(scores.float() / self.temperature, dim=1)
        return self.temperature**2 * functional.kl_div(given, wanted, reduction="batchmean", log_target=True)
