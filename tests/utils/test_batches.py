"""Batches of images as people have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.surgery.families import find_norms
from retrofit.surgery.group_count import most_groups
from retrofit.utils.batches import images_of

X = torch.arange(6.0).view(2, 3, 1, 1)
NAN = [X, torch.full_like(X, float("nan"))]


@pytest.mark.parametrize("batches", [[X, X], [(X, 1), (X, 2)], [[X], [X, None, 5]]], ids=["alone", "pairs", "lists"])
def test_with_labels_or_without(batches: Any) -> None:
    assert [images is X for images in images_of(batches)] == [True, True]
    assert [images is X for images in images_of(iter(batches))] == [True, True]


def test_a_tensor_is_one_batch() -> None:
    assert [images is X for images in images_of(X)] == [True]


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (5, "`images` takes batches of images, .*; got int"),
        ([X, "photo.jpg"], "batch 2 is str"),
        ([()], "batch 1 is tuple"),
        ([X, torch.tensor(1.0)], r"batch 2 is \(\)"),
        (NAN, "batch 2 of `images` holds NaN or infinity"),
        ([X / 0], "batch 1 of `images` holds NaN or infinity"),
    ],
)
def test_what_is_no_image_is_refused(batches: Any, said: str) -> None:
    with pytest.raises(RetrofitError, match=said):
        list(images_of(batches, "images"))


@pytest.mark.parametrize(
    "wrong", [5, ["photo.jpg"], [torch.full((2, 3, 32, 32), float("inf"))]], ids=["5", "str", "inf"]
)
def test_nothing_is_fitted_to_them(tmp_path: Path, wrong: Any) -> None:
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
        with pytest.raises((RetrofitError, UsageError), match=r"takes batches of images|holds NaN or infinity"):
            fit()


@pytest.mark.parametrize("wrong", [torch.rand(3, 32, 32), [torch.rand(2, 1, 32, 32)]], ids=["one image", "grey"])
def test_images_of_another_shape_are_not_exported_on(tmp_path: Path, wrong: Any) -> None:
    model = timm.create_model("test_resnet").eval()
    with pytest.raises(UsageError, match=r"`calibrate` takes batches of images, \(N, 3, 32, 32\); got images of \("):
        retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 32, 32), calibrate=wrong)
    assert list(tmp_path.iterdir()) == []
