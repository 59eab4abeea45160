"""Convolutions and linear layers of constant weights, and affine maps per channel merged into them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import Node

from retrofit.export.nodes import ATEN, arguments

_TRANSPOSED = (ATEN.conv_transpose1d.default, ATEN.conv_transpose2d.input, ATEN.conv_transpose3d.input)
LINEAR = (
    *(ATEN.linear.default, ATEN.conv1d.default, ATEN.conv2d.default, ATEN.conv3d.default, ATEN.convolution.default),
    *(ATEN.conv1d.padding, ATEN.conv2d.padding, ATEN.conv3d.padding, *_TRANSPOSED),
)
"""The ATen operators that they are."""


@dataclass(frozen=True)
class Linear:
    """A convolution or linear layer.

    Attributes:
        weight: As torch holds it, float64: (C_out, C_in / groups, *), or (C_in, C_out / groups, *) of a transposed one.
        bias: (C_out,) in float64, or None.
        groups: Groups of channels.
        transposed: Whether it is a transposed convolution.
        pads_zeros: Whether zeros beside the input count in its output.
    """

    weight: Tensor
    bias: Tensor | None = None
    groups: int = 1
    transposed: bool = False
    pads_zeros: bool = False

    @classmethod
    def of(cls, node: Node, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return what a call of one of `LINEAR` computes with these constants."""
        values = arguments(node)
        transposed = node.target in _TRANSPOSED or bool(values.get("transposed"))
        padding = values.get("padding", "valid")
        pads = weight[0, 0].numel() > 1 if padding == "same" else transposed or (padding != "valid" and any(padding))
        bias = None if bias is None else bias.double()
        return cls(weight.double(), bias, values.get("groups", 1), transposed, pads)

    @property
    def inputs(self) -> int:
        """How many channels it takes."""
        return len(self.weight) if self.transposed else self.weight.shape[1] * self.groups

    @property
    def outputs(self) -> int:
        """How many channels it gives."""
        return self.weight.shape[1] * self.groups if self.transposed else len(self.weight)

    def then(self, scale: Tensor, shift: Tensor) -> Linear:
        """Return the layer that gives scale * y + shift where this one gives y; (C_out,) each. Padding is no matter."""
        weight = self._by_group()
        channels = (self.groups, 1, -1) if self.transposed else (self.groups, -1, 1)
        weight = weight * scale.view(*channels, *(1,) * (weight.ndim - 3))
        if self.bias is not None:
            shift = scale * self.bias + shift
        return self._with(weight, shift if self.bias is not None or bool(shift.any()) else None)

    def from_same(self, size: int) -> bool:
        """Whether each `size` neighbouring output channels come from the same input channels."""
        return (self.outputs // self.groups) % size == 0

    def then_groups(self, matrix: Linear) -> Linear:
        """Return the layer that gives what `matrix` makes of each group of this one's output channels.

        Args:
            matrix: A convolution of size 1 that keeps the number of channels of each group; these come `from_same`.
        """
        outer = 2 if self.transposed else 1
        size = matrix.outputs // matrix.groups
        factor = matrix.weight.reshape(matrix.groups, size, size)
        rows = self._by_group().movedim(outer, 1)
        weight = (factor @ rows.reshape(matrix.groups, size, -1)).reshape(rows.shape).movedim(1, outer)
        bias = matrix.bias
        if self.bias is not None:
            moved = (factor @ self.bias.view(matrix.groups, size, 1)).flatten()
            bias = moved if bias is None else bias + moved
        return self._with(weight, bias)

    def after(self, scale: Tensor, shift: Tensor) -> Linear:
        """Return the layer that takes x where this one takes scale * x + shift; (C_in,) each.

        A shift other than zero is right only if this one does not count zeros beside its input.
        """
        weight = self._by_group()
        channels = (self.groups, -1, 1) if self.transposed else (self.groups, 1, -1)
        shape = (*channels, *(1,) * (weight.ndim - 3))
        bias = self.bias
        if bool(shift.any()):
            moved = (weight * shift.view(shape)).sum((1 if self.transposed else 2, *range(3, weight.ndim))).flatten()
            bias = moved if bias is None else bias + moved
        return self._with(weight * scale.view(shape), bias)

    def _by_group(self) -> Tensor:
        """The weight as (groups, first, second, *): its two channel dimensions, within each group."""
        return self.weight.unflatten(0, (self.groups, -1))

    def _with(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return replace(self, weight=weight.flatten(0, 1), bias=bias)
