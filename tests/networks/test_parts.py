"""A network that was converted in part: the record of the part travels in the file of the whole."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import retrofit
from retrofit.surgery import plans_of
from tests.networks.conftest import refused


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = net()
        self.body = nn.Sequential(net(), nn.Conv2d(4, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.enc(x)[:, :3])


def _encoder(net: Any) -> None:
    net.enc, _ = retrofit.convert(net.enc, "ln", input_size=(3, 16, 16))


def _part_then_whole(net: Any) -> None:
    _encoder(net)
    retrofit.convert(net, "bnn", input_size=(3, 16, 16))


def _whole_then_part(net: Any) -> None:
    retrofit.convert(net, "ln", only="enc", input_size=(3, 16, 16))
    retrofit.convert(net.body, "bnn", input_size=(3, 16, 16))


def _a_norm(net: Any) -> None:
    net.body[0][1], _ = retrofit.convert(net.body[0][1], "ln", check=False)


@pytest.mark.parametrize("convert", [_encoder, _part_then_whole, _whole_then_part, _a_norm])
def test_a_network_converted_in_part_loads_into_a_fresh_one(
    convert: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    model = Tower()
    convert(model)
    retrofit.set_strength(model, 0.7)
    retrofit.save(model, tmp_path / "a.safetensors")
    x = torch.randn(2, 3, 16, 16)
    again = retrofit.load(tmp_path / "a.safetensors", into=Tower())
    torch.testing.assert_close(again.eval()(x), model.eval()(x))
    # The loaded network is saved as the first was, and copies carry what was converted.
    retrofit.save(copy.deepcopy(again), tmp_path / "b.safetensors")
    third = retrofit.load(tmp_path / "b.safetensors", into=Tower())
    torch.testing.assert_close(third.eval()(x), model(x))


def test_code_may_build_the_part_converted_already(tmp_path: Path) -> None:
    model = Tower()
    _encoder(model)
    model.enc[1].weight.data.mul_(2)
    retrofit.save(model, tmp_path / "a.safetensors")
    into = Tower()
    _encoder(into)
    again = retrofit.load(tmp_path / "a.safetensors", into=into)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(again.eval()(x), model.eval()(x))


def test_a_part_of_a_librarys_network_is_proved_and_built_again(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet")
    model.layer2, _ = retrofit.convert(model.layer2, "ln", check=False)
    retrofit.save(model, tmp_path / "a.safetensors")
    again = retrofit.load(tmp_path / "a.safetensors")
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(again.eval()(x), model.eval()(x))


def test_plain_forgets_what_its_parts_went_through() -> None:
    model = Tower()
    _encoder(model)
    retrofit.set_strength(model, 1.0)
    assert [(plan.to, plan.part) for plan in plans_of(model)] == [("ln", "enc")]
    assert plans_of(retrofit.plain(model, (3, 16, 16))) == []


def test_a_part_that_is_absent_is_named(tmp_path: Path) -> None:
    model = Tower()
    _encoder(model)
    retrofit.save(model, tmp_path / "a.safetensors")
    with refused("it converts 'enc', which is absent here"):
        retrofit.load(tmp_path / "a.safetensors", into=net())
