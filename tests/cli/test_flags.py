"""Sentences name Python's arguments; a command line's user reads flags in their place."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
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
from retrofit.networks.models import open_model
from tests.cli.conftest import Run, complaint

PACKAGE = Path(retrofit.__file__).parent
OTHERS = {"cli", "html_page.py", "build.py"}  # of which two name a variable of CSS, --ink, and the compiler's -o
LIBRARY = [file for file in sorted(PACKAGE.rglob("*.py")) if OTHERS.isdisjoint(file.relative_to(PACKAGE).parts)]
FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*|-[a-z](?![\w-]))")
COMMAND = re.compile(r"`retrofit ([a-z]+) ([^`]*)`")


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def flags_of(name: str) -> set[str]:
    return {text for one in command(name).params for text in (*one.opts, *one.secondary_opts)}


def flag_of(words: tuple[str, ...], argument: str) -> str:
    """The flag of an argument in the command that some words call."""
    called = command(words[0])
    if isinstance(called, click.Group):
        called = called.commands[words[1]]
    (flag,) = [max(option.opts, key=len) for option in called.params if option.name == argument]
    return flag


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


def texts(file: Path) -> Iterator[str]:
    """Yield the strings of a file but its docstrings; what an f-string inserts is an X."""
    tree = ast.parse(file.read_text())
    bodies = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = [node.body[0] for node in ast.walk(tree) if isinstance(node, bodies) and node.body]
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    others = {id(first.value) for first in firsts if isinstance(first, ast.Expr)}
    others |= {id(part) for node in joined for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
            yield node.value
    for node in joined:
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)


def test_the_library_writes_no_flags() -> None:
    for file in LIBRARY:
        for text in texts(file):
            for name, rest in COMMAND.findall(text):  # a whole command, for a shell
                assert set(FLAG.findall(rest)) <= flags_of(name), (file, text)
            assert not FLAG.search(COMMAND.sub("", text)), (file, text)


def network() -> nn.Module:
    return timm.create_model("test_resnet", num_classes=4)


def checkpoint() -> str:
    torch.save(network().state_dict(), "w.pth")
    return "w.pth"


def run_of(folder: str, **settings: Any) -> Any:
    recipe = Recipe(dataset="digits", img_size=32, workers=0, device="cpu", epochs=1)
    return finetune(open_model(NET, img_size=32), recipe.model_copy(update=settings), Path(folder))


NET = "test_resnet"
DIGITS = ("finetune", NET, "--dataset", "digits", "--img-size", "32", "-j", "0")
# A call in Python, the same call on the command line, and the arguments that both name.
CASES: dict[str, tuple[Callable[[], Any], tuple[str, ...], set[str]]] = {
    "an option out of place": (
        lambda: retrofit.convert(network(), "dbn", groups=2),
        ("convert", NET, "--to", "dbn", "--groups", "2"),
        {"groups", "group_size"},
    ),
    "a number out of range": (
        lambda: retrofit.plan(network(), "bnn", alpha=2),
        ("inspect", NET, "--to", "bnn", "--alpha", "2"),
        {"alpha"},
    ),
    "two sources of weights": (
        lambda: open_model(NET, pretrained=True, checkpoint="w.pth"),
        ("evaluate", NET, "--dataset", "digits", "--pretrained", "--checkpoint", "w.pth"),
        {"pretrained", "checkpoint"},
    ),
    "another classifier": (
        lambda: open_model(NET, checkpoint=checkpoint()),
        ("bench", NET, "--checkpoint", "w.pth"),
        {"num_classes", "checkpoint_partial"},
    ),
    "what to take of no checkpoint": (
        lambda: open_model(NET, checkpoint_key="model"),
        ("diagnose", NET, "--dataset", "digits", "--checkpoint-key", "model"),
        {"checkpoint", "checkpoint_key"},
    ),
    "an exact fold for a runtime": (
        lambda: retrofit.export_onnx(network(), "a.onnx", runtime="openvino"),
        ("export", NET, "--for", "openvino"),
        {"runtime", "fold"},
    ),
    "a file that exists": (
        lambda: retrofit.save(network(), checkpoint()),
        ("recipes", "copy", "digits", "w.pth"),
        {"force"},
    ),
    "a folder that exists": (lambda: run_of("."), (*DIGITS, "-o", "."), {"folder", "resume"}),
    "a device that is not there": (
        lambda: run_of("new", device="tpu"),
        (*DIGITS, "--device", "tpu", "-o", "new"),
        {"device"},
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_each_is_told_what_it_can_use(run: Run, here: Path, case: str) -> None:
    call, words, arguments = CASES[case]
    checkpoint()
    with pytest.raises(RetrofitError) as caught:
        call()
    said = str(caught.value)
    assert set(re.findall(r"`(\w+)(?:=[^`]*)?`", said)) == arguments
    assert not FLAG.search(said)
    result = run(*words)
    line = complaint(result)
    assert result.exit_code == caught.value.exit_code
    assert set(FLAG.findall(line)) == {flag_of(words, name) for name in arguments}
    assert "`" not in line
