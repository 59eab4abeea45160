"""`retrofit evaluate`: the figures, what is said about the data, and exported files."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import timm
import torch

import retrofit
from retrofit.record import Preprocess
from tests.cli.conftest import Run, answer, complaint, done

MODEL = ["test_resnet", "-j", "0", "-b", "4"]
CHECKPOINT = ["--checkpoint", "w.pth", "--num-classes", "3"]
DATA = ["--data-dir", "pictures"]


@pytest.mark.usefixtures("pictures")
def test_figures_and_json(run: Run) -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    torch.nn.init.zeros_(model.fc.weight)
    model.fc.bias.data = torch.tensor([0.0, 0.0, 1.0])
    torch.save(model.state_dict(), "w.pth")
    result = run("evaluate", *MODEL, *CHECKPOINT, *DATA, "--json")
    expected = {"schema": 1, "model": "test_resnet", "target": None, "strength": None, "data": "pictures"}
    expected |= {"weights": {"kind": "checkpoint", "from": "w.pth"}, "images": 12, "skipped": []}
    expected |= {"top1": pytest.approx(100 / 3), "top5": 100.0, "loss": pytest.approx(1.218, abs=0.001)}
    assert answer(result) == {**expected, "correct1": 4, "correct5": 12}
    said = ["weights: checkpoint w.pth", "top-1 33.33% (4 of 12)", "top-5 100.00% (12 of 12)"]
    assert result.stderr.splitlines() == said


@pytest.mark.usefixtures("pictures")
def test_top1_under_attack_stands_beside_the_clean_one(run: Run) -> None:
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), "w.pth")
    words = ["evaluate", *MODEL, *CHECKPOINT, *DATA, "--img-size", "64", "--json"]
    clean = answer(run(*words))
    result = run(*words, "--attack", "pgd", "--eps", "255/255")
    found = answer(result)
    attack = found.pop("attack")
    assert found == clean
    assert (attack["kind"], attack["eps"], attack["steps"]) == ("pgd", 1.0, 10)
    assert attack["correct1"] == round(attack["top1"] * 12 / 100) <= clean["correct1"]
    assert f"({attack['correct1']} of 12) under pgd within 255/255" in result.stderr
    assert answer(run(*words, "--attack", "fgsm"))["attack"]["eps"] == 4 / 255
    assert "name one with --attack" in complaint(run(*words, "--eps", "4/255"))


def test_what_the_data_leaves_open_is_said(run: Run, pictures: Path) -> None:
    (pictures / "ant" / "0.png").write_bytes(b"x")
    result = run("evaluate", *MODEL, *DATA, "--json")
    values = answer(result)
    assert result.stderr.startswith("weights: RANDOM")
    assert "warning: the data has 3 classes and the model 1,000 outputs: the classes, sorted by name" in result.stderr
    assert "warning: 1 image cannot be read: ant/0.png" in result.stderr
    assert (values["images"], values["skipped"]) == (11, ["ant/0.png"])


@pytest.mark.usefixtures("pictures")
def test_other_names_of_classes_and_a_strength_that_nobody_set_are_warned_of_in_mixed_precision_too(run: Run) -> None:
    """As many classes as outputs prove nothing: bee would be taken for bat, and cat for bee."""
    model, _ = retrofit.convert(timm.create_model("test_resnet", num_classes=3), "gn")
    retrofit.set_strength(model, 0.02531)
    retrofit.save(model, "a.safetensors", labels=["ant", "bat", "bee"])
    precision = ["--device", "cpu", "--amp", "--amp-dtype", "bfloat16", "--channels-last"]
    said = done(run("evaluate", "a.safetensors", *DATA, "-j", "0", *precision)).stderr
    assert "warning: layers stand at strength 0.0253" in said
    assert "are not what the model calls its outputs: the classes, sorted" in said


RUNTIMES = [("onnxruntime", "ONNX Runtime"), pytest.param("openvino", "OpenVINO", marks=pytest.mark.slow)]


@pytest.mark.usefixtures("pictures", "exported")
@pytest.mark.parametrize(("runtime", "name"), RUNTIMES)
def test_an_exported_file_scores_as_its_artifact(run: Run, classifier: Path, runtime: str, name: str) -> None:
    shutil.copy(classifier / "net.onnx", ".")
    data = [*DATA, "-j", "0", "-b", "4", "--json"]
    scored = answer(run("evaluate", classifier / "net.safetensors", *data))
    result = run("evaluate", "net.onnx", "--device", "cpu", "--runtime", runtime, *data)
    own = {"weights": {"kind": "onnx", "from": "net.onnx"}, "fold": "exact", "runtime": runtime}
    assert answer(result) == {**scored, **own, "loss": pytest.approx(scored["loss"], rel=1e-3)}
    what = "net.onnx: test_resnet.r160_in1k, converted to ln, strength 1, fold exact"
    assert result.stderr.startswith(f"{what}, run by {name}\n")


WRONG: dict[str, list[Any]] = {
    "mean": ["null ", ["a", 0, 0], [10**400, 0, 0]], "std": [[1, 0, 1], float("inf")], "interpolation": ["sideways"],
    "input_size": [[3, -1, 8], 10**9], "crop_pct": [[0.9]],
    "strength": [[1.0], "half", 10**400], "labels": [{"a": 1}, "[" * 9999],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("crop_mode", None, "a.onnx lacks the metadata that .*'crop_mode'"),
        ("model", "net", "ONNX Runtime cannot run a.onnx .*; export it again"),  # nothing is changed
        *((name, value, "a.onnx lacks the metadata that") for name in WRONG for value in WRONG[name]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_export_does_not_write_are_refused(name: str, value: Any, message: str, run: Run) -> None:
    metadata = {**Preprocess((3, 8, 8), (0.0,) * 3, (1.0,) * 3).to_dict(), "model": "net", name: value}
    file = onnx.ModelProto()  # without a network
    texts = {key: entry if isinstance(entry, str) else json.dumps(entry) for key, entry in metadata.items()}
    onnx.helper.set_model_props(file, {key: text for key, text in texts.items() if text != "null"})
    onnx.save(file, "a.onnx")
    result = run("evaluate", "a.onnx", *DATA, "-j", "0")
    assert (result.exit_code, bool(re.search(message, complaint(result)))) == (1, True), result.stderr
    if name == "input_size":
        assert "a.onnx does not say which images it takes" in complaint(run("bench", "a.onnx", "--against", "b.onnx"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Exception ignored in.*tar:pytest.PytestUnraisableExceptionWarning")
def test_real_photographs_with_real_weights(run: Run, shared_data: Path, real_weights: Path) -> None:
    loading = ["tf_efficientnet_lite0", "--checkpoint", real_weights, "--match", "order"]
    data = ["--data-dir", shared_data / "imagenet-samples-200.tar", "-j", "0", "--json"]
    data += ["--class-map", shared_data / "imagenet-classes.txt"]
    converted = answer(run("convert", *loading, "--to", "bnn", "--json"))
    assert converted["check"]["max_abs_diff"] < 1e-5 * converted["check"]["scale"]
    for model in (loading, [converted["output"]]):
        values = answer(run("evaluate", *model, *data))
        assert (values["correct1"], values["images"]) == (178, 200)
