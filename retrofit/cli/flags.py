"""Arguments become flags: the library's sentences name them as Python does, in backticks, a command line's as it does.

An option goes by the name of the Python argument that it sets, so `source` is --from where a command declares
`click.option("--from", "source")`. What the running command has no option for stays as it is.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator

import click

_ARGUMENT = re.compile(r"`([a-z]\w*)(?:=([^`]+))?`")


def in_flags(text: str, command: click.Command | None = None) -> str:
    """Return "pass `num_classes=7`" as "pass --num-classes 7", in the flags of `command`, or of click's current one."""
    context = click.get_current_context(silent=True)
    if command is None and context is not None:
        command = context.command
    options = {} if command is None else {option.name: option for option in _options(command)}

    def flag(match: re.Match[str]) -> str:
        option = options.get(match[1])
        return match[0] if option is None else _as_typed(option, match[2])

    return _ARGUMENT.sub(flag, text)


def _options(command: click.Command) -> Iterator[click.Option]:
    """Yield the options of a command, and of those in a group."""
    yield from (one for one in command.params if isinstance(one, click.Option))
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _options(inner)


def _as_typed(option: click.Option, text: str | None) -> str:
    """Return an option as a user types it, with a value that Python's text names; a placeholder (FILE) stays a word."""
    name = max(option.opts, key=len)
    if text is None:
        return name
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if option.is_flag:
        return option.secondary_opts[0] if value is False and option.secondary_opts else name
    if isinstance(value, dict):
        return " ".join(f"{name} {shlex.quote(f'{key}={entry}')}" for key, entry in value.items())
    words = value if isinstance(value, list | tuple) else [value]
    return " ".join([name, *(shlex.quote(str(word)) for word in words)])
