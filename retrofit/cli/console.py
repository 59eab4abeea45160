"""What people see (stderr, through rich) and what programs read (stdout, JSON)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import click

from retrofit.cli.flags import in_flags
from retrofit.utils.text import json_text, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_LOG_WIDTH = 120  # where stderr is no terminal, a table should not be squeezed into 80 columns
_GAP = 3  # between two columns of a table
_WIDE = 100  # a terminal that has room for long lines
_NARROW = 14  # a column is not made narrower than that,
_SENTENCE = 16  # and one of sentences than that
_EVERY = 30.0  # seconds between lines of progress, where there is no terminal
_ROWS = 16  # of a table: what is shown must not grow with the model


def stderr() -> Console:
    """Return a console on stderr that writes what it is given as it is."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def say(text: str, style: str | None = None) -> None:
    """Write one line to stderr, never broken into several."""
    stderr().print(printable(in_flags(text)), style=style, soft_wrap=True)


def emit(values: dict[str, Any]) -> None:
    """Write one JSON object to stdout."""
    click.echo(json_text(values))


def show_table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Write a table to stderr; the first column holds numbers, and a column without entries is left out.

    Rows beyond a limit are counted, not shown. Where the terminal is too narrow, the last column is broken between
    words if it holds sentences, and entries of the others are shortened in their middle.
    """
    from rich import box
    from rich.table import Table

    console = stderr()
    filled = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    shown = [[in_flags(row[number]) for number in filled] for row in rows[:_ROWS]]
    widths = _fit([columns[number] for number in filled], shown, console.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, number in enumerate(filled):
        table.add_column(columns[number], justify="left" if place else "right", no_wrap=place < len(filled) - 1)
    for row in shown:
        *cells, last = (shorten(cell, width) for cell, width in zip(row, widths, strict=True))
        table.add_row(*cells, row[-1] if " " in row[-1] else last)
    console.print(table)
    if len(rows) > _ROWS:
        say(f"... and {len(rows) - _ROWS} more kinds; --json lists every layer")


def show_lines(rows: Sequence[tuple[str, ...]]) -> None:
    """Write rows to stderr, whole and aligned, however wide the terminal is."""
    rows = [tuple(map(in_flags, row)) for row in rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` characters, its middle left out."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def _fit(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return how wide each column may be, so that all of them and the gaps between them fit: the widest gives first."""
    widths = [
        max(len(column), *(len(row[place]) for row in rows)) if rows else len(column)
        for place, column in enumerate(columns)
    ]
    room = width - _GAP * len(columns)
    if sum(widths) > room and any(" " in row[-1] for row in rows):
        widths[-1] = max(room - sum(widths[:-1]), _SENTENCE)  # is broken into lines
    while sum(widths) > room and (widest := max(widths)) > _NARROW:
        widths[widths.index(widest)] -= 1
    return widths


def waiting(text: str) -> AbstractContextManager[Any]:
    """Show a spinner with `text` while something takes its time; nothing where stderr is no terminal."""
    from rich.text import Text

    console = stderr()
    return console.status(Text(printable(text))) if console.is_terminal else nullcontext()


def bar_on(console: Console) -> Progress:
    """Return a progress bar that is gone when it is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


class ProgressCallback(Protocol):
    """What moves a progress bar: how much is done, of how much, and of what."""

    def __call__(self, done: int, total: int | None, what: str = "") -> None:
        """Move it."""


@contextmanager
def progress_bar(text: str, lines: bool = False) -> Iterator[ProgressCallback | None]:
    """Give what moves a progress bar. Without a terminal None; with `lines` what writes lines."""
    console = stderr()
    if not console.is_terminal:
        yield _lines(text) if lines else None
        return
    with bar_on(console) as bar:
        task = bar.add_task(text, total=None)

        def move(done: int, total: int | None, what: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{text}: {what}" if what else text)

        yield move


def _lines(text: str) -> ProgressCallback:
    """Return what writes a line of progress every `_EVERY` seconds."""
    written = time.monotonic()

    def move(done: int, total: int | None, what: str = "") -> None:
        nonlocal written
        if time.monotonic() - written > _EVERY:
            written = time.monotonic()
            say(f"{text}: {what} {done}" + ("" if total is None else f" of {total}"))

    return move


def names(values: Iterable[str]) -> str:
    """Return the first names, two where there is room for them, and the number of the others."""
    listed = list(values)
    if stderr().width < _WIDE and len(listed) > 1:
        return f"{listed[0]} (+{len(listed) - 1})"
    shown = 2
    head = ", ".join(printable(value, 80) for value in listed[:shown])
    return f"{head}, ... ({len(listed) - shown} more)" if len(listed) > shown else head
