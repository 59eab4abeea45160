"""The state dict of a converted network holds its function: whatever another one was converted from, it becomes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

import retrofit
from retrofit.surgery import TARGETS
from tests.surgery.networks import trained

OPTIONS: dict[str, dict[str, Any]] = {
    **{to: {"alpha": 0.3} for to in ("bnn", "lnn", "gnn", "inn", "normal")},
    **{to: {"groups": 2, "ws": True} for to in ("gn", "gn-pn")},
    **{to: {"ws": True} for to in ("ln", "ln-pn")},
    "dbn": {},
    "dbnn": {"alpha": 0.3},
    "evonorm-s0": {"groups": 2},
    "frn-tlu": {},
    "frozen": {},
}
"""Options unlike the defaults; those that change which tensors there are (`ws`) are given to both networks."""


class Net(nn.Module):
    """All families of normalization, small; at other sizes than the tests' it amplifies rounding errors: no checks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3), BatchNormAct2d(8, act_layer=nn.SiLU)
        self.conv3, self.bn3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.gn, self.inorm, self.ln = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        x = self.inorm(self.gn(torch.tanh(self.bn3(self.conv3(x)))))
        return self.ln(x.amax((2, 3)))  # the mean of what InstanceNorm leaves is its beta


def dying() -> nn.Module:
    """A trained network, some channels of which are nearly dead."""
    net: Any = trained(Net())
    for norm in (net.bn1, net.bn2, net.bn3):
        norm.running_var[:5] *= 1e-4
    return net


def test_every_target_is_tried() -> None:
    assert set(OPTIONS) == set(TARGETS)


@pytest.mark.parametrize("to", OPTIONS)
def test_a_fresh_network_becomes_the_trained_one(to: str) -> None:
    shared = {key: value for key, value in OPTIONS[to].items() if key == "ws"}
    strengths = (1.0, 0.0, 0.5, 1.0) if TARGETS[to].has_strength else (None, None)
    model, _ = retrofit.convert(dying(), to, **OPTIONS[to], check=False, strength=strengths[0])
    other, _ = retrofit.convert(Net(), to, **shared, check=False)
    x = torch.randn(4, 3, 12, 12)
    model.train()(x)
    for t in strengths[1:]:
        if t is not None:
            retrofit.set_strength(model, t)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        for training in (False, True):
            torch.testing.assert_close(other.train(training)(x), model.train(training)(x), rtol=1e-5, atol=1e-6)
            other.load_state_dict(copy.deepcopy(model.state_dict()))
    again, _ = retrofit.convert(Net(), to, **shared, check=False)
    again.load_state_dict(copy.deepcopy(other).state_dict())  # what was loaded is handed on, by a copy too
    torch.testing.assert_close(again.eval()(x), model.eval()(x), rtol=1e-5, atol=1e-6)


def test_a_state_dict_holds_parameters_and_buffers_alone_that_may_be_swapped() -> None:
    model, x = retrofit.convert(Net(), "ln-pn", check=False)[0].eval(), torch.randn(2, 3, 12, 12)
    other, _ = retrofit.convert(dying(), "ln-pn", check=False, strength=1.0)
    assert set(model.state_dict()) == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    swapped = torch.func.functional_call(model, other.state_dict(), x)
    torch.testing.assert_close(swapped, other.eval()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_casting_rounds_no_setting(kind: torch.dtype) -> None:
    model, _ = retrofit.convert(dying(), "gn", check=False)
    eps = [model.bn1.eps.item(), model.bn1.group_eps.item()]
    model.to(kind)
    assert [model.bn1.eps.item(), model.bn1.group_eps.item()] == eps
    other, _ = retrofit.convert(Net(), "bnn", alpha=0.3, check=False)
    fresh, _ = retrofit.convert(Net(), "bnn", check=False)
    fresh.load_state_dict(other.to(kind).state_dict())
    assert fresh.bn1.alpha == pytest.approx(0.3, abs=1e-3)
    other.load_state_dict(other.state_dict())
    assert other.bn1.alpha == 0.3


@pytest.mark.parametrize(
    ("to", "entry", "value", "message"),
    [
        ("gn", "bn1.setting_num_groups", 3.0, "3 groups do not divide 8 channels"),
        ("bnn", "bn1.setting_alpha", 2.0, "alpha must lie"),
        ("bnn", "bn1.setting_alpha", float("nan"), "alpha must lie"),
        ("evonorm-s0", "bn1.setting_groups", 5.0, "5 groups do not divide"),
    ],
)
def test_a_setting_out_of_range_is_refused(to: str, entry: str, value: float, message: str) -> None:
    model, _ = retrofit.convert(Net(), to, check=False)
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict({**model.state_dict(), entry: torch.tensor(value)})
