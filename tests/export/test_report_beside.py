"""A report beside the exported file: both or neither, and a page that says how to use the file."""

from __future__ import annotations

import errno
import html
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export import ExportReport, report_beside
from retrofit.export.onnx import write
from retrofit.export.onnx.exported_file import open_exported
from retrofit.record import Preprocess, set_record
from tests.export.networks import norm

HOSTILE = "<img src=x onerror=alert(1)>\u202e&'\"\n"
SQUASHED = Preprocess((3, 6, 8), (0.1, 0.2, 0.3), (0.9, 0.8, 0.7), "bicubic", 0.9, "squash")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = {"stem": nn.Conv2d(3, 8, 3), "n<b>": norm(8), "act": nn.ReLU(), "flat": nn.Flatten()}
    net = nn.Sequential()
    for name, layer in {**layers, "head": nn.Linear(8 * 4 * 6, 5)}.items():
        net.add_module(name, layer)
    set_record(net, preprocess=SQUASHED, labels=["ant", "bee", "cat", "dog", "elk"])
    return net.eval()


def export(model: nn.Module, report: Path | None, **options: Any) -> ExportReport:
    path = Path(options.pop("path", "net.onnx"))
    return retrofit.export_onnx(model, path, input_size=(3, 6, 8), report=report, **options)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir()}


def test_json_is_the_report(model: nn.Module) -> None:
    report = export(model, Path("net.json"))
    assert json.loads(Path("net.json").read_text()) == report.to_dict()
    assert report.labels == 5
    assert json.loads(next(x.value for x in onnx.load("net.onnx").metadata_props if x.key == "labels"))[4] == "elk"
    assert set(contents()) == {"net.onnx", "net.json"}


@pytest.mark.parametrize(
    ("calibrate", "options", "judged"),
    [
        (0, {}, "4 random inputs"),
        (6, {}, "10 random inputs and images"),
        (0, {"fold": "poly", "tolerance": 0.9}, "4 random inputs"),
        (6, {"fold": "poly", "tolerance": 0.9}, "3 images"),
        (1, {"precision": "float16", "tolerance": 0.9}, "4 random inputs"),
        (6, {"precision": "float16", "tolerance": 0.9}, "3 images"),
    ],
)
def test_what_it_was_judged_on(calibrate: int, options: dict[str, Any], judged: str, model: nn.Module) -> None:
    images = [torch.randn(calibrate, 3, 6, 8)] if calibrate else None
    report = export(model, Path("net.html"), calibrate=images, **options)
    assert report.judged == judged
    page = Path("net.html").read_text()
    assert f"<dd>{judged}, in batches of" in page
    assert report.guessed == ("unlike pictures" in page) == (options.get("fold") == "poly" and not calibrate)


@pytest.mark.parametrize("large", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_full_disk_keeps_what_was_there(large: bool, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_report: ExportReport) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if large:
        monkeypatch.setattr(write, "LARGEST", 100)
    export(model, Path("net.html"))
    before = contents()
    nn.init.ones_(model.head.weight)  # type: ignore[union-attr,arg-type]
    monkeypatch.setitem(report_beside.FORMATS, ".html", full)
    for name in ("net.html", "other.html"):
        with pytest.raises(RetrofitError, match=f"^no space left for {name}; "):
            export(model, Path(name), force=True)
        assert contents() == before


def test_a_file_that_is_refused_leaves_no_report(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises(RetrofitError, match=r"^no space left for .*net\.onnx; "):
        export(model, Path("net.html"))
    assert contents() == {}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("net.txt", UsageError, r"^net\.txt says no format .* `report` a name that ends in \.html or \.json$"),
        ("net", UsageError, "says no format"),
        ("away/net.html", RetrofitError, "does not exist; create it first"),
        ("mine.html", RetrofitError, "exists; pass `force=True`"),
        ("same.html", UsageError, "is the exported file itself"),
    ],
)
def test_wrong_reports(
    name: str, error: type[RetrofitError], message: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrofit.export.api, "fold_network", None)  # no work is begun
    Path("mine.html").write_text("mine")
    Path("same.html").symlink_to("net.onnx")
    with pytest.raises(error, match=message):
        export(model, Path(name))
    assert Path("mine.html").read_text() == "mine"
    assert sorted(path.name for path in Path().iterdir()) == ["mine.html", "same.html"]


def facts(page: str) -> dict[str, str]:
    return {name: html.unescape(value) for name, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)}


def test_page(model: nn.Module) -> None:
    images = [torch.randn(8, 3, 6, 8)]
    report = export(model, Path("net.html"), fold="poly", degree=3, tolerance=0.9, calibrate=images)
    page = Path("net.html").read_text()
    (layer,) = report.layers
    assert layer.max_error is not None
    assert layer.rms_error is not None
    row = f"<td>0</td><td>n&lt;b&gt;</td><td>polynomial</td><td>3</td><td>{layer.max_error:.2g}</td>"
    assert f"<tr>{row}<td>{layer.rms_error:.2g}</td></tr>" in page
    for operator, count in report.nodes.items():
        assert f"<tr><td>{count}</td><td>{operator}</td></tr>" in page
    said = facts(page)
    assert said["compared on"] == "4 images, in batches of 1, 3"
    assert said["largest difference"] == f"{report.parity.max_abs_diff:.3g}"
    assert said["scale"].startswith(f"{report.parity.scale:.3g} ")
    assert said["tolerance"] == f"{0.9 * report.parity.scale:.3g} (0.9 of the scale)"
    assert said["same top-1"] == f"{report.parity.top1_agreement:.1%} of 4 images"
    assert (said["fold"], said["opset"], said["precision"]) == ("poly", "18", "float32")
    assert said["labels"].startswith("5, ")
    assert (said["size"], said["crop_mode"]) == ("3 x 6 x 8", "squash")  # the last size: of a picture
    assert f"({report.bytes:,} bytes)" in page
    assert "http" not in page


def test_nothing_from_outside_is_html(model: nn.Module) -> None:
    report = export(model, None)
    named = replace(report, model=HOSTILE, output=HOSTILE, weights={"kind": "checkpoint", "from": HOSTILE})
    page = report_beside.FORMATS[".html"](named)
    assert "<img" not in page
    assert "\u202e" not in page
    assert page.count("&lt;img src=x") == 8  # title, heading, three facts, the script, two commands
    assert "n<b>" not in page


@pytest.mark.parametrize(
    ("channels", "labels"),
    [(1, False), (3, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, True), (3, False)))],
)
def test_the_pages_script(channels: int, labels: bool, model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    if channels == 1:
        model.stem = nn.Conv2d(1, 8, 3)
        set_record(model, preprocess=Preprocess((1, 6, 8), (0.4,), (0.6,), "bilinear", 0.8))
    if not labels:
        set_record(model, labels=None)
    retrofit.export_onnx(model, "it's.onnx", input_size=(channels, 6, 8), report="net.html")
    picture = Image.effect_noise((40, 20), 90).convert("RGB")
    picture.save("photo.jpg")
    script = html.unescape(re.findall(r"<pre>(.*?)</pre>", Path("net.html").read_text(), re.S)[0])
    space: dict[str, Any] = {}
    exec(script, space)
    file = open_exported(Path("it's.onnx"))  # as `retrofit evaluate` prepares its pictures
    with Image.open("photo.jpg") as read:
        expected = create_transform(**file.preprocess.to_dict())(read.convert("RGB" if channels == 3 else "L"))
    torch.testing.assert_close(space["images"], expected[None], rtol=0, atol=0)
    scores = file.network(expected[None])
    assert isinstance(scores, torch.Tensor)
    best = int(scores.argmax())
    assert capsys.readouterr().out == (f"{['ant', 'bee', 'cat', 'dog', 'elk'][best]}\n" if labels else f"{best}\n")


def test_the_script_for_outputs_that_are_no_scores(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    set_record(model, labels=None)
    del model.head, model.flat
    export(model, Path("net.html"))
    Image.effect_noise((40, 20), 90).convert("RGB").save("photo.jpg")
    exec(html.unescape(re.findall(r"<pre>(.*?)</pre>", Path("net.html").read_text(), re.S)[0]), {})
    assert capsys.readouterr().out == "[(1, 8, 4, 6)]\n"


def test_a_network_of_which_little_is_known(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).eval()
    report = export(net, Path("net.html"))
    assert (report.model, report.target, report.strength, report.weights) == (None, None, None, None)
    assert (report.preprocess, report.labels, report.layers) == (None, None, ())
    page = Path("net.html").read_text()
    assert "<h1>Export of net.onnx</h1>" in page
    assert "<p>There are none.</p>" in page
    assert "It is not known how the network&#x27;s images are prepared" in page.replace("'", "&#x27;")
    assert "create_transform" not in page
