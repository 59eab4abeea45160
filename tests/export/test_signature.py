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
            r"takes a torch.float32 tensor of Nx3x12x12 as `input`, not a torch.float32 tensor of "
            r"2x3x12x9; fold it again with example `inputs` like those of this call",
        ),
        ((IMAGE[0],), "not a torch.float32 tensor of 3x12x12; fold it again with example `inputs`"),
        ((IMAGE.int(),), "not a torch.int32 tensor of 2x3x12x12"),
        ((), "exactly the arguments that it was captured with, `input`; fold it again"),
        ((IMAGE, IMAGE), "exactly the arguments that it was captured with"),
        ((IMAGE.numpy(),), "takes a torch.float32 tensor of Nx3x12x12 as `input`, not array"),
    ],
)
def test_another_call_is_one_line(
    args: tuple[Any, ...], message: str, image_network: nn.Module
) -> None:
    with pytest.raises(RetrofitError, match=message) as refused:
        image_network(*args)
    assert "\n" not in str(refused.value)


def test_a_copy_has_the_conditions_of_torch(image_network: nn.Module) -> None:
    # torch leaves the hooks of a module out of its copies
    with pytest.raises(AssertionError, match="Guard failed"):
        copy.deepcopy(image_network)(IMAGE[..., :9])


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
        ({"square": False}, "takes True as `square`, not False; fold it again"),
        ({"weight": None}, "takes a torch.float32 tensor of Nx3 as `weight`, not None"),
        ({"weight": a[:2]}, "under a condition that this call does not meet"),
        ({"weight": a[:, :1]}, "as `weight`, not a torch.float32 tensor of 4x1; fold it again"),
    ):
        with pytest.raises(RetrofitError, match=message):
            folded(**{**example, **changes})
    with pytest.raises(RetrofitError, match=r"exactly the arguments .* `a`, `weight`, `square`"):
        folded(a=a)


def test_a_fixed_number_of_samples() -> None:
    folded = retrofit.fold(nn.Linear(3, 3).eval(), input_size=(3,), batch=2)
    assert folded(torch.randn(2, 3)).shape == (2, 3)
    with pytest.raises(RetrofitError, match=r"tensor of 2x3 as `input`, not .* tensor of 5x3"):
        folded(torch.randn(5, 3))


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, 2)).mean(1)


def test_a_condition_on_a_size_that_may_vary() -> None:
    folded = retrofit.fold(Pairs().eval(), inputs=torch.randn(4, 3))
    assert folded(torch.randn(6, 3)).shape == (3, 3)
    with pytest.raises(RetrofitError, match="under a condition that this call does not meet"):
        folded(torch.randn(5, 3))
