"""The command line as a whole: help, exit codes, one-line errors, and what it must not import."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import retrofit.cli
from retrofit.cli import COMMANDS, main
from retrofit.errors import RetrofitError, UsageError
from tests.cli.conftest import Run, complaint


def test_help_lists_every_command(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_a_command_shows_commands_with_their_output(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    examples = [line for line in result.stdout.splitlines() if line.strip().startswith("$ retrofit ")]
    assert sum(f"$ retrofit {name} " in line for line in examples) >= 2


def test_help_imports_nothing_heavy() -> None:
    script = """
import sys
from retrofit.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"torch", "timm", "torchvision", "rich", "numpy", "safetensors"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["inspect", "--help"], ["convert", "--help"], ["evaluate", "--help"]])
def test_help_of_a_command_needs_no_torch(words: list[str]) -> None:
    script = f"import sys; from retrofit.cli import main\ntry: main({words})\nexcept SystemExit: pass\n"
    script += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["frobnicate"], "there is no command 'frobnicate'"),
        (["convert", "resnet18"], "Missing option '--to'"),
        (["convert"], "Missing argument 'MODEL'"),
        (["convert", "resnet18", "--to", "bnn", "--strength", "2"], "--strength"),
        (["convert", "resnet18", "--to", "bnn", "--groups", "many"], "neither a number nor auto"),
        (["convert", "resnet18", "--to", "bnn", "--model-kwargs", "depth"], "key=value"),
        (["convert", "resnet18", "--to", "bnn", "--match", "shape"], "--match"),
        (["evaluate", "resnet18", "--data-dir", ".", "-b", "0"], "--batch-size"),
        (["inspect", "resnet18", "--jsn"], "No such option"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(run: Run, words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in complaint(result)
    assert len(result.stderr.splitlines()) == 1
    assert "--help" in result.stderr


OUTCOMES = [
    (RetrofitError("it broke; mend it"), 1, "error: it broke; mend it"),
    (UsageError("bad word; use a good one"), 2, "error: bad word; use a good one"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (OSError(5, "Input/output error", "f"), 1, "error: [Errno 5] Input/output error: 'f'; check"),
    (ValueError("first\nsecond"), 1, "error: unexpected ValueError: first second; RETROFIT_DEBUG=1"),
    (SystemExit(143), 143, ""),
]


@pytest.mark.parametrize(("raised", "code", "line"), OUTCOMES)
@pytest.mark.parametrize("debug", [False, True])
def test_every_exception_becomes_a_line_and_a_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, line: str, debug: bool
) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr(main, "get_command", lambda *_: click.Command("inspect", callback=fail))
    if debug:
        monkeypatch.setenv("RETROFIT_DEBUG", "1")
    result = run("inspect")
    assert result.exit_code == code
    written = result.stderr.strip().splitlines()
    assert (written[-1] if written else "").startswith(line)
    assert ("Traceback" in result.stderr) is (debug and code != 143)
    if not debug:
        assert len(written) <= 1


def test_the_environment_shows_the_traceback_of_usage_errors_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROFIT_DEBUG", "1")
    assert "Traceback" in run("inspect").stderr


def test_version() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert done.exit_code == 0
    assert retrofit.__version__ in done.stdout


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "retrofit", "frobnicate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: there is no command 'frobnicate'; see retrofit --help\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (["inspect", "resnet18", "--to"], "main inspect"),
        (["bench", "--nothing"], "main bench"),
        (["--nothing"], "main"),
    ],
)
def test_a_misuse_refers_to_its_own_page_of_help(run: Run, words: list[str], page: str) -> None:
    assert complaint(run(*words)).endswith(f"; see {page} --help")


def test_bare_call_shows_help_and_no_error(run: Run) -> None:
    result = run()
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")
    assert "error:" not in result.stderr


@pytest.mark.parametrize(
    ("word", "hint"),
    [("convertt", "did you mean convert?"), ("finetun", "did you mean finetune?"), ("xyz", "there is no command")],
)
def test_a_mistyped_command_gets_the_closest(run: Run, word: str, hint: str) -> None:
    result = run(word, "resnet18")
    assert result.exit_code == 2
    assert hint in complaint(result)
