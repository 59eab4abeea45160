"""The command line as a whole: help, completion, exit codes, what is refused in one line, signals,
and slow imports.

And what people see: tables on narrow and wide terminals, progress, and flags where the library
names arguments.
"""

import ast
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.shell_completion import ShellComplete
from rich.console import Console
from safetensors.torch import save_file

import retrofit
from retrofit.cli import COMMANDS, console, main
from retrofit.cli.console import in_flags
from retrofit.errors import RetrofitError, UsageError
from tests.cli.conftest import Run, Start, answer, complaint, done
from tests.networks import mynet
from tests.networks.conftest import shape_beyond_torch
from tests.pictures import write_folder

PACKAGE = Path(retrofit.__file__).parent
OTHERS = {"cli", "cpp.py"}  # which names the compiler's -o
LIBRARY = [
    file
    for file in sorted(PACKAGE.rglob("*.py"))
    if OTHERS.isdisjoint(file.relative_to(PACKAGE).parts)
]
FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z0-9-]*|-[a-z](?![\w-]))")
COMMAND = re.compile(r"`retrofit ([a-z]+) ([^`]*)`")


def command(name: str) -> click.Command:
    return main.get_command(click.Context(main), name)  # type: ignore[return-value]


def flags_of(name: str) -> set[str]:
    return {text for one in command(name).params for text in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_shows_every_command_its_examples_and_groups_of_options(run: Run, name: str) -> None:
    assert f"\n  {name} " in done(run("--help")).stdout
    text = done(run(name, "--help")).stdout
    assert text.count(f"$ retrofit {name} ") >= 2
    if name not in ("finetune", "bake", "recipes"):
        assert "\nOptions:\n" not in text
        groups = (
            r"\nThe network:\n  --num-classes N  .*\n\nOutput:\n.*--json .*\n  -h, --help .*\n$"
        )
        assert re.search(groups, text, re.DOTALL)


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
    assert sorted(item.value if item.type == "plain" else item.type for item in found) == sorted(
        expected
    )


def test_retrofit_and_help_and_the_shells_completion_import_nothing_heavy() -> None:
    """What takes a second to import would show in a help that answers in 0.3 s."""
    heavy = {"torch", "timm", "torchvision", "rich", "numpy", "safetensors", "onnx", "matplotlib"}
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
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


NET, DATA = "net.safetensors", "--data-dir pictures"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("convert", 2, "Missing argument 'MODEL'; see main convert --help$"),
        (
            "convert resnet18 --to bn2",
            2,
            "'bn2' is not one of 'frozen'.*; see main convert --help$",
        ),
        (
            "convert resnet18 --to bnn --model-kwargs depth",
            2,
            "'depth' is not of the form key=value; see main convert",
        ),
        (
            "evaluate resnet18 --data-dir . -b 0",
            2,
            "--batch-size': 0 is not in the range.*; see main evaluate --help$",
        ),
        ("bench test_resnet --rounds 1000000000", 2, "is not in the range 3<=x<=10000"),
        (
            "evaluate resnet18 --attack pgd --eps 4/0",
            2,
            "'4/0' is no number such as 4/255; see main evaluate",
        ),
        (f"bake {NET}", 2, "--calibrate"),
        (f"bake {NET} --calibrate absent", 1, "absent"),
        (f"bake {NET} --calibrate pictures -o {NET}", 1, "--force"),
        ("bench test_resnet", 2, "--against"),
        ("bench test_resnet --against test_resnet", 2, "against itself"),
        ("bench test_resnet --against net.onnx", 2, "compare two of a kind"),
        ("bench test_resnet --against test_vit --amp-dtype bfloat16", 2, "give --amp too"),
        (
            "bench test_resnet --against test_vit --runtime openvino",
            2,
            "--runtime runs exported files",
        ),
        ("bench test_resnet --device abacus", 2, "cannot use --device abacus"),
        ("bench test_resnet --against test_vit --device meta", 2, "cannot use --device meta"),
        (f"diagnose {NET} --seed 99999999999999999999 {DATA}", 2, "range 0<=x<=4294967295"),
        ("bench a.onnx", 2, "name it with --against"),
        ("bench a.onnx --against b.onnx --amp --checkpoint w.pth", 2, "drop --amp, --checkpoint"),
        ("convert test_vit --to bnn", 1, "LayerNorm is not a source of bnn; try --to lnn"),
        ("convert test_resnet --to bnn", 1, "exists; pass --force"),
        (
            "convert test_resnet --to gn --groups many",
            2,
            "--groups must be a whole number of at least 1 or auto, not 'many'",
        ),
        ("convert test_resnet --to frn-tlu --strength 0", 2, "--strength means nothing to"),
        ("convert test_resnet --to bnn -o b.safetensors --model-kwargs depht=3", 2, "depht"),
        (
            "convert no_model --to bnn -o no/a.safetensors",
            1,
            "no does not exist",
        ),  # said before it is opened
        ("convert test_resnet --to bnn -o a.pth", 2, "ends in .safetensors"),
        ("diagnose test_resnet", 2, "--data-dir"),
        (
            f"diagnose test_resnet {DATA} --checkpoint-key model",
            2,
            "--checkpoint-key says .* give --checkpoint FILE",
        ),
        (f"diagnose test_resnet {DATA} -o no/where", 1, "no does not exist; create it"),
        (
            f"evaluate test_resnet {DATA} --pretrained --checkpoint w.pth",
            2,
            "--pretrained and --checkpoint are two",
        ),
        (f"evaluate test_resnet {DATA} --runtime openvino", 2, "--runtime runs exported files"),
        (
            f"evaluate test_resnet {DATA} --attack pgd --eps 4",
            2,
            "--eps must lie .* at most 1, not 4; 4/255",
        ),
        (f"evaluate test_resnet {DATA} --attack pgd --eps 0", 2, "--eps must lie above 0 "),
        (
            f"evaluate net.onnx {DATA} --device cuda --amp",
            2,
            "gives no gradients; drop --device, --amp",
        ),
        (
            f"evaluate net.onnx {DATA} --checkpoint w.pth --attack pgd",
            2,
            "drop --checkpoint, --attack",
        ),
        (f"evaluate text.onnx {DATA}", 1, "text.onnx is not an ONNX file"),
        ("inspect text.onnx", 2, "no artifact; .* and a file of weights as its checkpoint"),
        (
            f"export {NET} --report net.html",
            2,
            "a report is a .json file, not net.html; give --report a name that",
        ),
        (f"export {NET} -o {NET} --force", 2, "ends in .onnx"),  # would have replaced the network
        (f"export {NET} --half --int8", 2, "choose one"),
        (f"export {NET} --degree 3", 2, "--degree is that of approximations; add --fold poly"),
        ("finetune", 2, "there is no network to train"),
        (f"finetune {NET}", 2, "nothing to read images from; give --data-dir or --dataset"),
        (
            f"finetune {NET} {DATA} -o pictures",
            1,
            "pictures exists; give another --output, .* by --resume",
        ),
        (f"finetune {NET} --lr -1 --opt sdg --epochs x", 2, "3 mistakes in the settings"),
        (f"finetune {NET} {DATA} --device tpu", 2, "cannot use --device tpu"),
        (f"finetune {NET} {DATA} --log-with nothing", 2, "--log-with nothing is no tracker"),
        ("finetune --resume nowhere", 1, "no run to resume in nowhere"),
        ("finetune --resume pictures --lr 1 --momentum 0", 2, "drop --lr, --momentum"),
        (f"finetune {NET} --resume pictures -o out", 2, "drop MODEL, --output"),
        (f"finetune test_resnet {DATA} --teacher source", 1, "cannot teach"),
        (f"finetune {NET} {DATA} --match order", 2, "drop --match"),
        (f"finetune test_vit {DATA} --img-size 9", 1, "; give another --img-size"),
        ("inspect test_resnet --skip bn1", 2, "--skip belongs to a conversion; give --to"),
        ("inspect .", 2, ". is no network's name and no artifact"),
    ],
)
def test_a_refusal_is_a_line_and_a_code(
    run: Run, here: Path, artifact: str, words: str, code: int, said: str
) -> None:
    write_folder(here / "pictures", wrong=0, each=2)
    for name in ("there.txt", "text.onnx", "mine.onnx", "test_resnet-bnn.safetensors"):
        Path(name).write_text("mine")
    before = {path: path.is_file() and path.read_bytes() for path in here.rglob("*")}
    result = run(*words.split())
    assert result.exit_code == code, result.stderr
    line = complaint(result)
    assert re.search(said, line)
    assert set(FLAG.findall(line)) <= {"--help", *flags_of(words.partition(" ")[0])}
    assert all(
        quoted.startswith("retrofit") for quoted in re.findall("`(.*?)`", line)
    )  # and no Python argument
    assert {path: path.is_file() and path.read_bytes() for path in here.rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["evaluate", "resnet18", "--runtime"], "main evaluate --help"),
        (["inspect", "resnet18", "--model-kwargs"], "main inspect --help"),
    ],
)
def test_a_value_of_any_length_is_one_short_line(run: Run, words: list[str], ends: str) -> None:
    line = complaint(run(*words, "x" * 100_000))
    assert len(line) <= 2000
    assert line.endswith(ends)


OUTCOMES = [
    (RetrofitError("it broke; mend it"), 1, "error: it broke; mend it"),
    (UsageError("bad word; use a good one"), 2, "error: bad word; use a good one"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (click.UsageError("no such word."), 2, "error: no such word; see main inspect --help"),
    (OSError(5, "Input/output error", "f"), 1, "error: [Errno 5] Input/output error: 'f'; check"),
    (
        ValueError("first\nsecond"),
        1,
        "error: unexpected ValueError: first second; RETROFIT_DEBUG=1",
    ),
    (SystemExit(143), 143, ""),
]


@pytest.mark.parametrize(("raised", "code", "line"), OUTCOMES)
@pytest.mark.parametrize("debug", [False, True])
def test_every_exception_becomes_a_line_and_a_code(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    code: int,
    line: str,
    debug: bool,
) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr(main, "get_command", lambda *_: click.Command("inspect", callback=fail))
    if debug:
        monkeypatch.setenv("RETROFIT_DEBUG", "1")
    result = run("inspect")
    assert result.exit_code == code
    written = result.stderr.strip().splitlines()
    assert "".join(written[-1:]).startswith(line)
    assert ("Traceback" in result.stderr) is (debug and code != 143)
    assert debug or len(written) <= 1


def test_an_option_that_goes_is_taken_with_a_warning(run: Run) -> None:
    result = run("export", "absent.safetensors", "--for", "openvino")
    assert "--for has no effect and will go" in result.stderr
    assert "absent.safetensors" in complaint(result)


def test_recipes_are_listed_shown_and_copied(run: Run) -> None:
    assert re.search(r"^digits +\w", done(run("recipes")).stdout, re.MULTILINE)
    done(run("recipes", "copy", "digits", "mine.yaml"))
    assert Path("mine.yaml").read_text() == done(run("recipes", "show", "digits")).stdout != ""
    assert "mine.yaml exists; pass --force" in complaint(
        run("recipes", "copy", "digits", "mine.yaml")
    )


def test_python_dash_m(start: Start) -> None:
    with start("frobnicate") as process:
        said = process.communicate()
    assert (process.returncode, *said) == (
        2,
        "",
        "error: there is no command 'frobnicate'; see retrofit --help\n",
    )


def test_a_bare_call_shows_help_and_no_error(run: Run) -> None:
    assert retrofit.__version__ in done(run("--version")).stdout
    assert "did you mean convert?" in complaint(run("convertt", "resnet18"))
    result = run()
    assert (result.exit_code, result.stderr[:7], "error:" in result.stderr) == (2, "Usage: ", False)


@pytest.mark.slow
def test_ctrl_c_in_the_middle_leaves_nothing(start: Start) -> None:
    with start("convert", "resnet152", "--to", "bnn") as process:
        assert process.stderr.readline().startswith(
            "weights: RANDOM"
        )  # the check of the source comes next
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert (process.returncode, "Traceback" in said, os.listdir()) == (130, False, [])


@pytest.mark.slow
def test_a_closed_pipe_is_no_error_of_ours(start: Start) -> None:
    with start("inspect", "test_resnet", "--json") as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, "Traceback" in said, "BrokenPipe" in said) == (1, False, False)


# --- a network of one's own

NETWORK = ("--network", "py:userfile:small")
PICTURES = ("--data-dir", "pictures", "-j", "0")


@pytest.fixture
def converted(run: Run, pictures: Path) -> str:
    """The artifact of a converted classifier whose file lies in the working folder, with pictures
    for it.
    """
    shutil.copy(mynet.__file__, "userfile.py")
    result = run("convert", "py:userfile:small", "--to", "bnn", "--json")
    values = answer(result)
    assert (values["model"], values["library"]) == ("userfile:small", "own")
    assert result.stderr.splitlines()[-1].startswith(
        "next: retrofit evaluate userfile-small-bnn.safetensors --network"
    )
    return str(values["output"])


def test_every_command_takes_it(run: Run, converted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "retrofit.diagnose.report_folder.write_report", lambda *_: {}
    )  # painting takes longest
    few = ("-b", "2", "--rounds", "3", "--mode", "eval")
    for words in (
        ("inspect", "py:userfile:small", "--to", "gn"),
        ("inspect", converted, *NETWORK),
        ("evaluate", converted, *NETWORK, *PICTURES),
        ("evaluate", "py:userfile:small", *PICTURES),
        (
            "diagnose",
            converted,
            *NETWORK,
            "--against",
            "py:userfile:small",
            *PICTURES[:2],
            "--images",
            "4",
        ),
        ("bench", converted, *NETWORK, *few),
        ("bench", "py:userfile:small", "--against", converted, *NETWORK, *few),
    ):
        result = run(*words)
        assert result.exit_code == 0, (words, result.stderr)
        if converted in words and words[0] != "inspect":
            assert (
                "strength: 0 in 1 converted layer (0 is the source, 1 the target)" in result.stderr
            )
    again = run(
        "convert", converted, *NETWORK, "--to", "bnn", "--from", "bn", "-o", "again.safetensors"
    )
    assert "nothing to convert" in complaint(again)


def test_a_file_alone_imports_nothing(run: Run, converted: str) -> None:
    Path("userfile.py").write_text("raise SystemExit('imported')")
    whose = "holds a network of one's own, py:userfile:small; say what builds it with --network py:MODULE:CALLABLE"
    for command in ("inspect", "export", "bench"):
        assert whose in complaint(run(command, converted))
    Path("mine.yaml").write_text("model: py:userfile:small\ndata_dir: pictures\nepochs: 1\n")
    said = complaint(run("finetune", "--recipe", "mine.yaml"))
    assert "no recipe may have py:userfile:small imported; give it as MODEL yourself" in said


def test_finetune_and_resume(run: Run, converted: str) -> None:
    words = [*PICTURES, "--val-split", "0.25", "--epochs", "1", "-b", "4", "--device", "cpu"]
    done(run("finetune", converted, *NETWORK, *words, "-o", "run", "--num-classes", "5"))
    best = retrofit.load("run/best.safetensors", into=mynet.small(5))
    assert best(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    done(run("evaluate", "run/best.safetensors", *NETWORK, *PICTURES))
    assert "holds a network of one's own" in complaint(run("finetune", "--resume", "run"))
    done(run("finetune", "--resume", "run", *NETWORK))


TWO = """
from torch import nn
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
    def forward(self, x, mask):
        return self.norm(self.conv(x) * mask)
"""


def test_a_network_of_two_inputs_is_compared_on_those_of_a_file(run: Run) -> None:
    Path("two.py").write_text(TWO)
    save_file({"mask": torch.ones(2, 1, 6), "x": torch.randn(2, 4, 6)}, "inputs.safetensors")
    words = ("convert", "py:two:Two", "--to", "ln", "--json")
    assert re.search("\nnote: not checked: .*--inputs", run(*words).stderr)
    checked = run(*words, "--inputs", "inputs.safetensors", "--force")
    assert answer(checked)["check"]["passed"]
    assert "check passed" in checked.stderr
    export = ("export", "two-Two-ln.safetensors", "--network", "py:two:Two", "-o", "two.onnx")
    assert "--inputs" in complaint(run(*export))
    assert answer(run(*export, "--inputs", "inputs.safetensors", "--json"))["parity"]["passed"]
    shape_beyond_torch(Path("odd.safetensors"))
    Path("none.safetensors").write_bytes(b"")
    for name in ("odd.safetensors", "none.safetensors"):
        refused = run(*words, "--inputs", name, "--force")
        assert f"{name} holds no example inputs" in complaint(refused)
    os.mkfifo("pipe.safetensors")
    refused = run(*words, "--inputs", "pipe.safetensors", "--force")
    assert "pipe.safetensors is a pipe or a device" in complaint(refused)


# --- what people see

ROWS = [
    ("53", "BatchNorm2d", "MigratedGroupNormAct", "layer1.0.bn1 (+52)", ""),
    ("16", "ReLU", "(left)", "layer1.0.act3 (+15)", "after a residual addition"),
]


@pytest.fixture(params=[80, 120])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Console:
    terminal = Console(
        file=io.StringIO(), width=request.param, force_terminal=True, color_system=None
    )
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    return terminal


def test_a_table_fits_and_breaks_no_word(terminal: Console) -> None:
    console.show_table(("count", "found", "becomes", "names", "why"), ROWS)
    lines = terminal.file.getvalue().splitlines()
    assert max(map(len, lines)) <= terminal.width
    words = " ".join(lines).split()
    assert {"BatchNorm2d", "after", "residual", "addition"} <= set(words)
    assert sum(word.startswith("Migrate") for word in words) == 1
    assert ("MigratedGroupNormAct" in words) == (terminal.width == 120)


def test_a_few_names_and_how_many_more() -> None:
    assert console.names("abcd") == "a, b, ... (2 more)"
    assert console.names("ab") == "a, b"


@pytest.mark.parametrize("text", ["opening x[/bold]", "opening [red]x"])
def test_a_name_with_brackets_is_shown_as_it_is(terminal: Console, text: str) -> None:
    with console.waiting(text):
        pass
    with console.progress_bar(text) as move:
        move(1, 2, "[b]")
    assert f"{text} " in terminal.file.getvalue()
    assert f"{text}: [b]" in terminal.file.getvalue()


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    log = Console(file=io.StringIO(), width=120, get_time=lambda: clock[0])
    monkeypatch.setattr(console, "stderr", lambda: log)
    with console.progress_bar("training") as move:
        for clock[0], step in ((1.0, 100), (20.0, 101), (61.0, 110), (70.0, 111)):
            move(step, 170, "epoch 1")
    assert log.file.getvalue() == "training: epoch 1, 110 of 170, 6 min left\n"


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
        *(
            ("drop `pretrained`", "drop --pretrained"),
            ("pass `pretrained=True`", "pass --pretrained"),
        ),
        ("start again with `amp=False`", "start again with --no-amp"),
        ("pass `checkpoint=FILE`", "pass --checkpoint FILE"),
        ("pass `checkpoint='a b.pth'`", "pass --checkpoint 'a b.pth'"),
        ("pass `model_kwargs={'a': 1, 'b': 'x'}`", "pass --model-kwargs a=1 --model-kwargs b=x"),
        ("`batch_size=7`, `batch_size=8`", "--batch-size 7, --batch-size 8"),
        *((text, text) for text in ("`into` and `strength=1`", "an open ` and source")),
        (
            "`retrofit convert` and `save(source='own')`",
            "`retrofit convert` and `save(source='own')`",
        ),
    ],
)
def test_arguments_become_flags(text: str, expected: str) -> None:
    with click.Context(example):
        assert in_flags(text) == expected
    assert in_flags(text) == text  # no command runs


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings of a file but its docstrings, as they are written; an f-string is one."""
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    ):
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
