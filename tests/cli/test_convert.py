"""`retrofit convert`: what it writes and says, and every way in which it refuses."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import timm
import torch
from safetensors.torch import save_file

import retrofit
from retrofit import surgery
from retrofit.cli.convert import command
from retrofit.cli.network import file_stem
from retrofit.compare import Reference
from retrofit.images.dataset import sample_batches
from retrofit.layers.normality_norm import NoiseKind
from retrofit.networks.models import open_model
from tests.cli.conftest import Run, complaint, done
from tests.pictures import write_folder

SETTLED = {
    *("schema", "model", "library", "to", "weights", "layers", "counts", "params", "check", "strength", "output"),
}


def written(here: Path) -> list[str]:
    return sorted(file.name for file in here.iterdir() if file.name.endswith((".safetensors", ".tmp")))


def test_the_whole_story(run: Run, here: Path) -> None:
    result = run("convert", "test_resnet", "--to", "bnn")
    assert result.exit_code == 0
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert lines[0].startswith("weights: RANDOM")
    assert re.search(r"BatchNorm2d +BatchNormalNorm2d", result.stderr)
    assert "check passed: largest difference" in result.stderr
    assert lines[-2].startswith("wrote test_resnet-bnn.safetensors (")
    assert lines[-1] == "next: retrofit evaluate test_resnet-bnn.safetensors --data-dir DIR"
    model = retrofit.load("test_resnet-bnn.safetensors").eval()
    assert type(model.bn1).__name__ == "BatchNormalNorm2d"


def test_json_is_all_of_stdout_and_has_the_settled_keys(run: Run, here: Path) -> None:
    result = run("convert", "test_resnet", "--to", "bnn", "--skip", "^bn1$", "-o", "a.safetensors", "--json")
    values = json.loads(result.stdout)
    assert set(values) >= SETTLED
    assert (values["schema"], values["model"], values["library"], values["to"]) == (1, "test_resnet", "timm", "bnn")
    assert values["weights"] == {"kind": "random", "from": None}
    layers = values["layers"]
    assert {"name", "source", "target", "status", "reason"} == set(layers[0])
    assert sum(values["counts"].values()) == len(layers)
    assert values["counts"]["kept"] == 1
    assert values["params"]["before"] == sum(p.numel() for p in timm.create_model("test_resnet").parameters())
    assert values["check"]["passed"] is True
    assert set(values["check"]) == {"max_abs_diff", "scale", "tolerance", "passed", "identity"}
    assert values["strength"] == 0
    assert values["output"] == "a.safetensors"
    assert written(here) == ["a.safetensors"]


def test_a_checkpoint_gives_the_artifact_its_outputs(run: Run, here: Path) -> None:
    source = timm.create_model("test_efficientnet", num_classes=10).eval()
    torch.save(source.state_dict(), "w.pth")
    words = ["--checkpoint", "w.pth", "--num-classes", "10", "--model-kwargs", "drop_rate=0.1"]
    result = done(run("convert", "test_efficientnet", "--to", "bnn", *words))
    assert result.stderr.startswith("weights: checkpoint w.pth")
    images = torch.randn(2, 3, 160, 160)
    converted = retrofit.load("test_efficientnet-bnn.safetensors").eval()
    assert converted.drop_rate == 0.1
    torch.testing.assert_close(converted(images), source(images))


@pytest.mark.parametrize("target", ["bnn", "gn-pn"])
def test_an_artifact_is_a_model_too(run: Run, here: Path, target: str) -> None:
    done(run("convert", "test_resnet", "--to", target, "--only", "bn1", "-o", "a.safetensors"))
    result = done(run("convert", "a.safetensors", "--to", "bnn", "--json"))
    assert json.loads(result.stdout)["output"] == "a-bnn.safetensors"
    assert (here / "a-bnn.safetensors").is_file()


def test_the_command_gives_what_the_function_gives(run: Run, here: Path, tmp_path: Path) -> None:
    pictures = write_folder(tmp_path / "pictures", each=1)
    done(run("convert", "test_resnet", "--to", "bnn", "--only", "^bn1$", "-o", "a.safetensors"))
    words = ["--to", "gn", "--groups", "4", "--skip", "layer1", "--strength", "0.5", "--calibrate", pictures]
    result = json.loads(done(run("convert", "a.safetensors", *words, "--json")).stdout)
    network = open_model("a.safetensors")
    images = sample_batches(pictures, network.preprocess)
    options: dict[str, Any] = {"groups": 4, "skip": ["layer1"], "strength": 0.5, "calibrate": images}
    model, report = retrofit.convert(network.model, "gn", input_size=network.preprocess.input_size, **options)
    expected = json.loads(json.dumps(report.to_dict()))
    assert result["check"].pop("identity") is True
    assert {name: result[name] for name in expected} == expected
    assert {"change", "agreement"} <= expected.keys()
    written = retrofit.load(result["output"]).state_dict()
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("strength", [(), ("--strength", "0.5")])
def test_a_second_conversion_leaves_the_first_at_its_strength(run: Run, here: Path, strength: tuple[str, ...]) -> None:
    done(run("convert", "test_coatnet", "--to", "bnn", "--strength", "1", "-o", "a.safetensors"))
    first = retrofit.load("a.safetensors").eval()
    result = run("convert", "a.safetensors", "--to", "lnn", "-o", "b.safetensors", *strength, "--json")
    values = json.loads(result.stdout)
    assert (values["check"]["passed"], values["strength"]) == (True, 0.5 if strength else 0)
    assert any("7 layers converted before keep their strength, 1" in note for note in values["notes"])
    assert "note: 7 layers converted before" in result.stderr
    second = retrofit.load("b.safetensors").eval()
    stand = {type(layer).__name__: float(layer.strength) for layer in surgery.strength_layers(second)}
    assert stand == {"BatchNormalNormAct2d": 1.0, "LayerNormalNorm2d": values["strength"]}
    if not strength:
        images = torch.randn(2, 3, 160, 160)
        torch.testing.assert_close(second(images), first(images))


def test_predictions_at_full_strength_leave_the_first_conversion_alone(run: Run, here: Path, tmp_path: Path) -> None:
    pictures = write_folder(tmp_path / "pictures", each=1)
    first = ["--only", "layer1", "--strength", "0.5", "-o", "a.safetensors"]
    done(run("convert", "test_resnet", "--to", "bnn", *first))
    done(run("convert", "a.safetensors", "--to", "gn", "--calibrate", pictures, "-o", "b.safetensors"))
    model = retrofit.load("b.safetensors")
    assert {float(layer.strength) for layer in surgery.strength_layers(model.layer1)} == {0.5}
    assert float(model.bn1.strength) == 0


def test_strength_is_set_after_the_check_and_the_change_is_told(run: Run, here: Path) -> None:
    result = run("convert", "test_vit", "--to", "lnn", "--strength", "0.5", "--json")
    values = json.loads(result.stdout)
    assert values["check"]["passed"] is True
    assert values["strength"] == 0.5
    assert values["change"]["max_abs_diff"] > values["check"]["max_abs_diff"]
    assert "at strength 0.5 the output changes: largest difference" in result.stderr
    assert retrofit.load("test_vit-lnn.safetensors").norm.strength.item() == 0.5


def test_options_of_the_batch_independent_targets(run: Run, here: Path, tmp_path: Path) -> None:
    pictures = write_folder(tmp_path / "pictures")
    words = ["--groups", "auto", "--calibrate", pictures, "--no-pn-params", "--ws", "--from", "bn", "--json"]
    result = done(run("convert", "test_resnet", "--to", "gn-pn", *words))
    values = json.loads(result.stdout)
    assert values["agreement"]["images"] == 12
    assert 0 <= values["agreement"]["same"] <= 12
    assert "of the predictions are the source's" in result.stderr
    assert values["activations"]
    assert values["convolutions"]
    assert values["strength"] == 0
    assert retrofit.load("test_resnet-gn-pn.safetensors").bn1.strength.item() == 0


def test_noise_reaches_the_layers(run: Run, here: Path) -> None:
    for flags, noise in (([], 0.0), (["--noise", "0.2"], 0.2), (["--noise", "paper"], 0.4)):
        done(run("convert", "test_resnet", "--to", "bnn", "--force", *flags))
        assert retrofit.load("test_resnet-bnn.safetensors").bn1.noise == noise
    assert run("convert", "test_resnet", "--to", "bnn", "--force", "--noise", "much").exit_code == 2


def test_the_report_does_not_grow_with_the_model(run: Run, here: Path) -> None:
    short = run("convert", "test_resnet", "--to", "bnn").stderr.splitlines()
    long = run("inspect", "resnet152", "--to", "bnn").stderr.splitlines()
    assert len(long) <= len(short)


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        ("resnet50", "resnet50"),
        ("resnet50.a1_in1k", "resnet50.a1_in1k"),
        ("tv:resnet50", "resnet50"),
        ("hf-hub:timm/resnet50.a1_in1k", "resnet50.a1_in1k"),
        ("local-dir:models/mine", "mine"),
        ("out/resnet50-bnn.safetensors", "resnet50-bnn"),
    ],
)
def test_names_of_output_files(model: str, stem: str) -> None:
    assert file_stem(model) == stem


# --- refusals ---


def checkpoint(model: str = "test_resnet", **options: Any) -> dict[str, torch.Tensor]:
    return timm.create_model(model, **options).state_dict()


def truncated() -> None:
    torch.save(checkpoint(), "w.pth")
    content = Path("w.pth").read_bytes()
    Path("w.pth").write_bytes(content[: len(content) // 2])


def test_options_of_whitening(run: Run, here: Path) -> None:
    words = ["--group-size", "8", "--alpha", "0.5"]
    done(run("convert", "test_resnet", "--to", "dbnn", *words))
    layer = retrofit.load("test_resnet-dbnn.safetensors").bn1
    assert (layer.group_size, layer.alpha) == (8, 0.5)


class NotWeights:
    """A class that a checkpoint may not bring along."""


def newer_artifact() -> None:
    save_file({"x": torch.zeros(1)}, "m.safetensors", {"format": "pt", "retrofit": json.dumps({"schema": 99})})


BNN = ["test_resnet", "--to", "bnn"]
GN = ["test_resnet", "--to", "gn"]
LOADING = [*BNN, "--checkpoint", "w.pth"]
ARTIFACT = ["m.safetensors", "--to", "bnn"]
NOTHING: Callable[[], Any] = lambda: None  # noqa: E731

REFUSALS: dict[str, tuple[Callable[[], Any], list[str], int, str]] = {
    "unknown model": (NOTHING, ["resnet51", "--to", "bnn"], 2, "unknown model 'resnet51'; did you mean .*resnet5"),
    "unknown torchvision model": (NOTHING, ["tv:resnet51", "--to", "bnn"], 2, "did you mean tv:resnet50"),
    "unknown target": (NOTHING, ["test_resnet", "--to", "bn2"], 2, "unknown target 'bn2'; choose one of .*bnn, "),
    "nothing to convert": (NOTHING, ["test_vit", "--to", "bnn"], 1, "BatchNorm.* LayerNorm.*--to lnn"),
    "unknown family": (NOTHING, [*BNN, "--from", "xn"], 2, "xn"),
    "only matches nothing": (NOTHING, [*BNN, "--only", "zzz"], 1, "--only zzz matches none"),
    "skip matches nothing": (NOTHING, [*BNN, "--skip", "zzz"], 1, "--skip zzz matches none"),
    "everything skipped": (NOTHING, [*BNN, "--skip", "."], 1, "nothing to convert"),
    "bad regex": (NOTHING, [*BNN, "--only", "["], 2, r"'\['"),
    "groups below 1": (NOTHING, [*GN, "--groups", "0"], 2, "at least 1"),
    "groups auto alone": (NOTHING, [*GN, "--groups", "auto"], 2, "--calibrate"),
    "groups for dbn": (NOTHING, ["test_resnet", "--to", "dbn", "--groups", "4"], 2, "use --group-size, "),
    "group size for bnn": (NOTHING, [*BNN, "--group-size", "4"], 2, "--group-size means nothing"),
    "negative noise": (NOTHING, [*BNN, "--noise", "-1"], 2, "noise"),
    "noise for gn": (NOTHING, [*GN, "--noise", "0.1"], 2, "--noise means nothing"),
    "no calibration images": (NOTHING, [*GN, "--calibrate", "no"], 1, "there is no data at no"),
    "two sources of weights": (NOTHING, [*LOADING, "--pretrained"], 2, "pass one"),
    "match without a checkpoint": (NOTHING, [*BNN, "--match", "order"], 2, "give --checkpoint FILE"),
    "bad constructor argument": (NOTHING, [*BNN, "--model-kwargs", "depht=3"], 2, "depht"),
    "missing checkpoint": (NOTHING, LOADING, 1, "no checkpoint at w.pth"),
    "truncated checkpoint": (truncated, LOADING, 1, "not a whole checkpoint"),
    "foreign checkpoint": (lambda: torch.save(checkpoint("test_vit"), "w.pth"), LOADING, 1, "missing.*unexpected"),
    "other classes": (lambda: torch.save(checkpoint(num_classes=7), "w.pth"), LOADING, 1, "--num-classes 7"),
    "not weights only": (lambda: torch.save(NotWeights(), "w.pth"), LOADING, 1, "NotWeights"),
    "missing artifact": (NOTHING, ARTIFACT, 1, "m.safetensors does not exist"),
    "corrupt artifact": (lambda: Path("m.safetensors").write_bytes(b"x" * 99), ARTIFACT, 1, "not a whole"),
    "plain safetensors": (lambda: save_file(checkpoint(), "m.safetensors"), ARTIFACT, 1, "--checkpoint m.safetensors"),
    "newer artifact": (newer_artifact, ARTIFACT, 1, "schema 99.*upgrade"),
    "options for an artifact": (NOTHING, [*ARTIFACT, "--in-chans", "1"], 2, "--in-chans"),
    "output exists": (lambda: Path("test_resnet-bnn.safetensors").write_text("mine"), BNN, 1, "exists; pass --force"),
    "output is a folder": (lambda: Path("d.safetensors").mkdir(), [*BNN, "-o", "d.safetensors"], 1, "is a folder"),
    "output folder missing": (NOTHING, [*BNN, "-o", "no/a.safetensors"], 1, "no does not exist"),
    "foreign ending": (NOTHING, [*BNN, "-o", "a.pth"], 2, "ends in .safetensors"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_refusals(run: Run, here: Path, case: str) -> None:
    prepare, words, code, pattern = REFUSALS[case]
    prepare()
    before = {file: file.read_bytes() for file in here.iterdir() if file.is_file()}
    result = run("convert", *words)
    assert result.exit_code == code
    assert re.search(pattern, complaint(result)), result.stderr
    assert {file: file.read_bytes() for file in here.iterdir() if file.is_file()} == before


def test_an_output_that_exists_is_refused_before_any_work(run: Run, here: Path) -> None:
    Path("a.safetensors").write_text("mine")
    result = run("convert", "no_such_model", "--to", "bnn", "-o", "a.safetensors")
    assert "a.safetensors exists" in complaint(result)


def test_force_replaces(run: Run, here: Path) -> None:
    Path("test_resnet-bnn.safetensors").write_text("mine")
    done(run("convert", "test_resnet", "--to", "bnn", "--force"))
    assert type(retrofit.load("test_resnet-bnn.safetensors").bn1).__name__ == "BatchNormalNorm2d"


def test_which_weights_of_a_checkpoint_were_taken_is_said_and_recorded(run: Run, here: Path) -> None:
    trained = timm.create_model("test_byobnet").state_dict()
    backbone = {f"net.{name}": value for name, value in trained.items() if not name.startswith("head.fc")}
    torch.save({"model": {name: value + 1 for name, value in trained.items()}, "model_ema": backbone}, here / "x.pth")
    words = ("convert", "test_byobnet", "--to", "bnn", "--checkpoint", "x.pth", "--json")
    assert "2 missing (head.fc.weight, head.fc.bias); pass --checkpoint-partial" in complaint(run(*words))
    result = run(*words, "--checkpoint-partial")
    assert result.exit_code == 0
    assert "checkpoint x.pth, its model_ema in PART (it also holds model: --checkpoint-key NAME)" in result.stderr
    assert "tensors are left RANDOM (head.fc.weight, head.fc.bias)" in result.stderr
    weights = json.loads(result.stdout)["weights"]
    assert weights == {
        **{"kind": "checkpoint", "from": "x.pth", "key": "model_ema", "others": ["model"]},
        "left_random": ["head.fc.weight", "head.fc.bias"],
    }
    whole = run(*words, "--checkpoint-key", "model", "--force")
    assert json.loads(whole.stdout)["weights"]["key"] == "model"


@pytest.mark.parametrize("flag", [("--match", "order"), ("--checkpoint-key", "x"), ("--checkpoint-partial",)])
def test_what_to_take_of_a_checkpoint_needs_one(run: Run, flag: tuple[str, ...]) -> None:
    assert f"{flag[0]} says what to take" in complaint(run("convert", "test_byobnet", "--to", "bnn", *flag))


def test_nan_weights_are_named_in_a_warning(run: Run, here: Path) -> None:
    weights = checkpoint()
    weights["fc.bias"][0] = torch.nan
    torch.save(weights, "w.pth")
    result = run("convert", "test_resnet", "--to", "bnn", "--checkpoint", "w.pth")
    assert result.exit_code == 0
    assert re.search(r"warning: .*NaN.*fc\.bias", result.stderr)


def test_a_read_only_folder(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write anywhere, whatever the permission bits say
    monkeypatch.setattr("retrofit.utils.files.os.access", lambda path, mode: False)
    assert "read-only" in complaint(run("convert", "test_resnet", "--to", "bnn"))


def fail(error: BaseException) -> Callable[..., None]:
    def raising(*_: Any, **__: Any) -> None:
        raise error

    return raising


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "no space left"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(143), 143, ""),
    ],
)
def test_nothing_is_left_of_a_write_that_fails(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def half(_tensors: Any, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr("retrofit.networks.artifact.save_file", half)
    result = run("convert", "test_resnet", "--to", "bnn", "--json")
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""
    assert os.listdir(here) == []


def test_ctrl_c_during_the_check(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "compare", fail(KeyboardInterrupt()))
    result = run("convert", "test_resnet", "--to", "bnn")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted"
    assert os.listdir(here) == []


def test_a_failed_check_writes_nothing(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = retrofit.surgery.conversion.apply

    def spoiling(*args: Any) -> Any:
        model, report = apply(*args)
        model.bn1.eps = 10.0
        return model, report

    monkeypatch.setattr("retrofit.surgery.conversion.apply", spoiling)
    result = run("convert", "test_resnet", "--to", "bnn", "--json")
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert values["check"]["passed"] is False
    assert values["output"] is None
    assert "check FAILED: largest difference" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: the converted network is not the function of its source")
    assert os.listdir(here) == []


def test_brackets_in_a_pattern_are_not_markup(run: Run, here: Path) -> None:
    result = run("convert", "test_resnet", "--to", "bnn", "--skip", "layer[1]")
    assert result.exit_code == 0
    assert "'layer[1]'" in result.stderr


@pytest.mark.parametrize("name", ["test_resnet", "tv:mobilenet_v3_small"])
def test_a_random_network_asks_nothing_of_the_net(
    name: str, run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def note(*args: Any, **_: Any) -> None:
        asked.append(args)
        raise OSError("there is no network here")

    for owner, function in ((socket, "getaddrinfo"), (socket, "gethostbyname"), (socket, "create_connection")):
        monkeypatch.setattr(owner, function, note)
    monkeypatch.setattr(socket.socket, "connect", note)
    done(run("inspect", name))
    done(run("convert", name, "--to", "bnn", "-o", "a.safetensors", "--img-size", "64"))
    retrofit.save(retrofit.load("a.safetensors"), "c.safetensors")
    assert asked == []


@pytest.mark.parametrize("to", ["evonorm-s0", "frn-tlu"])
def test_a_target_without_strength_says_how_much_the_output_changes(to: str, run: Run, here: Path) -> None:
    result = done(run("convert", "test_resnet", "--to", to, "--json"))
    values = json.loads(result.stdout)
    assert values["strength"] is None
    assert values["check"]["identity"] is False
    assert values["check"]["passed"] is False
    assert (
        f"{to} does not start as its source: largest difference {values['check']['max_abs_diff']:.3g}" in result.stderr
    )
    assert re.search(r"ReLU +part of (EvoNorm2dS0|FilterResponseNormTlu2d)", result.stderr)
    assert written(here) == [f"test_resnet-{to}.safetensors"]
    refused = run("convert", "test_resnet", "--to", to, "--strength", "0", "--force")
    assert refused.exit_code == 2
    assert "--strength means nothing to" in complaint(refused)


def test_a_target_without_strength_is_measured_on_images(run: Run, here: Path) -> None:
    write_folder(here / "photos", each=1)
    result = done(run("convert", "test_resnet", "--to", "frn-tlu", "--calibrate", "photos", "--json"))
    assert json.loads(result.stdout)["agreement"]["images"] > 0
    assert "untrained, " in result.stderr
    assert "at strength 1" not in result.stderr


def test_outputs_that_are_not_finite_are_no_conversion(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.layers.FilterResponseNormTlu2d.forward", lambda self, x: x * float("nan"))
    result = run("convert", "test_resnet", "--to", "frn-tlu")
    assert result.exit_code == 1
    assert "not finite" in complaint(result)
    assert not written(here)


def test_ablation_flags_reach_the_layers(run: Run, here: Path) -> None:
    flags = ("--noise-kind", "gaussian-dropout", "--alpha", "0.5")
    done(run("convert", "test_resnet", "--to", "bnn", *flags))
    layer = retrofit.load("test_resnet-bnn.safetensors").bn1
    assert (layer.noise_kind, layer.alpha) == ("gaussian-dropout", 0.5)
    assert run("convert", "test_resnet", "--to", "bnn", "--noise-kind", "none").exit_code == 2
    refused = run("convert", "test_resnet", "--to", "gn", "--alpha", "0.5")
    assert "--alpha means nothing to this target" in complaint(refused)


def test_the_noise_kinds_of_the_flag_are_those_of_the_layers() -> None:
    (flag,) = [option for option in command.params if option.name == "noise_kind"]
    assert tuple(flag.type.choices) == get_args(NoiseKind)


def test_the_next_step_fits_a_network_that_does_not_classify(run: Run, here: Path) -> None:
    Path("dense.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))\n"
    )
    result = done(run("convert", "py:dense:build", "--to", "bnn", "-o", "dense.safetensors"))
    last = result.stderr.splitlines()[-1]
    assert last.startswith("next: model = retrofit.load('dense.safetensors', into=YOUR_NETWORK)")
