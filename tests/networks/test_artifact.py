"""Artifacts: what is saved comes back, and nothing else is read as one."""

import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models._api import BUILTIN_MODELS

import retrofit
from retrofit import surgery
from retrofit.errors import RetrofitError, UsageError
from retrofit.networks import artifact
from retrofit.networks.artifact import load, save
from retrofit.networks.manifest import is_artifact, read_manifest
from retrofit.networks.model_sources import build
from retrofit.networks.state_tensors import checksum
from retrofit.record import ModelSource, Preprocess, Record, record_of
from retrofit.utils.files import sweep
from tests.faults import faults_of, file_size_limit, injected
from tests.networks import mynet
from tests.networks.conftest import (
    assert_same_answers,
    built,
    refused,
    rewrite,
    same_tensors,
    spread,
)

WEIGHTS = {"kind": "checkpoint", "from": "x.pth"}


def _assert_same(a: nn.Module, b: nn.Module) -> None:
    assert list(a.state_dict()) == list(b.state_dict())
    assert same_tensors(a.state_dict(), b.state_dict())
    assert [type(m) for m in a.modules()] == [type(m) for m in b.modules()]


@pytest.mark.parametrize(
    ("name", "to", "kwargs"),
    [
        ("test_resnet", None, {"num_classes": 3}),
        ("test_byobnet", "bnn", {"in_chans": 1}),
        ("test_vit", "lnn", {"img_size": 64}),
        ("tv:mobilenet_v3_small", "bnn", {"num_classes": 3}),
        ("tv:mnasnet0_5", "bnn", {}),  # asks for the version of what it loads
        pytest.param("tv:googlenet", "bnn", {"weights": "IMAGENET1K_V1"}, marks=pytest.mark.slow),
        pytest.param(
            "tv:ssdlite320_mobilenet_v3_large", "normal", {}, marks=pytest.mark.slow
        ),  # answers boxes
        pytest.param(
            "tv:regnet_y_400mf", "bnn", {}, marks=pytest.mark.slow
        ),  # does not build on the meta device
    ],
)
def test_round_trip(tmp_path: Path, name: str, to: str | None, kwargs: dict[str, Any]) -> None:
    model, path = built(name, to, **kwargs), tmp_path / "a.safetensors"
    if to:
        surgery.set_strength(model, 0.25)
    save(model, path, weights=WEIGHTS)
    again = load(path)
    _assert_same(again, model)
    assert again.training
    assert_same_answers(again, model, torch.rand(2, kwargs.get("in_chans", 3), 64, 64))
    save(again, tmp_path / "b.safetensors")
    assert read_manifest(tmp_path / "b.safetensors") == read_manifest(path)


def test_several_conversions_are_replayed_in_order(saved: Path) -> None:
    again = load(saved)
    norm = again.conv1[1]
    assert (norm.momentum, norm.noise, norm.noise_kind) == (None, 0.25, "unscaled")
    assert [plan.to for plan in surgery.plans_of(again)] == ["bnn", "gn-pn"]


def test_manifest(tmp_path: Path) -> None:
    preprocess = Preprocess(
        (3, 64, 64), (*np.array([0.1, 0.2, 0.3]),), (1.0, 1.0, 1.0), "bilinear", 0.9
    )
    model = built("test_resnet", "bnn", num_classes=2)
    surgery.set_strength(model, 0.5)
    others = {"interpolation": "bilinear", "crop_pct": 0.9, "crop_mode": "center"}
    save(
        model,
        tmp_path / "a.safetensors",
        labels=["cat", "dog"],
        weights=WEIGHTS,
        preprocess=preprocess,
    )
    manifest = read_manifest(tmp_path / "a.safetensors")
    (plan,) = record_of(model).plans
    assert manifest == {
        "schema": 1,
        "model": {"library": "timm", "name": "test_resnet", "kwargs": {"num_classes": 2}},
        "conversion": {"to": "bnn", "steps": [plan.to_dict()]},
        "layers": plan.to_dict()["layers"],
        "training": {
            row.name: {"momentum": 0.1, "noise": 0.0, "noise_kind": "scaled"} for row in plan.layers
        },
        "checksum": checksum(load_file(tmp_path / "a.safetensors")),
        "sampled_outputs": manifest["sampled_outputs"],
        "preprocess": {
            "input_size": [3, 64, 64],
            "mean": [0.1, 0.2, 0.3],
            "std": [1.0, 1.0, 1.0],
            **others,
        },
        "labels": ["cat", "dog"],
        "weights": WEIGHTS,
        "strength": 0.5,
        "versions": manifest["versions"],
        "manifest_checksum": manifest["manifest_checksum"],
    }
    assert manifest["versions"]["timm"] == timm.__version__
    source = ModelSource("timm", "test_resnet", {"num_classes": 2})
    assert record_of(load(tmp_path / "a.safetensors")) == Record(
        source, WEIGHTS, preprocess, ["cat", "dog"], (plan,)
    )


def test_buffers_that_are_in_no_file_follow_the_dtype(tmp_path: Path) -> None:
    options = {"depths": [2, 1, 1, 1], "embed_dim": 16, "num_heads": [1, 1, 1, 1]}
    model = built("swin_tiny_patch4_window7_224", **options).bfloat16()
    save(model, tmp_path / "a.safetensors")
    mask = load(tmp_path / "a.safetensors").layers[0].blocks[1].attn_mask
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask, model.layers[0].blocks[1].attn_mask)


def test_views_and_memory_formats_do_not_matter(tmp_path: Path) -> None:
    model = built("test_resnet")
    model.to(memory_format=torch.channels_last)
    model.fc.weight.data = model.fc.weight.data.t().contiguous().t()
    norms = model.layer1[0].bn1, model.layer1[0].bn2
    flat = torch.rand(2 * norms[0].num_features)
    norms[0].bias.data, norms[1].bias.data = flat.chunk(2)
    norms[1].weight.data = norms[1].bias.data
    plain = copy.deepcopy(model)
    save(model, tmp_path / "a.safetensors")
    _assert_same(load(tmp_path / "a.safetensors"), plain)


class Tied(nn.Module):  # a network with a parameter of two names and a module of two names
    pretrained_cfg: ClassVar = {"input_size": (1, 4, 4)}

    def __init__(self, *, weights: None = None) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.b.weight, self.b.bias = self.a.weight, nn.Parameter(torch.rand(4))
        self.again = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.b(self.norm(self.a(x.reshape(-1, 4)))))


def test_tied_tensors_are_written_once_and_tied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILTIN_MODELS, "tied", Tied)
    model = surgery.convert(build(ModelSource("torchvision", "tied")), "bnn")[0]
    random = torch.get_rng_state()
    save(model, tmp_path / "a.safetensors")
    names = load_file(tmp_path / "a.safetensors").keys()
    assert {"a.weight", "norm.weight"} <= names
    assert not {name for name in names if name == "b.weight" or name.startswith("again")}
    again = load(tmp_path / "a.safetensors")
    assert torch.equal(torch.get_rng_state(), random)
    _assert_same(again, model)
    assert again.a.weight is again.b.weight
    assert again.norm is again.again
    model.b.weight = nn.Parameter(torch.rand(4, 4))
    with pytest.raises(
        RetrofitError,
        match=r"b.weight and a.weight are one tensor in the library's network, two here",
    ):
        save(model, tmp_path / "b.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_failing_writer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(artifact, "save_file", fail)
    with refused(r"cannot write .* \(.*No space left.*\); free space"):
        save(built("test_vit"), tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


# --- what is not an artifact, or not one that fits


def _header(metadata: str | None) -> Callable[[Path], None]:
    return lambda path: save_file(
        {"a": torch.zeros(2)}, path, metadata=metadata and {"retrofit": metadata}
    )


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (Path.unlink, "there is no artifact at"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is a pipe or a device"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
        (lambda path: path.write_text("hello"), "not a whole artifact"),
        (lambda path: path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"), "not a whole artifact"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "not a whole artifact"),
        (
            _header(None),
            "is a plain checkpoint, which holds no network; give the network's name, and `checkpoint=",
        ),
        (_header("[]"), "KeyError: 'schema'"),
        (_header('{"schema": 1, "model": ' + "[" * 3000 + "]" * 3000 + "}"), "RecursionError"),
        (_header('{"schema": true}'), "malformed: 'labels'"),
        (_header('{"schema": 0}'), "has schema 0, this retrofit reads 1"),
        (_header('{"schema": 2}'), "has schema 2, this retrofit reads 1; upgrade retrofit"),
        (_header('{"schema": ' + "9" * 400 + "}"), "has schema 9+.*upgrade"),
        (_header('{"schema": 1}'), "malformed: 'labels'"),
    ],
)
def test_foreign_files_are_refused(
    saved: Path, write: Callable[[Path], object], message: str
) -> None:
    write(saved)
    with refused(message, names=saved):
        load(saved)
    assert "whole" not in message or not is_artifact(saved)


def test_a_type_that_this_torch_does_not_have_is_one_line(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "load_file", lambda _path: torch.float2)
    with refused(r"not a whole artifact \(AttributeError: module 'torch' has no .*float2"):
        load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m, t: m["model"].update(name="no_such_network"),
            "does not come back as it was saved, with timm .* unknown model",
        ),
        (lambda m, t: m["model"].update(library="keras"), "'keras'"),
        (lambda m, t: m["model"]["kwargs"].update(nonsense=1), "nonsense"),
        (lambda m, t: m["model"].update(kwargs={"pretrained": True}), "not a model argument"),
        (lambda m, t: m["model"].update(name="hf-hub:timm/resnet18.a1_in1k"), "malformed"),
        (lambda m, t: m.update(versions=None), "malformed"),
        (lambda m, t: m["conversion"]["steps"][0].update(to="xyz"), "unknown target 'xyz'"),
        (
            lambda m, t: m["conversion"]["steps"][0]["layers"][0].update(name="nowhere"),
            "made for another model",
        ),
        (
            lambda m, t: m["conversion"]["steps"][0]["layers"][0].update(extra=1),
            "malformed: .*extra",
        ),
        (
            lambda m, t: m["conversion"]["steps"][0]["layers"][0].update(options={"nonsense": 1}),
            "nonsense",
        ),
        (
            lambda m, t: m["training"]["conv1.1"].update(momentum=float("inf")),
            "with timm .* momentum",
        ),
        (
            lambda m, t: m["training"]["conv1.1"].update(noise=-1),
            "with timm .* noise",
        ),
        (
            lambda m, t: m["training"]["conv1.1"].update(noise_kind="loud"),
            "with timm .*loud",
        ),
        (lambda m, t: m["conversion"]["steps"].clear(), r"\d+ unexpected \(.*proxy_bias"),
        (lambda m, t: t.pop("fc.bias"), r"1 missing \(fc.bias\)"),
        (lambda m, t: t.update(extra=torch.zeros(1)), r"1 unexpected \(extra\)"),
        (
            lambda m, t: t.update({"fc.bias": torch.zeros(7)}),
            r"1 of another shape or type \(.* \[7\] float32 for \[3",
        ),
        (
            lambda m, t: t.update({"fc.bias": t["fc.bias"].long()}),
            r"1 of another shape or type \(fc.bias \[3\] int64",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    saved: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object], message: str
) -> None:
    rewrite(saved, change)
    with refused(message, names=saved):
        load(saved)


def _unsealed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change a manifest and leave its checksum out, as files of version 0.2.0 do."""

    def write(path: Path) -> None:
        manifest = read_manifest(path)
        del manifest["manifest_checksum"]
        change(manifest)
        metadata = {"format": "pt", "retrofit": json.dumps(manifest)}
        save_file(load_file(path), path, metadata=metadata)

    return write


def test_a_file_without_a_checksum_of_its_manifest_still_opens(saved: Path) -> None:
    before = load(saved)
    _unsealed(lambda manifest: None)(saved)
    _assert_same(load(saved), before)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["labels"].reverse(),
        lambda m: m["preprocess"].update(mean=[0.0, 0.0, 0.0]),
        lambda m: m["versions"].update(torch="1.0"),
        lambda m: m["model"]["kwargs"].update(global_pool="max"),
        lambda m: m.update(sampled_outputs={"not_checked": "it is large"}),
        lambda m: m.update(manifest_checksum=0),
        lambda m: m.update(more=1),
    ],
)
def test_a_changed_manifest_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    save(mynet.small(), path := tmp_path / "a.safetensors", labels=["a", "b", "c"])
    manifest = read_manifest(path)
    change(manifest)
    save_file(load_file(path), path, metadata={"format": "pt", "retrofit": json.dumps(manifest)})
    with refused("the manifest of .* was changed after it was saved", names=path):
        load(path, into=mynet.small())


@pytest.mark.parametrize("size", [0, 8, 2000, 3000])
def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path, size: int) -> None:
    model = mynet.small()
    save(model, path := tmp_path / "a.safetensors")
    before = path.read_bytes()
    assert len(before) > size
    with file_size_limit(size), refused("cannot write .*free space"):
        save(model, path, force=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_an_exception_at_any_system_call_leaves_the_old_artifact_or_the_new_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    old, new = mynet.small(), spread(mynet.small())
    save(old, path)
    content = path.read_bytes()

    def write() -> None:
        save(new, path, force=True)

    for fault in faults_of(write):
        path.write_bytes(content)
        with injected(fault):
            write()
        whole = path.read_bytes() == content or same_tensors(load_file(path), new.state_dict())
        assert whole, fault
        sweep(tmp_path)
        left = [name for name in os.listdir(tmp_path) if name != path.name]
        # An interrupt as soon as the temporary folder is there leaves it, empty.
        assert len(left) <= 1, fault
        for name in left:
            (tmp_path / name).rmdir()


def test_labels_are_those_of_the_classifier_that_is_there(tmp_path: Path) -> None:
    model = mynet.small(num_classes=3)
    with pytest.raises(UsageError, match="2 labels for 3 outputs"):
        save(model, tmp_path / "a.safetensors", labels=["cat", "dog"])
    with pytest.raises(UsageError, match="0 labels for 3 outputs"):
        save(model, tmp_path / "a.safetensors", labels=[])
    # As scikit-learn gives `target_names`.
    names: Any = np.array(["ant", "cat", "dog"])
    save(model, tmp_path / "a.safetensors", labels=names)
    assert read_manifest(tmp_path / "a.safetensors")["labels"] == ["ant", "cat", "dog"]
    again = load(tmp_path / "a.safetensors", into=model)
    again.head = nn.Linear(8, 2)
    retrofit.export_onnx(again, tmp_path / "a.onnx")
    assert "labels" not in {entry.key for entry in onnx.load(tmp_path / "a.onnx").metadata_props}
    save(again, tmp_path / "b.safetensors")
    assert read_manifest(tmp_path / "b.safetensors")["labels"] is None
