"""What a training step on a GPU launches, reads and waits for, on fake tensors."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from retrofit.layers import kernels

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
    # Of the activation, no launch but its tables'. In a module of its own, the norm writes its output
    "MigratedGroupNorm, ProxyNorm": (5, 5, 10.1),
    "MigratedGroupNormAct with ProxyNorm": (4, 5, 8.1),
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


def _apart(change: Callable[[Any, Any], Any]) -> tuple[int, float]:
    """Return backward launches and passes of a norm and its ProxyNorm that something changed."""

    def build() -> nn.Module:
        norm, proxy = count.proxied_norm(fused=False)
        return nn.Sequential(*(change(norm, proxy) or (norm, proxy)))

    report = count.layer(build)
    return report.backward, report.passes


class Between(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        changed = self.change(y)
        return y if changed is None else changed


def _written(y: torch.Tensor) -> None:
    with torch.no_grad():
        y.zero_()


@pytest.mark.parametrize(
    "change",
    [
        lambda norm, proxy: norm.register_forward_hook(lambda *_: None) and None,
        lambda norm, proxy: norm.register_full_backward_hook(lambda *_: None) and None,
        lambda norm, proxy: proxy.register_full_backward_hook(lambda *_: None) and None,
        lambda norm, proxy: (norm, Between(lambda y: y.retain_grad()), proxy),
        lambda norm, proxy: (
            norm,
            Between(lambda y: y.register_hook(lambda g: None) and None),
            proxy,
        ),
        lambda norm, proxy: (norm, Between(torch.relu_), proxy),
        lambda norm, proxy: (norm, Between(_written), proxy),
        lambda norm, proxy: (norm, Between(lambda y: y * 1), proxy),
        lambda norm, proxy: proxy.follow(copy.deepcopy(norm)),
    ],
    ids=[
        *("norm's hook", "norm's backward hook", "proxy's backward hook", "retain_grad", "hook"),
        *("in place", "in place, unseen", "another operation", "another norm"),
    ],
)
def test_gradients_go_through_an_output_that_something_may_look_at_or_change(
    change: Callable[[Any, Any], Any],
) -> None:
    fused = _apart(lambda norm, proxy: None)
    assert fused == (5, pytest.approx(10, abs=0.1))
    launches, passes = _apart(change)
    assert launches > fused[0]
    assert passes > fused[1] + 2.5


def test_a_layer_between_that_does_nothing_is_no_hindrance() -> None:
    launches, _ = _apart(lambda norm, proxy: (norm, nn.Identity(), proxy))
    assert launches == 5


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


def test_a_layer_makes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python and C functions, beside Triton's launcher."""
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    x = torch.randn(count.CALLED).to(memory_format=torch.channels_last).requires_grad_()
    forward, backward = count.calls(count.LAYERS["BatchNormalNorm2d"](), x)
    assert forward <= 60
    assert backward <= 70
