"""A file makes us build no more than its own tensors could fill, and says so at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from retrofit.networks.artifact import load
from retrofit.networks.rebuild import TooLargeError, bounded_by, check_numbers
from tests.networks.conftest import refused, rewrite

SECONDS = 5  # of this process's own time: the machine may be busy


def _model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["model"].update(changes)


def _kwargs(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["model"]["kwargs"].update(changes)


def _many_samples(manifest: dict[str, Any]) -> None:
    row = next(row for row in manifest["conversion"]["steps"][1]["edits"] if row["status"] == "converted")
    row["options"]["samples"] = 1_000_000_000


GREEDY: dict[str, Callable[[dict[str, Any]], None]] = {
    "a giant network": _model(library="torchvision", name="regnet_y_128gf", kwargs={}),
    "a million layers": _kwargs(layers=[1_000_000, 1, 1, 1]),
    "wide": _model(name="resnet50", kwargs={"base_width": 9_999}),
    "large images": _model(name="swin_tiny_patch4_window7_224", kwargs={"img_size": 9_999, "window_size": 2_000}),
    "a long argument": _kwargs(block_args=["x" * 20_000]),
    "a nested argument": _kwargs(layers=json.loads("[" * 500 + "]" * 500)),
    "many samples": _many_samples,
    "huge images": lambda manifest: manifest["preprocess"].update(input_size=[3, 100_000, 100_000]),
    "a number beyond all floats": lambda manifest: manifest["preprocess"].update(mean=[10**400] * 3),
    "large images to run it on": lambda manifest: manifest["sampled_outputs"].update(size=[3, 16_000, 16_000]),
}


@pytest.mark.parametrize("case", list(GREEDY))
def test_what_a_manifest_asks_for_is_bounded_by_its_tensors(saved: Path, case: str) -> None:
    rewrite(saved, lambda manifest, _: GREEDY[case](manifest))
    began = time.process_time()
    with refused("."):
        load(saved)
    assert time.process_time() - began < SECONDS


def test_building_stops_at_the_first_tensor_too_much() -> None:
    with bounded_by({"a": torch.zeros(10, 10)}):
        nn.Linear(100, 100)
        with pytest.raises(TooLargeError, match="far larger than the 1 tensors"):
            nn.Linear(100_000, 1_000, device="meta")
        with pytest.raises(TooLargeError):
            nn.ModuleList(nn.ReLU() for _ in range(100_000))
        with pytest.raises(TooLargeError):
            nn.ParameterList(torch.zeros(1) for _ in range(10_000))
    nn.Linear(100_000, 1_000, device="meta")  # the bound ends with its context


@pytest.mark.parametrize("value", [[1, [2, {"a": -1_000_000}]], 1e300, [0] * 200_000, {"a": "x" * 200_000}])
def test_numbers_out_of_proportion(value: Any) -> None:
    with pytest.raises(TooLargeError):
        check_numbers({"x": value}, {"a": torch.zeros(64, 3, 7, 7)})


def test_numbers_in_proportion() -> None:
    values = {"num_classes": 21_841, "img_size": 448, "rates": [0.1, None, True], "name": "x", "most": float("inf")}
    check_numbers(values, {"head": torch.zeros(21_841, 768)})
