"""A report beside the exported file: both or neither, as JSON."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export import ExportReport, api
from retrofit.export.onnx import write
from retrofit.record import Preprocess, set_record
from tests.export.networks import norm


@pytest.fixture
def model() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 6, 5))
    preprocess = Preprocess((3, 6, 8), (0.1, 0.2, 0.3), (0.9, 0.8, 0.7), "bicubic", 0.9, "squash")
    set_record(net, preprocess=preprocess, labels=["ant", "bee", "cat", "dog", "elk"])
    return net.eval()


def export(model: nn.Module, report: str, **options: Any) -> ExportReport:
    return retrofit.export_onnx(model, "net.onnx", input_size=(3, 6, 8), report=report, **options)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir()}


def test_json_is_the_report(model: nn.Module) -> None:
    report = export(model, "net.json")
    assert json.loads(Path("net.json").read_text()) == report.to_dict()
    assert report.labels == 5
    assert json.loads(next(x.value for x in onnx.load("net.onnx").metadata_props if x.key == "labels"))[4] == "elk"
    assert set(contents()) == {"net.onnx", "net.json"}
    unknown = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).eval()
    report = export(unknown, "other.json", force=True)
    assert (report.model, report.target, report.strength, report.weights) == (None, None, None, None)
    assert (report.preprocess, report.labels, report.layers) == (None, None, ())


@pytest.mark.parametrize(
    ("calibrate", "options", "judged"),
    [
        (6, {}, "9 random inputs and images"),
        (0, {"fold": "poly"}, "3 random inputs"),
        (1, {"precision": "float16"}, "3 random inputs"),
        (6, {"precision": "float16"}, "3 images"),
    ],
)
def test_what_it_was_judged_on(calibrate: int, options: dict[str, Any], judged: str, model: nn.Module) -> None:
    images = [torch.randn(calibrate, 3, 6, 8)] if calibrate else None
    report = export(model, "net.json", calibrate=images, tolerance=0.9, **options)
    assert report.judged == judged
    assert report.guessed == (options.get("fold") == "poly" and not calibrate)


@pytest.mark.parametrize("large", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_full_disk_keeps_what_was_there(large: bool, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if large:
        monkeypatch.setattr(write, "LARGEST", 100)
    export(model, "net.json")
    before = contents()
    nn.init.ones_(model[4].weight)  # type: ignore[index,arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(api, "json_text", full)
        for name in ("net.json", "other.json"):
            with pytest.raises(RetrofitError, match=f"^no space left for {name}; "):
                export(model, name, force=True)
            assert contents() == before
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RetrofitError, match=r"^no space left for .*net\.onnx; "):
        export(model, "net.json", force=True)
    assert contents() == before


def test_a_wrong_report_is_refused_before_any_work(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "capture", None)
    Path("same.json").symlink_to("net.onnx")
    html = r"^a report is a \.json file, not net\.html; give `report` a name"
    for name, message in (("net.html", html), ("same.json", "is the exported file itself")):
        with pytest.raises(UsageError, match=message):
            export(model, name)
    assert os.listdir() == ["same.json"]
