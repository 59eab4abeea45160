"""Affine maps folded into linear layers, against the map computed before or behind the layer as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn

from retrofit.export.folding.linear import fold_after, fold_before, fold_groups_after, mixes_groups, takes_shift

LAYERS = {  # a layer's class and arguments, a shape it takes, whether it takes a shift
    "linear": (nn.Linear, (4, 6), {}, (3, 4), True),
    "1d": (nn.Conv1d, (4, 6, 3), {"padding": 1}, (3, 4, 5), False),
    "2d": (nn.Conv2d, (4, 6, 3), {}, (3, 4, 5, 4), True),
    "2d, padded": (nn.Conv2d, (4, 6, 3), {"padding": "same"}, (3, 4, 5, 4), False),
    "2d, padded by the input's size": (Conv2dSame, (4, 6, 3), {"stride": 2}, (3, 4, 5, 4), False),
    "3d": (nn.Conv3d, (4, 6, 2), {"padding": "valid"}, (2, 4, 3, 3, 3), True),
    "pointwise": (nn.Conv2d, (4, 6, 1), {"stride": 2}, (3, 4, 5, 4), True),
    "pointwise, padded": (nn.Conv2d, (4, 6, 1), {"padding": 1}, (3, 4, 5, 4), False),
    "pointwise, in groups": (nn.Conv2d, (4, 6, 1), {"groups": 2}, (3, 4, 5, 4), True),
    "in groups": (nn.Conv2d, (4, 6, 3), {"groups": 2}, (3, 4, 5, 4), True),
    "depthwise": (nn.Conv2d, (6, 6, 3), {"groups": 6, "padding": 1, "padding_mode": "reflect"}, (3, 6, 5, 4), True),
    "transposed": (nn.ConvTranspose2d, (4, 6, 3), {"stride": 2}, (3, 4, 5, 4), False),
    "transposed, in groups": (nn.ConvTranspose1d, (4, 6, 3), {"groups": 2}, (3, 4, 5), False),
    "transposed, 3d": (nn.ConvTranspose3d, (4, 6, 2), {}, (2, 4, 3, 3, 3), False),
}
CASES = pytest.mark.parametrize(("kind", "bias"), [(kind, bias) for kind in LAYERS for bias in (True, False)])


def made(kind: str, bias: bool) -> tuple[nn.Module, Tensor]:
    """Return a layer in float64, and an input."""
    of, sizes, options, shape, _ = LAYERS[kind]
    return of(*sizes, **options, bias=bias).double(), torch.randn(shape, dtype=torch.float64)


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """View (C,) as it lies in `x`, (N, C, *)."""
    return values.view(-1, *(1,) * (x.ndim - 2))


@CASES
def test_a_map_behind_a_layer(kind: str, bias: bool) -> None:
    layer, x = made(kind, bias)
    weight, y = layer.weight, layer(x)
    scale, shift = torch.randn(2, 6, dtype=torch.float64)
    fold_after(layer, scale, shift)
    torch.testing.assert_close(layer(x), per_channel(scale, y) * y + per_channel(shift, y))
    assert layer.weight is weight


@CASES
@pytest.mark.parametrize("shifted", [True, False])
def test_a_map_before_a_layer(kind: str, bias: bool, shifted: bool) -> None:
    layer, x = made(kind, bias)
    assert takes_shift(layer) == LAYERS[kind][4]
    if shifted and not takes_shift(layer):
        with pytest.raises(AssertionError):  # it is no longer the same function: the answer must be no
            compare_before(layer, x, shifted)
    else:
        compare_before(layer, x, shifted)


def compare_before(layer: nn.Module, x: Tensor, shifted: bool) -> None:
    """Fold a map before the layer, and compare."""
    scale, shift = torch.randn(2, x.shape[1], dtype=torch.float64)
    mapped = per_channel(scale, x) * x + (per_channel(shift, x) if shifted else 0)
    expected = layer(mapped)
    fold_before(layer, scale, shift if shifted else None)
    torch.testing.assert_close(layer(x), expected)


@CASES
def test_matrices_of_groups_behind_a_layer(kind: str, bias: bool) -> None:
    layer, x = made(kind, bias)
    assert mixes_groups(layer, 3) == (kind != "depthwise")
    if not mixes_groups(layer, 3):
        return
    y = layer(x)
    matrix, shift = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    fold_groups_after(layer, matrix, shift)
    mixed = torch.einsum("gij,ngj...->ngi...", matrix, y.unflatten(1, (2, 3))).flatten(1, 2)
    torch.testing.assert_close(layer(x), mixed + per_channel(shift, y))


def test_a_new_bias_is_trained_where_the_weight_is() -> None:
    for trained in (True, False):
        layer = nn.Conv2d(3, 6, 1, bias=False).requires_grad_(trained)
        fold_after(layer, torch.ones(6), torch.ones(6))
        assert layer.bias is not None
        assert layer.bias.requires_grad == trained


def test_a_shift_of_zero_adds_no_bias() -> None:
    layer = nn.Conv2d(3, 6, 1, bias=False)
    before = copy.deepcopy(layer.weight)
    fold_after(layer, torch.full((6,), 2.0), torch.zeros(6))
    assert layer.bias is None
    torch.testing.assert_close(layer.weight, 2 * before)


def test_another_number_of_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="puts out 5 channels, the map has 6"):
        fold_after(nn.Linear(3, 5), torch.ones(6), torch.ones(6))
    with pytest.raises(ValueError, match="takes 3 channels, the map has 6"):
        fold_before(nn.Linear(3, 5), torch.ones(6))
