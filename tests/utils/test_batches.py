"""Batches of images as people have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.surgery.families import find_norms
from retrofit.surgery.group_count import most_groups
from retrofit.utils.batches import images_of, without_image_rows

X = torch.arange(6.0).view(2, 3, 1, 1)
NAN = [X, torch.full_like(X, float("nan"))]


@pytest.mark.parametrize("batches", [X, [X], [(X, 1)], [[X, None, 5]], iter([X])])
def test_with_labels_or_without(batches: Any) -> None:
    (images,) = images_of(batches)
    assert images is X


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (5, "`images` takes batches of images, .*; got int"),
        ([X, "photo.jpg"], "batch 2 is str"),
        ([()], "batch 1 is tuple"),
        ([X, torch.tensor(1.0)], r"batch 2 is \(\)"),
        (NAN, "batch 2 of `images` holds NaN or infinity"),
    ],
)
def test_what_is_no_image_is_refused(batches: Any, said: str) -> None:
    with pytest.raises(RetrofitError, match=said):
        list(images_of(batches, "images"))


def test_nothing_is_fitted_to_them(tmp_path: Path) -> None:
    wrong = [torch.full((2, 3, 32, 32), float("inf"))]
    source = timm.create_model("test_resnet").eval()
    model, _ = retrofit.convert(timm.create_model("test_resnet"), "ln")
    retrofit.set_strength(model, 1.0)
    for fit in (
        lambda: retrofit.fold(model, "poly", calibrate=wrong),
        lambda: retrofit.export_onnx(model, tmp_path / "never.onnx", precision="int8", calibrate=wrong),
        lambda: retrofit.bake(model, wrong),
        lambda: retrofit.plan(source, "gn", groups="auto", calibrate=wrong),
        lambda: most_groups(source, [norm for norm in find_norms(source) if norm.name == "bn1"], wrong),
    ):
        with pytest.raises(RetrofitError, match="holds NaN or infinity"):
            fit()


@pytest.mark.parametrize("wrong", [torch.rand(3, 32, 32), [torch.rand(2, 1, 32, 32)]], ids=["one image", "grey"])
def test_images_of_another_shape_are_not_exported_on(tmp_path: Path, wrong: Any) -> None:
    model = timm.create_model("test_resnet").eval()
    with pytest.raises(UsageError, match=r"`calibrate` takes batches of images, \(N, 3, 32, 32\); got images of \("):
        retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 32, 32), calibrate=wrong)
    assert list(tmp_path.iterdir()) == []


class Tokens(nn.Module):
    """Tokens first, windows of images first, images first, and a norm of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.windows, self.images, self.constant = (nn.LayerNorm(3) for _ in range(4))
        self.unused = nn.LayerNorm(3)
        self.token = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        a = self.first(tokens.transpose(0, 1)).transpose(0, 1)
        b = self.windows(tokens.reshape(-1, 2, 3)).view_as(tokens)
        return self.images(a + b) + self.constant(self.token)


def test_layers_are_told_by_the_rows_of_one_image_and_two() -> None:
    net = Tokens().eval()
    layers = [net.first, net.windows, net.images, net.constant, net.unused]
    assert without_image_rows(net, layers, torch.randn(1, 3, 4, 4)) == {net.first, net.constant}
    assert not any(layer._forward_hooks for layer in layers)
