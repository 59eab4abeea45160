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

WRAPPERS = {
    "compile": torch.compile,
    "DataParallel": nn.DataParallel,
    "both": lambda net: torch.compile(nn.DataParallel(net)),
}


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def test_without_a_record_there_is_an_empty_one() -> None:
    assert record_of(_net()) == Record()


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_carry_it(carry: Callable[[nn.Module], nn.Module]) -> None:
    net, _ = retrofit.convert(_net(), "bnn", input_size=(3, 8, 8))
    set_record(net, labels=["a", "b"])
    twin = carry(net)
    assert record_of(twin) == record_of(net)
    set_record(twin, labels=None)
    assert record_of(net).labels == ["a", "b"]


@pytest.mark.parametrize("wrap", list(WRAPPERS))
def test_a_wrapped_network_keeps_its_record_inside(wrap: str, tmp_path: object) -> None:
    net = _net()
    set_record(net, labels=["a", "b", "c", "d"])
    model, report = retrofit.convert(WRAPPERS[wrap](net), "bnn", input_size=(3, 8, 8))
    assert unwrapped(model) is net is not model
    assert [row.name for row in report.plan.layers] == ["1"]  # the network's own name, not the wrapper's
    assert record_of(model) is record_of(net)
    assert record_of(net).plans == (report.plan,)
    assert record_of(net).labels == ["a", "b", "c", "d"]
    retrofit.save(model, f"{tmp_path}/a.safetensors")
    into = WRAPPERS[wrap](_net())
    assert retrofit.load(f"{tmp_path}/a.safetensors", into=into) is into
    again = unwrapped(into)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(again.eval()(images), net.eval()(images))


def test_a_norm_by_itself_hands_its_record_on() -> None:
    norm = nn.BatchNorm2d(4)
    set_record(norm, labels=["a"])
    model, report = retrofit.convert(nn.DataParallel(norm), "bnn", input_size=(4, 2, 2))
    assert record_of(model) == Record(labels=["a"], plans=(report.plan,))
