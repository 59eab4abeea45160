"""What people see (stderr, through rich) and what programs read (stdout, JSON)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

_LOG_WIDTH = 120  # where stderr is no terminal, a table should not be squeezed into 80 columns
_ROWS = 16  # of a table: what is shown must not grow with the model


def _stderr() -> Console:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def say(text: str, style: str | None = None) -> None:
    """Write one line to stderr, never broken into several."""
    _stderr().print(text, style=style, soft_wrap=True)


def emit(values: dict[str, Any]) -> None:
    """Write one JSON object to stdout; NaN and infinities, which JSON does not have, become null."""
    click.echo(json.dumps(_finite(values), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Write a table to stderr; the first column holds numbers, and a column without entries is left out.

    Rows beyond a limit are counted, not shown.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    filled = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    for number in filled:
        table.add_column(columns[number], justify="left" if number else "right", overflow="fold")
    for row in rows[:_ROWS]:
        table.add_row(*(row[number] for number in filled))
    console = _stderr()
    console.print(table)
    if len(rows) > _ROWS:
        say(f"... and {len(rows) - _ROWS} more kinds; --json lists every layer")


def waiting(text: str) -> AbstractContextManager[Any]:
    """Show a spinner with `text` while something takes its time; nothing where stderr is no terminal."""
    console = _stderr()
    return console.status(text) if console.is_terminal else nullcontext()


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int | None], None] | None]:
    """Give a callback(done, total) that moves a progress bar; None where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = _stderr()
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None)

        def move(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        yield move


def names(values: Iterable[str], shown: int = 2) -> str:
    """Return the first few names and the number of the others."""
    listed = list(values)
    head = ", ".join(listed[:shown])
    return f"{head}, ... ({len(listed) - shown} more)" if len(listed) > shown else head
