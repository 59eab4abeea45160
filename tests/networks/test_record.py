"""The record travels with a network: through wrappers, copies and conversions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import retrofit
from retrofit.record import Record, record_of, set_record, unwrapped


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_carry_it(carry: Callable[[nn.Module], nn.Module]) -> None:
    net, _ = retrofit.convert(_net(), "bnn", input_size=(3, 8, 8))
    set_record(net, labels=["a", "b"])
    twin = carry(net)
    assert record_of(twin) == record_of(net)
    set_record(twin, labels=None)
    assert record_of(net).labels == ["a", "b"]


def test_a_wrapped_network_keeps_its_record_inside(tmp_path: object) -> None:
    def wrap(net: nn.Module) -> nn.Module:
        return torch.compile(nn.DataParallel(net))

    net = _net()
    set_record(net, labels=["a", "b", "c", "d"])
    model, report = retrofit.convert(wrap(net), "bnn", input_size=(3, 8, 8))
    assert unwrapped(model) is net is not model
    assert [row.name for row in report.plan.layers] == ["1"]  # the network's own name, not the wrapper's
    assert record_of(model) is record_of(net)
    assert record_of(net) == Record(labels=["a", "b", "c", "d"], plans=(report.plan,))
    retrofit.save(model, f"{tmp_path}/a.safetensors")
    into = wrap(_net())
    assert retrofit.load(f"{tmp_path}/a.safetensors", into=into) is into
    again = unwrapped(into)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(again.eval()(images), net.eval()(images))
