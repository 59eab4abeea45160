"""What a training step on a GPU launches, reads and waits for, on fake tensors."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
count = importlib.import_module("count")

MOST = {  # launches forward and backward, and passes over the input
    "FrozenBatchNorm": (2, 2, 5.1),
    "BatchNormalNorm2d": (4, 3, 9.1),
    "BatchNormalNorm2d, noise 0.4": (7, 3, 11.1),
    "GroupNormalNorm 32": (2, 3, 9.1),
    "GroupNormalNorm 2": (2, 3, 9.1),
    "InstanceNormalNorm2d": (2, 3, 9.1),
    "LayerNormalNorm2d": (2, 3, 9.1),
    "MigratedGroupNorm 1": (4, 4, 8.1),
    "MigratedGroupNorm 32, t 0.5": (4, 4, 8.1),
    "ProxyNorm ReLU": (3, 3, 5.1),
    "ProxyNorm SiLU": (3, 3, 5.1),
}


@pytest.mark.parametrize("channels_last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("name", MOST)
def test_a_layer(name: str, channels_last: bool) -> None:
    report = count.layer(count.LAYERS[name], count.SHAPE, torch.bfloat16, channels_last)
    forward, backward, passes = MOST[name]
    assert report.forward <= forward
    assert report.backward <= backward
    assert report.passes <= passes
    assert report.waits == 0
    assert not report.view


def test_tokens() -> None:
    report = count.layer(count.TOKEN_LAYERS["LayerNormalNorm"], count.TOKENS)
    assert (report.forward, report.backward, report.waits) == (1, 2, 0)
    # Reads x once forwards; partial sums of gamma's gradient are a tensor of their own
    assert report.passes <= 6.1


def test_what_a_network_launches_beside_its_norms_stays_the_same() -> None:
    """Behind a view, the in-place activations and additions would copy it."""
    source = count.network("resnet18", None, 8)
    for target in ("bnn", "ln"):
        assert count.network("resnet18", target, 8)["rest"] == source["rest"]


def test_a_layer_makes_few_calls() -> None:
    """Of Python and C functions, beside Triton's launcher."""
    x = torch.randn(count.CALLED).to(memory_format=torch.channels_last).requires_grad_()
    forward, backward = count.calls(count.LAYERS["BatchNormalNorm2d"](), x)
    assert forward <= 60
    assert backward <= 70
