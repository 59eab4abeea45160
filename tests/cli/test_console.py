"""Tables on narrow and wide terminals, progress, and names in few characters."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from retrofit.cli import console

ROWS = [
    ("53", "BatchNorm2d", "MigratedGroupNormAct", "layer1.0.bn1 (+52)", ""),
    ("16", "ReLU", "(left)", "layer1.0.act3 (+15)", "after a residual addition"),
]


def shown(terminal: Console) -> str:
    text: str = terminal.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.fixture(params=[80, 120])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Console:
    terminal = Console(file=io.StringIO(), width=request.param, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    return terminal


def test_a_table_fits_and_breaks_no_word(terminal: Console) -> None:
    console.show_table(("count", "found", "becomes", "names", "why"), ROWS)
    lines = shown(terminal).splitlines()
    assert max(map(len, lines)) <= terminal.width
    words = " ".join(lines).split()
    assert "BatchNorm2d" in words
    assert {"after", "residual", "addition"} <= set(words)
    assert sum(word.startswith("Migrate") for word in words) == 1
    assert ("MigratedGroupNormAct" in words) == (terminal.width == 120)


def test_names_are_fewer_where_there_is_less_room(terminal: Console) -> None:
    names = console.names(["a", "b", "c", "d"])
    assert names == ("a, b, ... (2 more)" if terminal.width == 120 else "a (+3)")


@pytest.mark.parametrize("text", ["opening x[/bold]", "opening [red]x"])
def test_a_name_with_brackets_is_shown_as_it_is(terminal: Console, text: str) -> None:
    with console.waiting(text):
        pass
    with console.progress_bar(text) as move:
        move(1, 2, "[b]")
    assert f"{text} " in shown(terminal)
    assert f"{text}: [b]" in shown(terminal)


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Console(file=io.StringIO(), width=120)
    monkeypatch.setattr(console, "stderr", lambda: log)
    clock = iter([0.0, 1.0, 20.0, 61.0, 70.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress_bar("training") as move:
        for step in (100, 101, 110, 111):
            move(step, 170, "epoch 1")
    assert shown(log) == "training 110 of 170: epoch 1, 6 min left\n"
