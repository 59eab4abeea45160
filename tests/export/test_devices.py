"""Folding stays on the device of the network: nothing is made where tensors lie by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import retrofit
from retrofit.layers import DecorrelatedBatchNormalNorm2d, GroupNormalNorm, MigratedGroupNorm, ProxyNorm
from tests.export.networks import norm

IMAGES = [torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))]
FOLDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "poly": {"fold": "poly", "tolerance": 0.5},
    "poly on images": {"fold": "poly", "tolerance": 0.5, "calibrate": IMAGES},
    "polynomials": {"fold": "poly", "tolerance": 0.5, "degree": 5, "calibrate": IMAGES},
    "lines": {"fold": "poly", "tolerance": 0.5, "degree": 5, "runtime": "openvino"},
    "frozen": {"freeze_lambda": True, "tolerance": 2.0, "calibrate": IMAGES},
}


def network() -> nn.Sequential:
    whitened = DecorrelatedBatchNormalNorm2d(8, group_size=4)
    whitened.train()(torch.randn(16, 8, 4, 4))
    layers = [norm(8), nn.ReLU(), nn.Conv2d(8, 8, 1), norm(8), nn.Conv2d(8, 8, 1), MigratedGroupNorm(2, 8)]
    layers += [ProxyNorm(nn.PReLU(8), 8), nn.Conv2d(8, 8, 1), whitened, nn.Conv2d(8, 8, 1), GroupNormalNorm(2, 8)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Conv2d(8, 4, 1)).eval()


@pytest.mark.parametrize("case", FOLDS)
def test_fold_makes_its_tensors_where_the_network_lies(case: str) -> None:
    """Tensors lie on the meta device here unless something says where; those would end in an error."""
    model = network()
    expected = retrofit.fold(model, input_size=(3, 6, 6), **FOLDS[case])
    with torch.device("meta"):
        folded = retrofit.fold(model, input_size=(3, 6, 6), **FOLDS[case])
    assert {tensor.device.type for tensor in (*folded.parameters(), *folded.buffers())} == {"cpu"}
    torch.testing.assert_close(folded(IMAGES[0]), expected(IMAGES[0]))
