"""ONNX files and reports: right against PyTorch, deterministic, both or neither; failures in a few
lines.
"""

import copy
import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import onnxruntime
import pytest
import torch
import torchvision
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export import ExportReport, checked_fold, onnx_export, onnx_file
from retrofit.record import Preprocess, set_record
from retrofit.utils.forward_pass import silence
from tests.export.networks import norm, slow
from tests.test_inputs import Detector

LABELS = ["ant", "bee", "cat", "dog", "elk"]


@pytest.fixture
def model() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    preprocess = Preprocess((3, 6, 6), (0.1, 0.2, 0.3), (0.9, 0.8, 0.7), "bicubic", 0.9, "squash")
    set_record(net, preprocess=preprocess, labels=LABELS)
    return net.eval()


def export(model: nn.Module, path: Path, **options: Any) -> ExportReport:
    return retrofit.export_onnx(model, path, **{"input_size": (3, 6, 6), **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_strength_0_adds_no_node(tmp_path: Path) -> None:
    source = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 4), nn.BatchNorm2d(2)
    )
    plain = export(source, tmp_path / "bn.onnx")
    converted = export(
        retrofit.convert(source, "bnn", input_size=(3, 6, 6))[0], tmp_path / "bnn.onnx"
    )
    assert plain.nodes == converted.nodes == {"Conv": 2, "Relu": 1}


@pytest.mark.parametrize("precision", ["float32", "int8", *slow("float16")])
def test_same_bytes_every_time_of_an_unchanged_network(
    precision: str, model: nn.Module, tmp_path: Path
) -> None:
    before = copy.deepcopy(model.train().state_dict())
    images = [torch.randn(8, 3, 6, 6)]
    for name in ("a", "b"):
        export(model, tmp_path / name, precision=precision, calibrate=images, tolerance=1.0)
    content = (tmp_path / "a").read_bytes()
    assert content == (tmp_path / "b").read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert b"site-packages" not in content
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_dynamic_batch_and_size(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).eval()
    report = export(model, tmp_path / "out.onnx", dynamic_size=True, opset=22)
    assert (report.parity.passed, report.parity.batches, report.parity.tolerance) == (
        True,
        (1, 2),
        1e-4,
    )
    proto = onnx.load(tmp_path / "out.onnx")
    assert proto.opset_import[0].version == 22
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 3, "height", "width"]
    x = torch.randn(5, 3, 11, 8)
    found = torch.from_numpy(
        onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"input": x.numpy()})[0]
    )
    torch.testing.assert_close(found, model(x).detach(), atol=1e-5, rtol=1e-5)


class Sized(nn.Sequential):  # goes another way for some sizes
    def __init__(self, is_other: Any, other: Any) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.is_other, self.other = is_other, other

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (self.other(y) if self.is_other(x.shape) else y).mean((2, 3))


@pytest.mark.parametrize(
    ("is_other", "condition", "broken", "advice"),
    [
        (lambda shape: shape[0] > 4, r"size\(\)\[0\] <= 4", "5, 3, 12, 12", "fix `batch`"),
        (
            lambda shape: shape[2] % 2,
            r"\[2\] % 2 == 0",
            "1, 3, 13, 13",
            "leave out `dynamic_size`",
        ),
        (
            lambda shape: shape[2] != shape[3],
            "size.*==.*size.*",
            "1, 3, 13, 12",
            "leave out `dynamic_size`",
        ),
    ],
)
def test_a_file_holds_no_conditions_so_it_has_to_be_right_without(
    is_other: Any, condition: str, broken: str, advice: str, tmp_path: Path
) -> None:
    options: Any = {"input_size": (3, 12, 12), "dynamic_size": "`batch`" not in advice}
    said = rf"holds for some sizes alone \(.*({condition}|not \({broken}\)).*\).*; {advice}$"
    with pytest.raises(RetrofitError, match=said):
        export(Sized(is_other, lambda y: 2 * y), tmp_path / "a.onnx", **options)
    assert not contents(tmp_path)
    # Two ways to the same numbers
    report = export(Sized(is_other, lambda y: y + y - y), tmp_path / "a.onnx", **options)
    assert report.parity.passed


@pytest.mark.parametrize("precision", ["float32", *slow("float16", "int8")])
def test_a_size_that_the_exporter_takes_for_a_constant(precision: str, tmp_path: Path) -> None:
    options: Any = {"precision": precision, "calibrate": [torch.randn(4, 3, 8, 8)]}
    options |= {"input_size": (3, 8, 8), "force": True}
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(4)).eval()
    with pytest.raises(RetrofitError, match=r"^ONNX Runtime differs .*; leave out `dynamic_size`$"):
        export(model, tmp_path / "a.onnx", dynamic_size=True, **options)
    assert not contents(tmp_path)
    model[1] = nn.AdaptiveAvgPool2d(1)
    report = export(model, tmp_path / "a.onnx", dynamic_size=True, batch=2, **options)
    assert report.parity.passed


def test_polynomials(model: nn.Module, tmp_path: Path) -> None:
    images = list(torch.randn(4, 8, 3, 6, 6))
    report = export(
        model, tmp_path / "out.onnx", fold="poly", calibrate=images, degree=2, tolerance=0.5
    )
    assert report.parity.batches == (1, 3, 12)  # every second image
    assert [(layer.form, layer.degree) for layer in report.layers] == [("polynomial", 2)]
    expected = {"BatchNormalization": 1, "Clip": 1, "Conv": 1, "Gemm": 1, "Mul": 1, "Reshape": 1}
    assert report.nodes.items() >= expected.items()  # older exporters add Shape and Concat


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let folding go wrong by what `change` does to the folded network."""
    real = checked_fold.fold_program

    def wrong(program: Any, fits: Any) -> None:
        real(program, fits)
        with torch.no_grad():
            change(program.module)

    monkeypatch.setattr(checked_fold, "fold_program", wrong)


def test_what_differs_leaves_no_file(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, images = tmp_path / "out.onnx", [torch.randn(8, 3, 6, 6)]
    for degree, message in ((None, "less than 1e-07"), (2, "raise `tolerance`")):
        with pytest.raises(RetrofitError, match=message):
            export(model, path, fold="poly", calibrate=images, tolerance=1e-7, degree=degree)
    gnn = nn.Sequential(
        nn.Conv2d(3, 4, 1), retrofit.layers.GroupNormalNorm(2, 4), nn.Flatten()
    ).eval()
    with pytest.raises(RetrofitError, match=r"approximation differs .* leave out `freeze_lambda`"):
        export(gnn, path, freeze_lambda=True, calibrate=images, tolerance=1e-6)
    for error in (0.01, math.nan):
        with monkeypatch.context() as patch:
            broken(patch, lambda net, error=error: net.get_parameter("0.weight").add_(error))
            with pytest.raises(
                RetrofitError, match=r"folded network differs .* more than 0\.0001; .*`tolerance`"
            ):
                export(model, path)
    real = onnx_export.to_onnx

    def wrong(program: Any, *args: Any) -> Any:
        program.module.get_parameter("0.weight").add_(0.1)
        written = real(program, *args)
        program.module.get_parameter("0.weight").sub_(0.1)
        return written

    monkeypatch.setattr(onnx_export, "to_onnx", wrong)
    with pytest.raises(RetrofitError, match=r"more than 0\.0001"):
        export(model, path, fold="poly", calibrate=images, tolerance=0.5)
    assert not list(tmp_path.iterdir())


def test_what_only_images_show_is_seen(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def far(_net: nn.Module, images: tuple[Tensor], out: Tensor) -> Tensor:
        return 2 * out if images[0].max() > 100 else out

    broken(monkeypatch, lambda net: net.register_forward_hook(far))
    retrofit.fold(model, input_size=(3, 6, 6))
    with pytest.raises(RetrofitError, match="differs"):
        retrofit.fold(model, input_size=(3, 6, 6), calibrate=[200 * torch.rand(2, 3, 6, 6)])


def test_tolerance_of_a_fold(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda net: net.get_parameter("0.weight").mul_(1.01))
    retrofit.fold(model, input_size=(3, 6, 6), tolerance=0.2)
    with pytest.raises(RetrofitError, match=r"more than 0\.0001; .*raise `tolerance`"):
        retrofit.fold(model, input_size=(3, 6, 6))


@pytest.mark.slow
def test_a_detector_gets_forms_and_is_compared_by_its_parts() -> None:
    options: Any = {"weights": None, "weights_backbone": None, "num_classes": 3}
    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(**options).eval()
    model, _ = retrofit.convert(model, "frozen", input_size=(3, 64, 64))
    with pytest.warns(UserWarning, match="^nothing is fused: detectors"):
        folded = retrofit.fold(model, input_size=(3, 64, 64))
    image = torch.rand(3, 64, 64)
    torch.testing.assert_close(folded([image])[0]["boxes"], model([image])[0]["boxes"])


def test_a_detector_is_refused_after_one_run(tmp_path: Path) -> None:
    model = Detector().eval()
    head = mock.Mock(side_effect=nn.functional.conv2d)
    refused = pytest.raises(RetrofitError, match=r"^detectors sort .*use `torch.onnx.export` with ")
    with mock.patch("torch.nn.modules.conv.F.conv2d", head), refused:
        export(model, tmp_path / "a.onnx")
    # Two convolutions: will it take such inputs, and what does it answer?
    assert head.call_count == 4


def test_a_folded_network_is_in_float32_compiles_copies_and_is_captured_again(
    model: nn.Module,
) -> None:
    folded, x = retrofit.fold(model.bfloat16(), input_size=(3, 6, 6)), torch.randn(4, 3, 6, 6)
    assert {tensor.dtype for tensor in (*folded.parameters(), *folded.buffers())} == {torch.float32}
    expected = model.float()(x).detach()
    again = torch.export.export(folded, (x,), strict=False).module()  # as newer torch does
    for net in (
        folded.train().eval(),
        copy.deepcopy(folded),
        again,
        torch.compile(folded, backend="eager"),
    ):
        torch.testing.assert_close(net(x), expected, atol=1e-5, rtol=1e-4)


class Branches(nn.Sequential):  # takes one way or the other by what its norm gives
    def forward(self, x: Tensor) -> Tensor:
        return x if super().forward(x).sum() > 0 else -x


def test_a_failing_export_is_one_line_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(*[Branches(norm(3)) for _ in range(20)])
    with pytest.raises(
        RetrofitError, match=r"^torch.export cannot capture the network \("
    ) as failed:
        export(model, tmp_path / "out.onnx")
    assert len(str(failed.value)) < 400
    with silence():
        print("unheard", file=sys.stderr)
    assert capfd.readouterr() == ("", "")
    invalid = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        network (float[n, 2] input) => (float[n, 2] output) { output = Det(input) }""")
    written = onnx_file.written(invalid, tmp_path / "a.onnx", False, [])
    with pytest.raises(RetrofitError, match="not valid ONNX"), written:
        pass
    assert not list(tmp_path.iterdir())


def test_json_is_the_report(model: nn.Module, tmp_path: Path) -> None:
    path, beside = tmp_path / "net.onnx", tmp_path / "net.json"
    report = export(model, path, report=beside)
    assert json.loads(beside.read_text()) == report.to_dict()
    assert report.labels == 5
    found = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert (found["schema"], found["retrofit"]) == ("1", retrofit.__version__)
    assert (json.loads(found["input_size"]), json.loads(found["labels"])) == ([3, 6, 6], LABELS)
    assert set(contents(tmp_path)) == {"net.onnx", "net.json"}
    report = export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).eval(), path, force=True)
    unknown = ("model", "target", "strength", "weights", "preprocess", "labels")
    assert [getattr(report, name) for name in unknown] == [None] * 6


@pytest.mark.parametrize(
    ("calibrate", "options", "judged"),
    [
        *((6, {}, "9 random inputs and images"), (0, {"fold": "poly"}, "3 random inputs")),
        *(
            (1, {"precision": "float16"}, "3 random inputs"),
            (6, {"precision": "float16"}, "3 images"),
        ),
    ],
)
def test_what_it_was_judged_on(
    calibrate: int, options: Any, judged: str, model: nn.Module, tmp_path: Path
) -> None:
    images = [torch.randn(calibrate, 3, 6, 6)] if calibrate else None
    report = export(model, tmp_path / "net.onnx", calibrate=images, tolerance=0.9, **options)
    assert report.judged == judged
    assert report.guessed == (options.get("fold") == "poly" and not calibrate)


@pytest.mark.parametrize("empty", [[], iter(()), torch.empty(0, 3, 6, 6)])
@pytest.mark.parametrize("fold", ["exact", "poly"])
def test_images_that_are_none_are_refused(fold: Any, empty: Any, model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"^`calibrate` holds no images; give some, or make it"):
        retrofit.fold(model, fold, input_size=(3, 6, 6), calibrate=empty)


@pytest.mark.slow
def test_weights_beside_the_file_are_replaced_with_it_and_the_report(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = tmp_path / "net.onnx", {"report": tmp_path / "net.json", "force": True}
    monkeypatch.setattr(onnx_file, "LARGEST", 100)
    monkeypatch.chdir(tmp_path)  # where the file lies: onnx looks for names in the working folder
    report = export(model, path, **options)
    before = contents(tmp_path)
    assert set(before) == {"net.onnx", "net.onnx.data", "net.json"}
    assert report.bytes == len(before["net.onnx"]) + len(before["net.onnx.data"])
    with pytest.raises(RetrofitError, match="`force=True`"):
        export(model, path)
    nn.init.ones_(model[4].weight)  # type: ignore[index,arg-type]
    for calls, error in ((0, KeyboardInterrupt), (1, KeyboardInterrupt), (2, OSError)):
        effects = [mock.DEFAULT] * calls + [error("stop")] + [mock.DEFAULT] * 9
        with (
            mock.patch.object(os, "replace", wraps=os.replace, side_effect=effects),
            pytest.raises(error),
        ):
            export(model, path, **options)
        assert contents(tmp_path) == before
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for owner, name, said in (
        (onnx_export, "json_text", r".*net\.json"),
        (os, "replace", r".*net\.onnx"),
    ):
        refused = pytest.raises(RetrofitError, match=rf"^cannot write {said} \(.*\); free space")
        with mock.patch.object(owner, name, side_effect=full), refused:
            export(model, path, **options)
        assert contents(tmp_path) == before
    export(model, path, **options)
    assert set(contents(tmp_path)) == set(before)
    assert contents(tmp_path)["net.onnx.data"] != before["net.onnx.data"]


def test_a_wrong_report_is_refused_first(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_fold, "capture", None)
    (tmp_path / "same.json").symlink_to(tmp_path / "net.onnx")
    html = r"^a report is a \.json file, not .*net\.html; give `report` a name"
    for name, message in (("net.html", html), ("same.json", "is the exported file itself")):
        with pytest.raises(UsageError, match=message):
            export(model, tmp_path / "net.onnx", report=tmp_path / name)
    assert os.listdir(tmp_path) == ["same.json"]
