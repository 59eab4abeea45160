"""Folding stays on the device of the network: shown on a device that is not there (see `pretend_device`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import retrofit
from retrofit.layers import DecorrelatedBatchNormalNorm2d, GroupNormalNorm, MigratedGroupNorm, ProxyNorm
from tests.export.networks import norm
from tests.pretend_device import DEVICE, Pretended, pretended

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


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case == "poly on images" else []) for case in FOLDS]
)
def test_fold_stays_on_the_device(case: str) -> None:
    model = network()
    expected = retrofit.fold(model, input_size=(3, 6, 6), **FOLDS[case])
    with pretended(model):
        folded = retrofit.fold(model, input_size=(3, 6, 6), **FOLDS[case])
        assert {tensor.device for tensor in (*folded.parameters(), *folded.buffers())} == {DEVICE}
        found = folded(IMAGES[0].to(DEVICE))
    assert isinstance(found, Pretended)
    torch.testing.assert_close(found.inner, expected(IMAGES[0]))


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with pretended(network()) as model:
        with pytest.raises(RuntimeError, match="two devices"):
            model(IMAGES[0])
        with pytest.raises(RuntimeError, match="two devices"):
            torch.ones(3, device=DEVICE) + torch.ones(3)
        assert (torch.ones(3, device=DEVICE) + torch.tensor(1.0)).device == DEVICE
