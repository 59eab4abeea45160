"""Constant maps as numbers: `ChannelMap`, what a layer may be in evaluation, and `LinearMap`, the
convolution or linear layer that takes it in.
"""

from dataclasses import dataclass, replace

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
        cls,
        mean: Tensor,
        var: Tensor,
        eps: float | Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> "ChannelMap":
        """Return the map of a normalization by constant statistics, then gamma and beta."""
        scale = torch.rsqrt(var.detach().double() + eps)
        shift = -mean.detach().double() * scale
        lmbda = torch.ones_like(scale)
        gamma = torch.ones_like(scale) if weight is None else weight.detach().double()
        beta = torch.zeros_like(scale) if bias is None else bias.detach().double()
        return cls(scale, shift, lmbda, gamma, beta)

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


@dataclass(frozen=True)
class LinearMap:
    """A convolution or linear layer, in float64."""

    # (groups, C_out / groups, C_in / groups, *)
    weight: Tensor
    # (C_out,)
    bias: Tensor | None
    transposed: bool = False
    # Whether zeros beside the input count in the output.
    pads_zeros: bool = False

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        groups: int,
        transposed: bool,
        pads_zeros: bool = False,
    ) -> "LinearMap":
        """Return the map of a layer by its weight, as torch lays it out."""
        weight = weight.double().unflatten(0, (groups, -1))
        if transposed:
            weight = weight.transpose(1, 2)
        if bias is not None:
            bias = bias.double()
        return cls(weight, bias, transposed, pads_zeros)

    def torch_weight(self) -> Tensor:
        """Return the weight as torch lays it out."""
        weight = self.weight
        if self.transposed:
            weight = weight.transpose(1, 2)
        return weight.flatten(0, 1)

    def then(self, scale: Tensor, shift: Tensor) -> "LinearMap":
        """Return the layer that gives scale * y + shift where this one gives y; (C_out,) each.
        Padding is no matter.
        """
        groups, out, _, *size = self.weight.shape
        weight = self.weight * scale.view(groups, out, 1, *(1 for _ in size))
        bias = None
        if self.bias is not None:
            bias = scale * self.bias + shift
        elif bool(shift.any()):
            bias = shift
        return replace(self, weight=weight, bias=bias)

    def after(self, scale: Tensor, shift: Tensor) -> "LinearMap":
        """Return the layer that takes x where this one takes scale * x + shift; (C_in,) each. If
        this one counts zeros beside its input, only a shift of 0 is right.
        """
        groups, _, inner, *size = self.weight.shape
        shape = (groups, 1, inner, *(1 for _ in size))
        weight = self.weight * scale.view(shape)
        if not bool(shift.any()):
            return replace(self, weight=weight)
        moved = (self.weight * shift.view(shape)).flatten(2).sum(2).flatten()
        return replace(self, weight=weight, bias=_sum(self.bias, moved))

    def then_groups(self, matrix: "LinearMap") -> "LinearMap | None":
        """Return the layer that is this one and then `matrix`, a convolution of size 1 with as many
        outputs as inputs in each group; None where the channels of a group do not come from the
        same input channels.
        """
        groups, size = matrix.weight.shape[:2]
        own_groups, outputs = self.weight.shape[:2]
        if own_groups * outputs != groups * size or outputs % size:
            return None
        factor = matrix.weight.view(groups, size, size)
        rows = self.weight.reshape(groups, size, -1)
        weight = (factor @ rows).view(self.weight.shape)
        if self.bias is None:
            return replace(self, weight=weight, bias=matrix.bias)
        column = self.bias.view(groups, size, 1)
        moved = (factor @ column).flatten()
        return replace(self, weight=weight, bias=_sum(matrix.bias, moved))


def _sum(bias: Tensor | None, moved: Tensor) -> Tensor:
    return moved if bias is None else bias + moved
