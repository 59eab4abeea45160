"""`retrofit evaluate`: the figures, what is said about the data, and the refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
import timm
import torch

import retrofit
from retrofit.record import Preprocess
from tests.cli.conftest import Run, complaint, done
from tests.half_resnet import HALF
from tests.pictures import write_folder

MODEL = ["test_resnet", "-j", "0", "-b", "4"]


@pytest.fixture
def pictures(here: Path) -> Path:
    return write_folder(here / "pictures", each=2)


def test_figures_and_json(run: Run, pictures: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    torch.nn.init.zeros_(model.fc.weight)
    model.fc.bias.data = torch.tensor([0.0, 0.0, 1.0])
    torch.save(model.state_dict(), "w.pth")
    words = ["--checkpoint", "w.pth", "--num-classes", "3", "--data-dir", pictures, "--json"]
    result = done(run("evaluate", *MODEL, *words))
    assert json.loads(result.stdout) == {
        "schema": 1,
        "model": "test_resnet",
        "target": None,
        "strength": None,
        "weights": {"kind": "checkpoint", "from": "w.pth"},
        "data": str(pictures),
        "images": 6,
        "top1": pytest.approx(100 / 3),
        "top5": 100.0,
        "loss": pytest.approx(1.218, abs=0.001),
        "correct1": 2,
        "correct5": 6,
        "skipped": [],
    }
    assert result.stderr.splitlines() == [
        "weights: checkpoint w.pth",
        "top-1 33.33% (2 of 6)",
        "top-5 100.00% (6 of 6)",
    ]


def test_top1_under_attack_stands_beside_the_clean_one(run: Run, pictures: Path) -> None:
    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), "w.pth")
    words = [*MODEL, "--checkpoint", "w.pth", "--num-classes", "3", "--data-dir", pictures, "--json"]
    clean = json.loads(done(run("evaluate", *words)).stdout)
    result = done(run("evaluate", *words, "--attack", "pgd", "--eps", "255/255"))
    found = json.loads(result.stdout)
    attack = found.pop("attack")
    assert found == clean
    assert (attack["kind"], attack["eps"], attack["steps"]) == ("pgd", 1.0, 10)
    assert attack["correct1"] == round(attack["top1"] * 6 / 100) <= clean["correct1"]
    assert f"({attack['correct1']} of 6) under pgd within 255/255" in result.stderr
    assert json.loads(done(run("evaluate", *words, "--attack", "fgsm")).stdout)["attack"]["eps"] == 4 / 255
    assert "such as 4/255" in complaint(run("evaluate", *words, "--attack", "pgd", "--eps", "4"))
    assert "name one with --attack" in complaint(run("evaluate", *words, "--eps", "4/255"))


def test_source_and_artifact_score_alike(run: Run, pictures: Path) -> None:
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), "w.pth")
    weights = ["--checkpoint", "w.pth", "--num-classes", "3"]
    done(run("convert", "test_resnet", "--to", "bnn", *weights))
    source = json.loads(run("evaluate", *MODEL, *weights, "--data-dir", pictures, "--json").stdout)
    words = ["test_resnet-bnn.safetensors", "-j", "0", "--data-dir", pictures, "--json"]
    converted = json.loads(run("evaluate", *words).stdout)
    loss = pytest.approx(source["loss"], rel=1e-5)
    assert converted == {**source, "target": "bnn", "strength": 0.0, "loss": loss}


def test_what_the_data_leaves_open_is_said(run: Run, pictures: Path) -> None:
    (pictures / "ant" / "0.png").write_bytes(b"x")
    result = run("evaluate", *MODEL, "--data-dir", pictures, "--json")
    assert result.exit_code == 0
    assert result.stderr.startswith("weights: RANDOM")
    assert "warning: the data has 3 classes and the model 1000 outputs" in result.stderr
    assert "warning: 1 image cannot be read: ant/0.png" in result.stderr
    values = json.loads(result.stdout)
    assert values["images"] == 5
    assert values["skipped"] == ["ant/0.png"]


@pytest.mark.parametrize(("labels", "warned"), [(["ant", "bat", "bee"], True), (["cat", "bee", "ant"], False)])
def test_classes_that_the_model_calls_otherwise_are_said(
    labels: list[str], warned: bool, run: Run, pictures: Path
) -> None:
    """As many classes as outputs prove nothing: bee would be taken for bat, and cat for bee."""
    retrofit.save(timm.create_model("test_resnet", num_classes=3), "a.safetensors", labels=labels)
    result = run("evaluate", "a.safetensors", "-j", "0", "--data-dir", pictures)
    assert ("are not what the model calls its outputs: the classes, sorted" in result.stderr) is warned, result.stderr


def test_a_strength_that_nobody_set_is_warned_of(run: Run, pictures: Path) -> None:
    model, _ = retrofit.convert(timm.create_model("test_resnet", num_classes=3), "gn")
    for strength, warned in ((0.25, False), (0.02531, True)):
        retrofit.set_strength(model, strength)
        retrofit.save(model, f"{strength}.safetensors", source="test_resnet")
        result = run("evaluate", f"{strength}.safetensors", "--data-dir", pictures, "-j", "0")
        assert ("warning: layers stand at strength 0.0253" in result.stderr) is warned, result.stderr


@pytest.mark.parametrize("words", [["--amp"], ["--amp", "--amp-dtype", "bfloat16"], ["--channels-last"]])
def test_ways_of_running(run: Run, pictures: Path, words: list[str]) -> None:
    done(run("evaluate", *MODEL, "--data-dir", pictures, "--device", "cpu", *words))


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        (["--data-dir", "nowhere"], 1, "there is no data at nowhere"),
        (["--data-dir", "."], 1, "no images found in"),
        (["--data-dir", "pictures", "--num-classes", "2"], 1, "class 2 .* gives 2 scores"),
        (["--data-dir", "pictures", "--class-map", "short.txt"], 1, r"2 of the data's 3 classes .*\(bee, cat\)"),
        (["--data-dir", "pictures", "--class-map", "absent.txt"], 1, "cannot read the class map"),
        (["--data-dir", "pictures", "--device", "quantum"], 2, "cannot use --device quantum"),
        (["--data-dir", "pictures", "--amp-dtype", "float16"], 2, "give --amp too"),
        (["--data-dir", "pictures", "--pretrained", "--checkpoint", "w.pth"], 2, "pass one"),
        (["--data-dir", "pictures", "--in-chans", "5"], 1, "takes 5 channels"),
        (["--data-dir", "pictures", "--dataset", "digits"], 2, "drop --dataset digits or --data-dir"),
        (["--data-dir", "damaged"], 1, "none of the 1 images can be read"),
        (["--data-dir", "pictures", "--split", "tset"], 2, "no part 'tset'; give --split"),
        (["--data-dir", "parted"], 2, r"no part to validate on, but test, train; give --split .* --split \. for all"),
        (["--dataset", "digits", "--split", "tset"], 2, "no part 'tset'; give --split train or --split validation"),
        (["--dataset", "digits", "--class-map", "short.txt"], 1, "10 of the data's 10 classes are not in short.txt"),
        (["--data-dir", "pictures", "--class-map", "twice.txt"], 1, "has 'ant' for outputs 0 and 1"),
    ],
)
def test_refusals(run: Run, here: Path, words: list[str], code: int, pattern: str) -> None:
    if "pictures" in words:
        write_folder(here / "pictures", each=1, wrong=0)
    if "parted" in words:
        for part in ("test", "train"):
            write_folder(here / "parted" / part, each=1, wrong=0)
    (here / "short.txt").write_text("ant\n")
    (here / "twice.txt").write_text("ant\nant\nbee\ncat\n")
    if "damaged" in words:
        (here / "damaged" / "ant").mkdir(parents=True)
        (here / "damaged" / "ant" / "0.jpg").write_bytes(b"x")
    result = run("evaluate", *MODEL, *words)
    assert result.exit_code == code
    assert re.search(pattern, complaint(result)), result.stderr


RUNTIMES = [("onnxruntime", "ONNX Runtime"), pytest.param("openvino", "OpenVINO", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("runtime", "name"), RUNTIMES)
def test_an_exported_file_scores_as_its_artifact(run: Run, pictures: Path, runtime: str, name: str) -> None:
    model, _ = retrofit.convert(timm.create_model("test_resnet", num_classes=3, **HALF), "ln")
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.2, 0.3, 0.4), "crop_pct": 0.7}
    retrofit.set_strength(model, 1)
    retrofit.save(model, "net.safetensors", labels=["bee", "cat", "ant"])
    done(run("export", "net.safetensors"))
    data = ["--data-dir", pictures, "-j", "0", "-b", "4", "--json"]
    artifact = json.loads(run("evaluate", "net.safetensors", *data).stdout)
    result = done(run("evaluate", "net.onnx", "--runtime", runtime, *data))
    said = f"net.onnx: test_resnet.r160_in1k, converted to ln, strength 1, fold exact, run by {name}"
    assert result.stderr.splitlines()[0] == said
    assert json.loads(result.stdout) == {
        **artifact,
        "weights": {"kind": "onnx", "from": "net.onnx"},
        "loss": pytest.approx(artifact["loss"], rel=1e-3),
        "fold": "exact",
        "runtime": runtime,
    }


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        (["net.onnx", "--amp"], 2, "drop --amp"),
        (["net.onnx", "--device", "cuda"], 2, "drop --device"),
        (["net.onnx", "--checkpoint", "w.pth", "--num-classes", "3"], 2, "drop --checkpoint, --num-classes"),
        (["absent.onnx"], 1, "there is no file absent.onnx"),
        (["text.onnx"], 1, "text.onnx is not an ONNX file"),
        (["bare.onnx"], 1, "does not say how its images are prepared .*'crop_mode'"),
        (["empty.onnx"], 1, "ONNX Runtime cannot run empty.onnx .*; export it again"),
        (["test_resnet", "--runtime", "openvino"], 2, "--runtime runs exported files"),
    ],
)
def test_refusals_of_exported_files(run: Run, pictures: Path, words: list[str], code: int, pattern: str) -> None:
    Path("text.onnx").write_text("no protobuf")
    file = onnx.ModelProto()
    wanted = Preprocess((3, 8, 8), (0.0,) * 3, (1.0,) * 3).to_dict()
    onnx.helper.set_model_props(file, {key: json.dumps(value) for key, value in wanted.items()})
    onnx.save(file, "empty.onnx")
    onnx.helper.set_model_props(file, {key: json.dumps(value) for key, value in wanted.items() if key != "crop_mode"})
    onnx.save(file, "bare.onnx")
    result = run("evaluate", *words, "--data-dir", pictures, "-j", "0")
    assert result.exit_code == code
    assert re.search(pattern, complaint(result)), result.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Exception ignored in.*tar:pytest.PytestUnraisableExceptionWarning")
def test_real_photographs_with_real_weights(run: Run, here: Path, shared_data: Path, real_weights: Path) -> None:
    loading = ["tf_efficientnet_lite0", "--checkpoint", real_weights, "--match", "order"]
    data = ["--data-dir", shared_data / "imagenet-samples-200.tar", "-j", "0", "--json"]
    data += ["--class-map", shared_data / "imagenet-classes.txt"]
    converted = json.loads(run("convert", *loading, "--to", "bnn", "--json").stdout)
    assert converted["check"]["max_abs_diff"] < 1e-5 * converted["check"]["scale"]
    for model in (loading, [converted["output"]]):
        values = json.loads(run("evaluate", *model, *data).stdout)
        assert (values["correct1"], values["images"]) == (178, 200)
