"""Which layers hold one row, or several, for each image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retrofit.utils.image_rows import without_image_rows


class Tokens(nn.Module):
    """Tokens first, windows of images first, images first, and a norm of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.windows, self.images, self.constant = (nn.LayerNorm(3) for _ in range(4))
        self.unused = nn.LayerNorm(3)
        self.token = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        a = self.first(tokens.transpose(0, 1)).transpose(0, 1)
        b = self.windows(tokens.reshape(-1, 2, 3)).view_as(tokens)
        return self.images(a + b) + self.constant(self.token)


def test_layers_are_told_by_the_rows_of_one_image_and_two() -> None:
    net = Tokens().eval()
    layers = [net.first, net.windows, net.images, net.constant, net.unused]
    assert without_image_rows(net, layers, torch.randn(1, 3, 4, 4)) == {net.first, net.constant}
    assert not any(layer._forward_hooks for layer in layers)
