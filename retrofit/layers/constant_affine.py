"""A constant affine map per channel, which nothing trains."""

from __future__ import annotations

from torch import Tensor

from retrofit.layers.leaf import LeafMixin


class ConstantAffine(LeafMixin):
    """x * scale + shift per channel.

    It has no parameters: it is what is left of statistics that were migrated, where no layer beside it takes them in.

    Args:
        scale: (C,).
        shift: (C,).
        channel_dim: Dimension of the channels: 1 for (N, C, *), -1 for (N, *, C).

    Shape:
        (N, C, *) or (N, *, C) to the same, in the input's type.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor, channel_dim: int = 1) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("shift", shift.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to `x`."""
        shape = (-1,) + (1,) * (x.ndim - 2) if self.channel_dim == 1 else (-1,)
        return (x * self.scale.view(shape) + self.shift.view(shape)).to(x.dtype)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.scale.numel()}, channel_dim={self.channel_dim}"
