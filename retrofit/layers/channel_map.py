"""The constant map per channel that a layer may be in evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChannelMap:
    """gamma * psi(scale * x + shift; lambda) + beta, per channel: (C,) each, float64."""

    scale: Tensor
    shift: Tensor
    lmbda: Tensor
    gamma: Tensor
    beta: Tensor

    @classmethod
    def of(
        cls, mean: Tensor, var: Tensor, eps: float | Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> ChannelMap:
        """Return the map of a BatchNorm in evaluation."""
        scale = torch.rsqrt(var.detach().double() + eps)
        ones = torch.ones_like(scale)
        gamma = ones if weight is None else weight.detach().double()
        beta = 0 * ones if bias is None else bias.detach().double()
        return cls(scale, -mean.detach().double() * scale, ones, gamma, beta)

    @property
    def is_affine(self) -> bool:
        """Whether lambda is 1 everywhere it matters."""
        return bool(((self.lmbda == 1) | (self.gamma == 0)).all())

    @property
    def centre(self) -> Tensor:
        """The input that scale * x + shift takes to zero; zero where no single one does."""
        return torch.where(self.scale == 0, 0.0, -self.shift / self.scale)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return scale and shift of the whole map, where lambda is 1."""
        return self.gamma * self.scale, self.gamma * self.shift + self.beta
