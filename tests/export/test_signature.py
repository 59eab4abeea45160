"""A captured network refuses another call in one line that says what to do."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError

IMAGE = torch.randn(2, 3, 12, 12)


@pytest.fixture(scope="module")
def image_network() -> nn.Module:
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *pool)
    return retrofit.fold(model.eval(), input_size=(3, 12, 12))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (IMAGE[..., :9],),
            r"`input` of Nx3x12x12, not of 2x3x12x9; fold it again with "
            r"`input_size=\(3, 12, 9\)`, or with `dynamic_size=True`",
        ),
        ((IMAGE[:, :1],), r"not of 2x1x12x12; fold it again with `input_size=\(1, 12, 12\)`$"),
        ((IMAGE[0],), "not of 3x12x12; fold it again with example `inputs`"),
        ((IMAGE.half(),), r"of torch.float32, not of torch.float16; convert it with `.to\("),
        ((IMAGE.to("meta"),), r"of cpu, not of meta; move it with `.to\('cpu'\)`"),
        ((), "exactly the arguments that it was captured with, `input`; fold it again"),
        ((IMAGE, IMAGE), "exactly the arguments that it was captured with"),
        ((IMAGE.numpy(),), "captured with a tensor as `input`, not array"),
    ],
)
def test_another_call_is_one_line(
    args: tuple[Any, ...], message: str, image_network: nn.Module
) -> None:
    # torch leaves the hooks of a module out of its copies
    copies = [copy.deepcopy(image_network)] if len(args) == 1 else []
    for network in (image_network, *copies):
        with pytest.raises(RetrofitError, match=message) as refused:
            network(*args)
        assert "\n" not in str(refused.value)


def test_any_number_of_samples_and_the_networks_own_precision(image_network: nn.Module) -> None:
    for rows in (0, 1, 5):
        assert image_network(IMAGE[:1].expand(rows, -1, -1, -1)).shape == (rows, 8)
    assert copy.deepcopy(image_network).double()(IMAGE.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert image_network(IMAGE.bfloat16()).shape == (2, 8)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a: Tensor, weight: Tensor | None = None, square: bool = False) -> Tensor:
        y = self.linear(a)
        if weight is not None:
            y = y * weight
        return y * y if square else y


def test_keywords_constants_and_sizes_that_belong_together() -> None:
    a = torch.randn(4, 3)
    example = {"a": a, "weight": a, "square": True}
    folded = retrofit.fold(Weighted().eval(), inputs=example)
    assert folded(square=True, weight=a, a=a).shape == (4, 3)
    for changes, message in (
        ({"square": False}, "captured with True as `square`, not False; fold it again"),
        ({"weight": None}, "captured with a tensor as `weight`, not None"),
        ({"weight": a[:2]}, "under a condition that this call does not meet"),
        ({"weight": a[:, :1]}, "`weight` of Nx3, not of 4x1; fold it again with example `inputs`"),
    ):
        with pytest.raises(RetrofitError, match=message):
            folded(**{**example, **changes})
    with pytest.raises(RetrofitError, match=r"exactly the arguments .* `a`, `weight`, `square`"):
        folded(a=a)


def test_a_fixed_number_of_samples() -> None:
    folded = retrofit.fold(nn.Linear(3, 3).eval(), input_size=(3,), batch=2)
    assert folded(torch.randn(2, 3)).shape == (2, 3)
    with pytest.raises(RetrofitError, match="again without `batch`, or with `batch=5`"):
        folded(torch.randn(5, 3))
