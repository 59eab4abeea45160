"""Tables on narrow and wide terminals, and names in few characters."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from retrofit.cli import console

ROWS = [
    ("53", "BatchNorm2d", "MigratedGroupNormAct", "layer1.0.bn1 (+52)", ""),
    ("16", "ReLU", "(left)", "layer1.0.act3 (+15)", "after a residual addition"),
]


@pytest.fixture(params=[80, 120])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Console:
    made = Console(file=io.StringIO(), width=request.param, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stderr", lambda: made)
    return made


def test_a_table_fits_and_breaks_no_word(terminal: Console) -> None:
    console.show_table(("count", "found", "becomes", "names", "why"), ROWS)
    lines = terminal.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= terminal.width
    words = " ".join(lines).split()
    assert "BatchNorm2d" in words
    assert {"after", "residual", "addition"} <= set(words)
    assert sum(word.startswith("Migrated") for word in words) == 1
    assert ("MigratedGroupNormAct" in words) == (terminal.width == 120)


def test_names_are_fewer_where_there_is_less_room(terminal: Console) -> None:
    shown = console.names(["a", "b", "c", "d"])
    assert shown == ("a, b, ... (2 more)" if terminal.width == 120 else "a (+3)")


@pytest.mark.parametrize("text", ["opening x[/bold]", "opening [red]x"])
def test_a_name_with_brackets_is_shown_as_it_is(terminal: Console, text: str) -> None:
    with console.waiting(text):
        pass
    with console.progress_bar(text) as move:
        assert move is not None
        move(1, 2, "[b]")
    assert f"{text} " in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert f"{text}: [b]" in terminal.file.getvalue()  # type: ignore[attr-defined]


@given(st.text(min_size=0, max_size=60), st.integers(3, 60))
def test_shortening_keeps_both_ends(text: str, width: int) -> None:
    short = console.shorten(text, width)
    assert len(short) == min(len(text), width)
    assert short == text or (text.startswith(short.split("…")[0]) and "…" in short)
