"""What `retrofit inspect`, `bench`, `export` and `evaluate` say, to people and to programs; inspect
writes nothing.

And that a command gives what the Python function of its name gives: the same answer, and the same
file.
"""

import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import timm
import torch
from click.testing import Result
from torch import nn

import retrofit
from retrofit.cli.export import _show
from retrofit.comparison import Comparison
from retrofit.evaluation import evaluate
from retrofit.export import checked_fold
from retrofit.images.dataset import open_images
from retrofit.images.samples import sample_batches
from retrofit.networks.open_model import Network, open_model
from retrofit.record import Preprocess
from tests.cli.conftest import Run, answer, complaint, done
from tests.networks.conftest import FLAGS

FEW = ["-b", "2", "--rounds", "3", "--json"]
MODEL = ["test_resnet", "-j", "0", "-b", "4"]
CHECKPOINT = ["--checkpoint", "w.pth", "--num-classes", "3"]
DATA = ["--data-dir", "pictures"]


# --- inspect


def test_the_census(run: Run, here: Path) -> None:
    result = done(run("inspect", "test_efficientnet"))
    assert result.stdout == ""
    assert re.search(r"\d+ +BatchNormAct2d +bn +\d+-\d+ +bn1, ", result.stderr)
    assert result.stderr.splitlines()[-1].endswith(
        "normalization layers; add --to TARGET to see what becomes of them"
    )
    assert os.listdir(here) == []
    full = done(run("inspect", "test_efficientnet", "--full")).stderr.splitlines()
    assert full[0].split() == ["bn1", "BatchNormAct2d", "bn"]
    assert done(run("inspect", "tv:alexnet")).stderr.startswith("0 normalization layers;")


def test_json_lists_every_layer(run: Run) -> None:
    values = answer(run("inspect", "tv:resnet18", "--json"))
    assert set(values) == {"schema", "model", "library", "layers", "counts", "functional"}
    assert (values["schema"], values["model"], values["library"]) == (1, "resnet18", "torchvision")
    assert values["counts"] == {"BatchNorm2d": 20}
    first = {
        "name": "bn1",
        "source": "BatchNorm2d",
        "family": "bn",
        "channels": 64,
        "status": "known",
        "reason": "",
    }
    assert values["layers"][0] == first
    assert len(values["layers"]) == 20


def test_the_plan(run: Run) -> None:
    result = run("inspect", "test_resnet", "--to", "bnn", "--skip", "layer1", "--json")
    values = answer(result)
    plan = values["plan"]
    names = [row["name"] for row in plan["layers"]]
    assert names == [row["name"] for row in values["layers"]]
    kept = sum("layer1" in name for name in names)
    assert plan["counts"] == {"converted": len(names) - kept, "kept": kept, "unsupported": 0}
    assert re.search(r"\(kept\) .* matched by --skip layer1", result.stderr)
    assert (
        result.stderr.splitlines()[-1]
        == f"{len(names) - kept} converted, {kept} kept, 0 unsupported"
    )
    stderr = run("inspect", "test_resnet", "--to", "gn-pn", "--full").stderr
    assert re.search(r"act1 +ReLU +proxy-normalized", stderr)
    assert "(left)" in stderr


@pytest.mark.parametrize(
    "words", [["--to", "ln-pn"], ["--to", "ln-pn", "--from", "gn"], ["--to", "bnn"]]
)
def test_a_hint_never_names_the_command_that_gave_it(run: Run, words: list[str]) -> None:
    line = complaint(run("inspect", "test_efficientnet_gn", *words))
    assert "inspect MODEL --to" not in line
    assert "--from gn" not in line


# --- bench


def test_an_artifact_is_measured_against_its_source(run: Run) -> None:
    done(run("convert", "test_resnet", "--to", "bnn", "--img-size", "64", "-o", "net.safetensors"))
    result = run("bench", "net.safetensors", *FEW)
    costs = answer(result)["costs"]
    assert [(cost["mode"], cost["network"]) for cost in costs] == [
        (mode, network)
        for mode in ("eval", "train")
        for network in ("net.safetensors", "test_resnet")
    ]
    for converted, source in (costs[:2], costs[2:]):
        assert converted["time_ratio"]["median"] > 0
        assert converted["memory_ratio"] == converted["bytes"] / source["bytes"]
        assert source["time_ratio"] is None
    assert "time ratio" in result.stderr
    assert "batches of 2 at 3 x 64 x 64, " in result.stderr


def test_another_network_gets_images_of_the_same_size(run: Run) -> None:
    words = ["test_resnet", "--img-size", "48", "--against", "test_vit", "--mode", "eval"]
    result = run("bench", *words, *FEW)
    assert [cost["mode"] for cost in answer(result)["costs"]] == ["eval", "eval"]
    assert f"batches of 2 at 3 x 48 x 48, {torch.get_num_threads()} thread, " in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("exported")
def test_exported_files(run: Run, classifier: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        shutil.copy(classifier / "net.onnx", name)
    found = answer(run("bench", "a.onnx", "--against", "b.onnx", *FEW))
    assert found["runtime"] == "onnxruntime"
    one, other = found["costs"]
    assert (one["network"], other["network"]) == ("a.onnx", "b.onnx")
    assert one["time_ratio"]["median"] > 0
    assert other["time_ratio"] is None
    assert one["bytes"] == Path("a.onnx").stat().st_size


# --- export


def test_export_and_report(classifier: Path, exported: Result) -> None:
    found = answer(exported)
    assert (classifier / "net.json").read_text() == exported.stdout
    assert (found["schema"], found["model"], found["fold"], found["opset"]) == (
        1,
        "test_resnet.r160_in1k",
        "exact",
        18,
    )
    assert (found["target"], found["strength"], found["weights"]["kind"]) == ("ln", 1.0, "unknown")
    assert (found["output"], found["bytes"]) == (
        "net.onnx",
        (classifier / "net.onnx").stat().st_size,
    )
    assert set(found["parity"]) == {
        "batches",
        "max_abs_diff",
        "scale",
        "top1_agreement",
        "tolerance",
        "passed",
    }
    assert found["parity"]["passed"] is True
    assert found["nodes"]["Conv"] > 0
    assert len(found["layers"]) > 3
    for said in ("check passed: largest difference", "wrote net.onnx (", "wrote net.json"):
        assert said in exported.stderr
    metadata = {
        entry.key: entry.value for entry in onnx.load(classifier / "net.onnx").metadata_props
    }
    assert (metadata["model"], metadata["target"], metadata["strength"]) == (
        found["model"],
        "ln",
        "1.0",
    )
    for name in ("input_size", "mean", "std", "crop_pct"):
        assert found["preprocess"][name] == json.loads(metadata[name])


def test_failed_check(run: Run, artifact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checked_fold.fold_program

    def wrong(program: Any, fits: Any) -> None:
        real(program, fits)
        next(program.module.parameters())[0] += 1.0

    monkeypatch.setattr(checked_fold, "fold_program", wrong)
    result = run("export", artifact, "--json", "--report", "net.json")
    assert result.exit_code == 1
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("error: the folded network differs")
    assert len(lines) <= 3
    found = json.loads(result.stdout)
    assert (found["parity"]["passed"], found["output"], found["target"]) == (False, None, "ln")
    assert [path.name for path in Path().iterdir()] == [artifact]


def test_what_was_judged_on_noise_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {
        "layers": (),
        "judged": "3 random inputs",
        "guessed": True,
        "output": "a.onnx",
        "bytes": 1,
        "nodes": {},
    }
    _show(SimpleNamespace(**facts, parity=Comparison(0.1, 1.0, top1_agreement=0.5)))  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "the same top-1 for 50.0% of 3 random inputs" in said
    assert "warning: judged on 3 random inputs, which are unlike photographs" in said


# --- evaluate


@pytest.mark.usefixtures("pictures")
def test_figures_and_json(run: Run) -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    torch.nn.init.zeros_(model.fc.weight)
    model.fc.bias.data = torch.tensor([0.0, 0.0, 1.0])
    torch.save(model.state_dict(), "w.pth")
    result = run("evaluate", *MODEL, *CHECKPOINT, *DATA, "--json")
    expected = {
        "schema": 1,
        "model": "test_resnet",
        "target": None,
        "strength": None,
        "data": "pictures",
    }
    expected |= {"weights": {"kind": "checkpoint", "from": "w.pth"}, "images": 12, "skipped": []}
    expected |= {
        "top1": pytest.approx(100 / 3),
        "top5": 100.0,
        "loss": pytest.approx(1.218, abs=0.001),
    }
    expected |= {"majority_top1": pytest.approx(100 / 3)}
    assert answer(result) == {**expected, "correct1": 4, "correct5": 12}
    said = ["weights: checkpoint w.pth", "top-1 33.33% (4 of 12)", "top-5 100.00% (12 of 12)"]
    doubt = "top-1 is no better than always answering 'ant', which is right for 4 of 12 images"
    said.append(f"warning: {doubt}")
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
    assert (
        "warning: the data has 3 classes and the model 1,000 outputs: the classes, sorted by name"
        in result.stderr
    )
    assert "warning: 1 image cannot be read: ant/0.png" in result.stderr
    assert (values["images"], values["skipped"]) == (11, ["ant/0.png"])


@pytest.mark.usefixtures("pictures")
def test_other_names_of_classes_and_a_strength_that_nobody_set_are_warned_of_in_mixed_precision_too(
    run: Run,
) -> None:
    """As many classes as outputs prove nothing: bee would be taken for bat, and cat for bee."""
    model, _ = retrofit.convert(timm.create_model("test_resnet", num_classes=3), "gn")
    retrofit.set_strength(model, 0.02531)
    model.fc.bias.data[0] = math.nan
    retrofit.save(model, "a.safetensors", labels=["ant", "bat", "bee"])
    precision = ["--device", "cpu", "--amp", "--amp-dtype", "bfloat16", "--channels-last"]
    said = done(run("evaluate", "a.safetensors", *DATA, "-j", "0", *precision)).stderr
    assert "warning: layers stand at strength 0.0253" in said
    assert "warning: 12 images gave scores that are not finite, counted as wrong" in said
    assert "are not what the model calls its outputs (ant, bat, bee): the classes, sorted" in said


RUNTIMES = [
    ("onnxruntime", "ONNX Runtime"),
    pytest.param("openvino", "OpenVINO", marks=pytest.mark.slow),
]


@pytest.mark.usefixtures("pictures", "exported")
@pytest.mark.parametrize(("runtime", "name"), RUNTIMES)
def test_an_exported_file_scores_as_its_artifact(
    run: Run, classifier: Path, runtime: str, name: str
) -> None:
    shutil.copy(classifier / "net.onnx", ".")
    data = [*DATA, "-j", "0", "-b", "4", "--json"]
    scored = answer(run("evaluate", classifier / "net.safetensors", *data))
    result = run("evaluate", "net.onnx", "--device", "cpu", "--runtime", runtime, *data)
    own = {"weights": {"kind": "onnx", "from": "net.onnx"}, "fold": "exact", "runtime": runtime}
    assert answer(result) == {**scored, **own, "loss": pytest.approx(scored["loss"], rel=1e-3)}
    what = "net.onnx: test_resnet.r160_in1k, converted to ln, strength 1, fold exact"
    assert result.stderr.startswith(f"{what}, run by {name}\n")


WRONG: dict[str, list[Any]] = {
    "mean": ["null ", "", [], ["a", 0, 0], [10**400, 0, 0]], "std": [[1, 0, 1], float("inf"), ""],
    "interpolation": ["sideways"],
    "input_size": [[3, -1, 8], 10**9], "crop_pct": [[0.9]],
    "strength": [[1.0], "half", 10**400], "labels": [{"a": 1}, "[" * 9999],
}  # fmt: skip


def test_a_file_of_a_network_without_preprocessing_says_what_helps(run: Run) -> None:
    retrofit.export_onnx(
        nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), "a.onnx", input_size=(3, 2, 2)
    )
    result = run("evaluate", "a.onnx", *DATA, "-j", "0")
    assert result.exit_code == 1
    assert re.search(
        "whose preprocessing is known .*; give .*retrofit.save. the preprocessing",
        complaint(result),
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("crop_mode", None, "a.onnx lacks what .*'crop_mode'"),
        (
            "model",
            "net",
            "ONNX Runtime cannot run a.onnx .*; export it again",
        ),  # nothing is changed
        *((name, value, "a.onnx lacks what") for name in WRONG for value in WRONG[name]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_export_does_not_write_are_refused(
    name: str, value: Any, message: str, run: Run
) -> None:
    metadata = {
        **Preprocess((3, 8, 8), (0.0,) * 3, (1.0,) * 3).to_dict(),
        "model": "net",
        name: value,
    }
    file = onnx.ModelProto()  # without a network
    texts = {
        key: entry if isinstance(entry, str) else json.dumps(entry)
        for key, entry in metadata.items()
    }
    onnx.helper.set_model_props(file, {key: text for key, text in texts.items() if text != "null"})
    onnx.save(file, "a.onnx")
    result = run("evaluate", "a.onnx", *DATA, "-j", "0")
    assert (result.exit_code, bool(re.search(message, complaint(result)))) == (1, True), (
        result.stderr
    )
    if name == "input_size":
        assert "a.onnx does not say which images it takes" in complaint(
            run("bench", "a.onnx", "--against", "b.onnx")
        )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*tar:pytest.PytestUnraisableExceptionWarning"
)
def test_real_photographs_with_real_weights(
    run: Run, shared_data: Path, real_weights: Path
) -> None:
    loading = ["tf_efficientnet_lite0", "--checkpoint", real_weights, "--match", "order"]
    data = ["--data-dir", shared_data / "imagenet-samples-200.tar", "-j", "0", "--json"]
    data += ["--class-map", shared_data / "imagenet-classes.txt"]
    converted = answer(run("convert", *loading, "--to", "bnn", "--json"))
    assert converted["check"]["max_abs_diff"] < 1e-5 * converted["check"]["scale"]
    for model in (loading, [converted["output"]]):
        values = answer(run("evaluate", *model, *data))
        assert (values["correct1"], values["images"]) == (178, 200)


# --- what Python's functions give


def plain(values: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(values).replace("Infinity", "null"))
    return read


def assert_same(path: str, model: nn.Module) -> None:
    written, state = retrofit.load(path).state_dict(), model.state_dict()
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], value) for name, value in state.items())


def converted(run: Run, *words: str) -> Network:  # a converted network, in a.safetensors too
    size = ["--num-classes", "3", "--img-size", "32"]
    done(run("convert", "test_resnet", *FLAGS, *size, *words, "-o", "a.safetensors"))
    return open_model("a.safetensors")


@pytest.mark.parametrize(
    ("to", "words", "options"),
    [
        ("gn", "--groups 4 --skip layer1 --strength 0.5 --calibrate pictures",
         {"groups": 4, "skip": ["layer1"], "strength": 0.5}),
        ("bnn", "--noise paper --noise-kind gaussian-dropout --alpha 0.5",
         {"noise": "paper", "noise_kind": "gaussian-dropout", "alpha": 0.5}),
        ("gn-pn", "--groups auto --calibrate pictures --no-pn-params --ws --from bn",
         {"groups": "auto", "pn_params": False, "ws": True, "source": "bn"}),
    ],
)  # fmt: skip
def test_convert_is_the_function(
    run: Run, pictures: Path, to: str, words: str, options: dict[str, Any]
) -> None:
    network = converted(run, "--to", "bnn", "--only", "^bn1$")
    result = answer(run("convert", "a.safetensors", "--json", "--to", to, *words.split()))
    if "calibrate" in words:
        options["calibrate"] = sample_batches(pictures, network.preprocess)
    model, report = retrofit.convert(network.model, to, **options, input_size=(3, 32, 32))
    expected = plain(report.to_dict())
    assert ("agreement" in expected) == ("calibrate" in words)
    assert {name: result[name] for name in expected} == expected
    assert_same(result["output"], model)


def test_evaluate_is_the_function(run: Run, pictures: Path) -> None:
    network = converted(run, "--to", "bnn", "--strength", "0.5")
    result = answer(
        run("evaluate", "a.safetensors", *DATA, "-j", "0", "-b", "5", "--channels-last", "--json")
    )
    data = open_images(pictures, labels=network.labels)
    found = evaluate(
        network.model, data, network.preprocess, batch_size=5, workers=0, channels_last=True
    )
    assert found.images == 12
    assert result == {"schema": 1, **network.facts, "data": "pictures", **plain(found.to_dict())}


def test_bake_is_the_function(run: Run, pictures: Path) -> None:
    network = converted(run, "--to", "ln", "--strength", "1")
    called = run("bake", "a.safetensors", "--calibrate", pictures, "--tolerance", "9", "--json")
    result = answer(called)
    layers = len(result["layers"])
    assert f"baked {layers} of {layers} layers on 6 images" in called.stderr
    assert "next: retrofit export a-baked.safetensors" in called.stderr
    images = sample_batches(pictures, network.preprocess)
    model, report = retrofit.bake(network.model, images, tolerance=9)
    assert result == {
        "model": "test_resnet",
        "output": "a-baked.safetensors",
        **plain(report.to_dict()),
    }
    assert_same(result["output"], model)


@pytest.mark.slow
def test_export_is_the_function(run: Run, pictures: Path) -> None:
    network = converted(run, "--to", "bnn", "--strength", "1")
    for name, buffer in network.model.named_buffers():
        if name.endswith("running_lambda"):
            nn.init.uniform_(buffer, 0.5, 1.5)
    retrofit.save(network.model, "a.safetensors", force=True)
    words = ["--fold", "poly", "--calibrate", pictures, "--tolerance", "0.9", "--opset", "20"]
    called = run("export", "a.safetensors", *words, "--json")
    images = sample_batches(pictures, network.preprocess, images=256)
    report = retrofit.export_onnx(
        network.model, "b.onnx", fold="poly", opset=20, calibrate=images, tolerance=0.9
    )
    assert answer(called) == plain({**report.to_dict(), "output": "a.onnx"})
    assert onnx.load("a.onnx") == onnx.load("b.onnx")
    assert "rms error" in called.stderr
    assert "% of 6 images" in called.stderr
    assert "warning" not in called.stderr


@pytest.mark.slow
def test_diagnose_writes_what_it_says(run: Run, pictures: Path) -> None:
    done(run("convert", "test_resnet", "--to", "bnn", "--num-classes", "3"))
    words = [
        "test_resnet",
        "--num-classes",
        "3",
        "--against",
        "test_resnet-bnn.safetensors",
        "--data-dir",
        pictures,
    ]
    words += ["--images", "4", "-b", "2", "--channels", "2"]
    result = run("diagnose", *words, "--json")
    found = answer(result)
    assert list(found["networks"]) == ["test_resnet", "test_resnet-bnn"]
    assert found["networks"]["test_resnet"]["images"] == 4
    assert (
        found["networks"]["test_resnet"]["input_noise"][0]["top1"] is not None
    )  # as many classes as outputs
    assert "wrote test_resnet-diagnosis/index.html" in result.stderr
    saved = json.loads(Path("test_resnet-diagnosis/results.json").read_text())
    assert saved["networks"] == found["networks"]
    assert "--force" in complaint(run("diagnose", *words))
