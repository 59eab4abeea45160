"""What people see: tables on narrow and wide terminals, progress, and flags where the library names arguments."""

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

import retrofit
from retrofit.cli import console, main
from retrofit.cli.console import in_flags

ROWS = [
    ("53", "BatchNorm2d", "MigratedGroupNormAct", "layer1.0.bn1 (+52)", ""),
    ("16", "ReLU", "(left)", "layer1.0.act3 (+15)", "after a residual addition"),
]


@pytest.fixture(params=[80, 120])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Console:
    terminal = Console(file=io.StringIO(), width=request.param, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    return terminal


def test_a_table_fits_and_breaks_no_word(terminal: Console) -> None:
    console.show_table(("count", "found", "becomes", "names", "why"), ROWS)
    lines = terminal.file.getvalue().splitlines()
    assert max(map(len, lines)) <= terminal.width
    words = " ".join(lines).split()
    assert {"BatchNorm2d", "after", "residual", "addition"} <= set(words)
    assert sum(word.startswith("Migrate") for word in words) == 1
    wide = terminal.width == 120
    assert ("MigratedGroupNormAct" in words) == wide
    assert console.names(["a", "b", "c", "d"]) == ("a, b, ... (2 more)" if wide else "a (+3)")


@pytest.mark.parametrize("text", ["opening x[/bold]", "opening [red]x"])
def test_a_name_with_brackets_is_shown_as_it_is(terminal: Console, text: str) -> None:
    with console.waiting(text):
        pass
    with console.progress_bar(text) as move:
        move(1, 2, "[b]")
    assert f"{text} " in terminal.file.getvalue()
    assert f"{text}: [b]" in terminal.file.getvalue()


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    log = Console(file=io.StringIO(), width=120, get_time=lambda: clock[0])
    monkeypatch.setattr(console, "stderr", lambda: log)
    with console.progress_bar("training") as move:
        for clock[0], step in ((1.0, 100), (20.0, 101), (61.0, 110), (70.0, 111)):
            move(step, 170, "epoch 1")
    assert log.file.getvalue() == "training 110 of 170: epoch 1, 6 min left\n"


PACKAGE = Path(retrofit.__file__).parent
OTHERS = {"cli", "cpp.py"}  # which names the compiler's -o
LIBRARY = [file for file in sorted(PACKAGE.rglob("*.py")) if OTHERS.isdisjoint(file.relative_to(PACKAGE).parts)]
FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z0-9-]*|-[a-z](?![\w-]))")
COMMAND = re.compile(r"`retrofit ([a-z]+) ([^`]*)`")


def command(name: str) -> click.Command:
    return main.get_command(click.Context(main), name)  # type: ignore[return-value]


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
        *(("lower `batch_size`", "lower --batch-size"), ("add `source='bn'`", "add --from bn")),
        *(("drop `pretrained`", "drop --pretrained"), ("pass `pretrained=True`", "pass --pretrained")),
        ("start again with `amp=False`", "start again with --no-amp"),
        ("pass `checkpoint=FILE`", "pass --checkpoint FILE"),
        ("pass `checkpoint='a b.pth'`", "pass --checkpoint 'a b.pth'"),
        ("pass `model_kwargs={'a': 1, 'b': 'x'}`", "pass --model-kwargs a=1 --model-kwargs b=x"),
        ("`batch_size=7`, `batch_size=(8,)`", "--batch-size 7, --batch-size 8"),
        *((text, text) for text in ("`into` and `strength=1`", "an open ` and source")),
        ("`retrofit convert` and `save(source='own')`", "`retrofit convert` and `save(source='own')`"),
    ],
)
def test_arguments_become_flags(text: str, expected: str) -> None:
    assert in_flags(text, example) == expected
    assert in_flags(text) == text  # no command runs
    assert in_flags("pass `force=True`", command("recipes")) == "pass --force"  # a group has its commands' options


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings of a file but its docstrings, as they are written; an f-string is one."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield ast.unparse(node)
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def test_the_library_writes_no_flags() -> None:
    for file in LIBRARY:
        for text in texts(ast.parse(file.read_text())):
            for name, rest in COMMAND.findall(text):  # a whole command, for a shell
                assert set(FLAG.findall(rest)) <= flags_of(name), (file, text)
            assert not FLAG.search(COMMAND.sub("", text)), (file, text)
