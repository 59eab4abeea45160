"""Sentences name Python's arguments; a command line's user reads flags in their place."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import timm
import torch
from torch import nn

import retrofit
from retrofit.cli import main
from retrofit.cli.flags import in_flags
from retrofit.errors import RetrofitError
from retrofit.finetune import Recipe, finetune
from retrofit.images.dataset import open_images
from retrofit.networks.models import open_model
from tests.cli.conftest import Run, complaint

PACKAGE = Path(retrofit.__file__).parent
LIBRARY = [file for file in sorted(PACKAGE.rglob("*.py")) if "cli" not in file.relative_to(PACKAGE).parts]
FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*|-[a-z](?![\w-]))")
COMMAND = re.compile(r"`retrofit ([a-z]+) ([^`]*)`")
OTHERS = {
    PACKAGE / "utils" / "html_page.py",  # CSS names its variables --ink
    PACKAGE / "layers" / "kernels" / "build.py",  # the compiler's -o
}


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def flags_of(name: str) -> set[str]:
    return {text for one in command(name).params for text in (*one.opts, *one.secondary_opts)}


@click.command()
@click.option("--from", "source")
@click.option("-b", "--batch-size", "batch_size")
@click.option("--pretrained", is_flag=True)
@click.option("--amp/--no-amp")
@click.option("--model-kwargs", multiple=True)
@click.option("--checkpoint")
def example(**_: Any) -> None:
    """Have some options."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lower `batch_size`", "lower --batch-size"),
        ("add `source='bn'`", "add --from bn"),
        ("drop `pretrained`", "drop --pretrained"),
        ("pass `pretrained=True`", "pass --pretrained"),
        ("start again with `amp=False`", "start again with --no-amp"),
        ("pass `checkpoint=FILE`", "pass --checkpoint FILE"),
        ("pass `checkpoint='a b.pth'`", "pass --checkpoint 'a b.pth'"),
        ("pass `model_kwargs={'a': 1, 'b': 'x'}`", "pass --model-kwargs a=1 --model-kwargs b=x"),
        ("`batch_size=7`, `batch_size=(8,)`", "--batch-size 7, --batch-size 8"),
        ("`into` and `strength=1`", "`into` and `strength=1`"),
        ("`retrofit convert` and `save(source='own')`", "`retrofit convert` and `save(source='own')`"),
        ("an open ` and source", "an open ` and source"),
    ],
)
def test_arguments_become_flags(text: str, expected: str) -> None:
    assert in_flags(text, example) == expected
    assert in_flags(text) == text  # no command runs


def test_a_group_has_the_options_of_its_commands() -> None:
    assert in_flags("pass `force=True`", command("recipes")) == "pass --force"


@pytest.mark.parametrize("file", LIBRARY, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_library_writes_no_flags(file: Path) -> None:
    tree = ast.parse(file.read_text())
    bodies = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, bodies) and node.body and isinstance(node.body[0], ast.Expr)
    }
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in ast.walk(node) if part is not node}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = [node.value for node in strings if id(node) not in documented | inside]
    texts += ["".join(p.value if isinstance(p, ast.Constant) else "X" for p in node.values) for node in joined]
    for text in texts:
        for name, rest in COMMAND.findall(text):  # a whole command, for a shell
            assert set(FLAG.findall(rest)) <= flags_of(name), text
        assert file in OTHERS or not FLAG.search(COMMAND.sub("", text)), text


def network() -> nn.Module:
    return timm.create_model("test_resnet", num_classes=4)


def checkpoint() -> str:
    torch.save(network().state_dict(), "w.pth")
    return "w.pth"


def run_of(folder: str, resume: bool = False, **settings: Any) -> Any:
    recipe = Recipe(dataset="digits", img_size=32, workers=0, device="cpu", epochs=1)
    opened = open_model("test_resnet", img_size=32)
    return finetune(opened, recipe.model_copy(update=settings), Path(folder), resume=resume)


NET = "test_resnet"
DIGITS = ("finetune", NET, "--dataset", "digits", "--img-size", "32", "-j", "0")
# What is called, the same call in Python, the same call on the command line, the arguments named and the flags named.
CASES: dict[str, tuple[Any, Callable[[], Any], tuple[str, ...], set[str], set[str]]] = {
    "two numbers of groups": (
        retrofit.plan,
        lambda: retrofit.plan(network(), "gn", groups=2, group_channels=8),
        ("convert", NET, "--to", "gn", "--groups", "2", "--group-channels", "8"),
        {"groups", "group_channels"},
        {"--groups", "--group-channels"},
    ),
    "an option out of place": (
        retrofit.convert,
        lambda: retrofit.convert(network(), "dbn", groups=2),
        ("convert", NET, "--to", "dbn", "--groups", "2"),
        {"groups", "group_size"},
        {"--groups", "--group-size"},
    ),
    "a number out of range": (
        retrofit.convert,
        lambda: retrofit.convert(network(), "bnn", alpha=2),
        ("inspect", NET, "--to", "bnn", "--alpha", "2"),
        {"alpha"},
        {"--alpha"},
    ),
    "groups without images": (
        retrofit.convert,
        lambda: retrofit.convert(network(), "gn", groups="auto"),
        ("convert", NET, "--to", "gn", "--groups", "auto"),
        {"groups", "calibrate"},
        {"--groups", "--calibrate"},
    ),
    "a family that is none": (
        retrofit.plan,
        lambda: retrofit.plan(network(), "bnn", source="xn"),
        ("inspect", NET, "--to", "bnn", "--from", "xn"),
        {"source"},
        {"--from"},
    ),
    "a target without layers": (
        retrofit.convert,
        lambda: retrofit.convert(network(), "lnn"),
        ("convert", NET, "--to", "lnn"),
        {"to"},
        {"--to"},
    ),
    "two sources of weights": (
        open_model,
        lambda: open_model(NET, pretrained=True, checkpoint="w.pth"),
        ("evaluate", NET, "--dataset", "digits", "--pretrained", "--checkpoint", "w.pth"),
        {"pretrained", "checkpoint"},
        {"--pretrained", "--checkpoint"},
    ),
    "another classifier": (
        open_model,
        lambda: open_model(NET, checkpoint=checkpoint()),
        ("bench", NET, "--checkpoint", "w.pth"),
        {"num_classes", "checkpoint_partial"},
        {"--num-classes", "--checkpoint-partial"},
    ),
    "a checkpoint for a network": (
        open_model,
        lambda: open_model(checkpoint()),
        ("diagnose", "w.pth", "--dataset", "digits"),
        {"checkpoint"},
        {"--checkpoint"},
    ),
    "weights among the builder's arguments": (
        open_model,
        lambda: open_model(NET, model_kwargs={"weights": 1}),
        ("export", NET, "--model-kwargs", "weights=1"),
        {"model_kwargs", "pretrained"},
        {"--model-kwargs", "--pretrained"},
    ),
    "an exact fold of some degree": (
        retrofit.export_onnx,
        lambda: retrofit.export_onnx(network(), "a.onnx", degree=3),
        ("export", NET, "--degree", "3"),
        {"degree", "fold"},
        {"--degree", "--fold"},
    ),
    "an exact fold for a runtime": (
        retrofit.fold,
        lambda: retrofit.fold(network(), runtime="openvino"),
        ("export", NET, "--for", "openvino"),
        {"runtime", "fold"},
        {"--for", "--fold"},
    ),
    "ranges without images": (
        retrofit.export_onnx,
        lambda: retrofit.export_onnx(network(), "a.onnx", precision="int8"),
        ("export", NET, "--int8"),
        {"calibrate"},
        {"--calibrate"},
    ),
    "an operator set that is not there": (
        retrofit.export_onnx,
        lambda: retrofit.export_onnx(network(), "a.onnx", opset=3),
        ("export", NET, "--opset", "3"),
        {"opset"},
        {"--opset"},
    ),
    "a file that exists": (
        retrofit.save,
        lambda: retrofit.save(network(), checkpoint()),
        ("recipes", "copy", "digits", "w.pth"),
        {"force"},
        {"--force"},
    ),
    "no images": (
        open_images,
        lambda: open_images(None),
        ("finetune", NET),
        {"data_dir", "dataset"},
        {"--data-dir", "--dataset"},
    ),
    "a folder that exists": (
        finetune,
        lambda: run_of("."),
        (*DIGITS, "-o", "."),
        {"folder", "resume"},
        {"--output", "--resume"},
    ),
    "no run": (
        finetune,
        lambda: retrofit.finetune.loop.resume_network(Path("absent")),
        ("finetune", "--resume", "absent"),
        {"resume"},
        {"--resume"},
    ),
    "a device that is not there": (
        Recipe,
        lambda: run_of("new", device="tpu"),
        (*DIGITS, "--device", "tpu", "-o", "new"),
        {"device"},
        {"--device"},
    ),
    "no batch statistics to share": (
        Recipe,
        lambda: run_of("new", sync_norm=True),
        (*DIGITS, "--sync-norm", "-o", "new"),
        {"sync_norm"},
        {"--sync-norm"},
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_each_is_told_what_it_can_use(run: Run, here: Path, case: str) -> None:
    called, call, words, arguments, flags = CASES[case]
    checkpoint()
    with pytest.raises(RetrofitError) as caught:
        call()
    said = str(caught.value)
    assert set(re.findall(r"`(\w+)(?:=[^`]*)?`", said)) == arguments
    assert arguments <= set(inspect.signature(called).parameters)
    assert not FLAG.search(said)
    result = run(*words)
    line = complaint(result)
    assert result.exit_code == caught.value.exit_code
    assert set(FLAG.findall(line)) == flags
    assert words[0] == "recipes" or flags <= flags_of(words[0])
    assert "`" not in line
