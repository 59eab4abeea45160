"""What people see (stderr, through rich) and what programs read (stdout, JSON).

The library's sentences name arguments as Python does, in backticks; what is written here names
flags.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.utils.text import ROOT, aligned, json_text, plural, printable

if TYPE_CHECKING:
    from rich.console import Console

    from retrofit.surgery import Plan

# Where stderr is no terminal, a table should not be squeezed into 80 columns.
_LOG_WIDTH = 120
# Seconds between lines of progress, where there is no terminal.
_EVERY = 30.0
# Seconds over which speed is averaged, to estimate the time that is left.
_PERIOD = 600.0
# The most rows of a table, so that it does not grow with the model.
_ROWS = 16

_ARGUMENT = re.compile(r"`([a-z]\w*)(?:=([^`]+))?`")


def in_flags(text: str) -> str:
    """Return "pass `num_classes=7`" as "pass --num-classes 7", in the flags of the command that
    runs.

    An option is named after the Python argument that it sets, so `source` is --from where a command
    declares `click.option("--from", "source")`. Names without an option are left as they are.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return text
    parameters = context.command.params
    options = {option.name: option for option in parameters}

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        option = options.get(name)
        if option is None:
            return match[0]
        return _as_typed(option, value)

    return _ARGUMENT.sub(flag, text)


def literal(text: str) -> Any:
    """Read a Python literal; anything else is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _as_typed(option: click.Parameter, text: str | None) -> str:
    """Return an option as a user types it, with a value that Python's text names; a placeholder
    (FILE) stays as is.
    """
    flag = option.opts[-1]
    if text is None:
        return flag
    value = literal(text)
    if value is True:
        return flag
    if value is False:
        return option.secondary_opts[-1]
    words = [str(value)]
    if isinstance(value, dict):
        words = [f"{key}={entry}" for key, entry in value.items()]
    return " ".join(f"{flag} {shlex.quote(word)}" for word in words)


def stderr() -> Console:
    """Return a console on stderr that writes text verbatim."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def say(text: str, style: str | None = None) -> None:
    """Write one line to stderr, never broken into several."""
    stderr().print(printable(in_flags(text)), style=style, soft_wrap=True)


def warn(text: str) -> None:
    say(f"warning: {text}", "yellow")


def warn_of_unreadable(images: Sequence[str]) -> None:
    if images:
        warn(f"{plural(len(images), 'image')} cannot be read: {names(images)}")


def say_written(path: Path) -> None:
    say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)", "bold")


def emit(values: dict[str, Any]) -> None:
    """Write one JSON object to stdout if --json is set, with the number of its schema first."""
    if click.get_current_context().meta["json"]:
        click.echo(json_text({"schema": 1, **values}))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to stderr; the first column holds numbers, and a column without entries is left
    out.

    Rows beyond a limit are counted, not shown. Where the terminal is too narrow, entries are broken
    into lines.
    """
    from rich import box
    from rich.table import Table

    filled = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    if not filled:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number in filled:
        table.add_column(columns[number], overflow="fold")
    first = table.columns[0]
    first.justify = "right"
    for row in rows[:_ROWS]:
        entries = [printable(in_flags(row[number])) for number in filled]
        table.add_row(*entries)
    stderr().print(table)
    left_out = len(rows) - _ROWS
    if left_out > 0:
        say(f"... and {left_out} more kinds; --json lists every layer")


def show_lines(rows: Sequence[tuple[str, ...]]) -> None:
    """Write rows to stderr, whole and aligned, however wide the terminal is."""
    for line in aligned([tuple(map(in_flags, row)) for row in rows]):
        say(line)


def show_plan(plan: Plan, full: bool = False) -> None:
    """Write what a plan does to the layers and to what surrounds them: a line for each if `full`,
    else for each group of those that fare alike.
    """
    if full:
        rows = (*plan.layers, *plan.edits)
        show_lines([(row.name or ROOT, row.source, row.fate, row.reason) for row in rows])
        return
    groups = [
        (str(len(group)), source, fate, names(group), why)
        for (source, fate, why), group in plan.alike().items()
    ]
    show_table(("count", "found", "becomes", "names", "why"), groups)


def names(values: Iterable[str]) -> str:
    """Return the first two names, and how many others there are."""
    listed = [printable(value, 80) for value in values]
    if len(listed) > 2:
        listed[2:] = [f"... ({len(listed) - 2} more)"]
    return ", ".join(listed)


def waiting(text: str) -> AbstractContextManager[Any]:
    """Show a spinner with `text` while something takes its time; nothing where stderr is no
    terminal.
    """
    from rich.text import Text

    console = stderr()
    if not console.is_terminal:
        return nullcontext()
    return console.status(Text(printable(text)))


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[..., None]]:
    """Yield a function move(done, total, what) for a progress bar; without a terminal it writes an
    occasional line.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = stderr()
    shown = console.is_terminal
    written = console.get_time()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not shown, speed_estimate_period=_PERIOD
    ) as bar:
        task = bar.add_task(text, total=None)

        def move(done: int, total: int | None, part: str = "") -> None:
            nonlocal written
            description = text
            if part:
                description = f"{text}: {part}"
            bar.update(task, completed=done, total=total, description=description)
            now = console.get_time()
            if shown or now - written < _EVERY:
                return
            written = now
            line = f"{description}, {done} of {total or 'an unknown number'}"
            seconds = bar.tasks[0].time_remaining
            if seconds is not None:
                line += f", {seconds / 60:.0f} min left"
            say(line)

        yield move
