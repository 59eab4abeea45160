"""Networks built again, and never larger than a file's tensors."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from retrofit.networks.artifact import load
from retrofit.networks.rebuild import TooLargeError, bounded_by, check_numbers, skeleton
from retrofit.record import ModelSource
from tests.networks.conftest import refused, rewrite


def test_a_network_that_does_not_build_on_the_meta_device_is_built_for_real() -> None:
    before = torch.get_rng_state()
    assert not next(skeleton(ModelSource("torchvision", "regnet_y_400mf")).parameters()).is_meta
    assert torch.equal(torch.get_rng_state(), before)


# --- limits on what a manifest may request

SECONDS = 5  # of this process's own time: the machine may be busy


def _many_samples(manifest: dict[str, Any]) -> None:
    row = next(
        row for row in manifest["conversion"]["steps"][1]["edits"] if row["status"] == "converted"
    )
    row["options"]["samples"] = 1_000_000_000


SWIN = {"name": "swin_tiny_patch4_window7_224", "kwargs": {"img_size": 9_999, "window_size": 2_000}}
GREEDY: dict[str, Callable[[dict[str, Any]], None]] = {
    "a giant network": lambda m: m["model"].update(
        library="torchvision", name="regnet_y_128gf", kwargs={}
    ),
    "a million layers": lambda m: m["model"]["kwargs"].update(layers=[1_000_000, 1, 1, 1]),
    "wide": lambda m: m["model"].update(name="resnet50", kwargs={"base_width": 9_999}),
    "large images": lambda m: m["model"].update(SWIN),
    "a long argument": lambda m: m["model"]["kwargs"].update(block_args=["x" * 20_000]),
    "a nested argument": lambda m: m["model"]["kwargs"].update(
        layers=json.loads("[" * 500 + "]" * 500)
    ),
    "many samples": _many_samples,
    "huge images": lambda m: m["preprocess"].update(input_size=[3, 100_000, 100_000]),
    "a number beyond all floats": lambda m: m["preprocess"].update(mean=[10**400] * 3),
    "large images to run it on": lambda m: m["sampled_outputs"].update(size=[3, 16_000, 16_000]),
}


@pytest.mark.parametrize("ask", GREEDY.values(), ids=GREEDY)
def test_what_a_manifest_asks_for_is_bounded_by_its_tensors(
    saved: Path, ask: Callable[[dict[str, Any]], None]
) -> None:
    rewrite(saved, lambda manifest, _: ask(manifest))
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


def test_numbers_in_proportion() -> None:
    for value in ([1, [2, {"a": -1_000_000}]], 1e300):
        with pytest.raises(TooLargeError):
            check_numbers({"x": value}, {"a": torch.zeros(64, 3, 7, 7)})
    values = {
        "num_classes": 21_841,
        "img_size": 448,
        "rates": [0.1, None, True],
        "name": "x",
        "most": float("inf"),
    }
    check_numbers(values, {"head": torch.zeros(21_841, 768)})
