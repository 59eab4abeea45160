"""The command line as a whole: help, completion, exit codes, one-line errors, signals, and what it must not import."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

import retrofit
from retrofit.cli import COMMANDS, main, options
from retrofit.conversion_options import CONVERTERS
from retrofit.errors import RetrofitError, UsageError
from retrofit.surgery import FAMILIES, TARGETS
from tests.cli.conftest import Run, complaint, done
from tests.conftest import heed_signals


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_shows_every_command_and_its_examples(run: Run, name: str) -> None:
    assert f"\n  {name} " in done(run("--help")).stdout
    lines = done(run(name, "--help")).stdout.splitlines()
    assert sum(line.strip().startswith(f"$ retrofit {name} ") for line in lines) >= 2


@pytest.mark.parametrize("name", ["convert", "inspect", "evaluate", "export", "bench", "diagnose"])
def test_the_help_of_a_long_command_is_in_groups(run: Run, name: str) -> None:
    text = run(name, "--help").stdout
    assert "\nOptions:\n" not in text
    assert re.search(
        r"\nThe network:\n  --num-classes N  .*\n\nOutput:\n.*--json .*\n  -h, --help .*\n$", text, re.DOTALL
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["conv"], ["convert"]),
        (["convert", "resnet18", "--to", "gn"], ["gnn", "gn", "gn-pn"]),
        (["convert", "resnet18", "--to", "bnn", "--from", "f"], ["frozen-bn"]),
        (["finetune", "net.safetensors", "--recipe", "imagenet-gn-pn"],
         ["imagenet-gn-pn-efficientnet", "imagenet-gn-pn-resnet50", "file"]),
        (["evaluate", "test_resn"], ["test_resnet", "file"]),
        (["evaluate", "tv:resnet1"], ["tv:resnet18", "tv:resnet101", "tv:resnet152", "file"]),
        (["export", "r"], ["file"]),
        (["bench", "a.safetensors", "--against", "runs/di"], ["file"]),
    ],
)  # fmt: skip
def test_words_that_the_tab_key_completes(words: list[str], expected: list[str]) -> None:
    *args, typed = words
    found = ShellComplete(main, {}, "retrofit", "_RETROFIT_COMPLETE").get_completions(args, typed)
    assert sorted(item.value if item.type == "plain" else item.type for item in found) == sorted(expected)


def test_every_target_and_family_is_known() -> None:
    assert list(CONVERTERS) == list(TARGETS)
    assert set(options.FAMILIES) == set(FAMILIES)


def test_help_and_the_shells_completion_import_nothing_heavy() -> None:
    """What takes a second to import would show in a help that answers in 0.3 s."""
    heavy = {"torch", "timm", "torchvision", "rich", "numpy", "safetensors", "onnx"}
    script = f"""
import sys
from click.shell_completion import ShellComplete
from retrofit.cli import main
shell = ShellComplete(main, {{}}, "retrofit", "_RETROFIT_COMPLETE")
assert shell.get_completions(["convert", "resnet18", "--to"], "b")
assert shell.get_completions(["finetune", "resnet18", "--recipe"], "d")
for name in [[], *([name] for name in {list(COMMANDS)})]:
    try:
        main([*name, "--help"])
    except SystemExit:
        pass
    if loaded := {heavy} & set(sys.modules):
        sys.exit(f"{{name}} imported {{loaded}}")
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("words", "message", "page"),
    [
        (["frobnicate"], "there is no command 'frobnicate'", ""),
        (["convertt", "resnet18"], "did you mean convert?", ""),
        (["--nothing"], "No such option", ""),
        (["convert", "resnet18"], "Missing option '--to'", " convert"),
        (["convert"], "Missing argument 'MODEL'", " convert"),
        (["convert", "resnet18", "--to", "bn2"], "'bn2' is not one of 'bnn'", " convert"),
        (["convert", "resnet18", "--to", "bnn", "--strength", "2"], "--strength", " convert"),
        (["convert", "resnet18", "--to", "bnn", "--groups", "many"], "neither a number nor auto", " convert"),
        (["convert", "resnet18", "--to", "bnn", "--model-kwargs", "depth"], "key=value", " convert"),
        (["evaluate", "resnet18", "--data-dir", ".", "-b", "0"], "--batch-size", " evaluate"),
        (["evaluate", "resnet18", "--attack", "pgd", "--eps", "4"], "such as 4/255", " evaluate"),
        (["inspect", "resnet18", "--jsn"], "No such option", " inspect"),
    ],
)
def test_a_misuse_is_one_line_that_refers_to_its_own_page_of_help(
    run: Run, words: list[str], message: str, page: str
) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in complaint(result)
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.endswith(f"; see main{page} --help\n")


OUTCOMES = [
    (RetrofitError("it broke; mend it"), 1, "error: it broke; mend it"),
    (UsageError("bad word; use a good one"), 2, "error: bad word; use a good one"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (click.UsageError("no such word."), 2, "error: no such word; see main inspect --help"),
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
    assert debug or len(written) <= 1


def test_version(run: Run) -> None:
    assert retrofit.__version__ in done(run("--version")).stdout


def test_python_dash_m() -> None:
    words = [sys.executable, "-m", "retrofit", "frobnicate"]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "error: there is no command 'frobnicate'; see retrofit --help\n"


def test_bare_call_shows_help_and_no_error(run: Run) -> None:
    result = run()
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")
    assert "error:" not in result.stderr


@pytest.mark.slow
def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "retrofit", "convert", "resnet152", "--to", "bnn"]
    pipes = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heed_signals}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("weights: RANDOM")  # the check of the source comes next
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_closed_pipe_is_no_error_of_ours(tmp_path: Path, environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "retrofit", "inspect", "test_resnet", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
