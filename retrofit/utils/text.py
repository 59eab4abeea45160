"""Text on one line: counts, lists, exceptions, JSON, and names from files (any text at all)."""

import difflib
import json
import math
import reprlib
from collections.abc import Collection, Sequence
from typing import Any

# What the root is called where it is itself a layer.
ROOT = "(the model itself)"


def printable(text: object, limit: int | None = None) -> str:
    r"""Return a text on one line, with escapes (`\n`, `\x1b`) for the characters that a terminal
    would act on.

    A text of more than `limit` characters loses its middle: names in a network differ at their
    ends.
    """
    line = str(text)
    # The text may be megabytes long: escape only what is kept.
    if limit is not None and len(line) > 2 * limit:
        line = line[:limit] + line[-limit:]
    line = "".join(map(_escaped, line))
    if limit is None or len(line) <= limit:
        return line
    tail = (limit - 3) // 2
    head = limit - 3 - tail
    return f"{line[:head]}...{line[-tail:]}"


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def shown(value: object, limit: int = 64) -> str:
    """Return a value as Python writes it, shortened, however large it is."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = limit
    try:
        return printable(brief.repr(value), limit)
    # Python refuses to print a number of thousands of digits, which a recipe may hold.
    except ValueError:
        return f"a very large {type(value).__name__}"


def one_line(error: BaseException, limit: int = 240) -> str:
    """Return an exception's message on one line of at most `limit` characters; its class where it
    has none.
    """
    message = printable(" ".join(str(error)[: 8 * limit].split())) or type(error).__name__
    if len(message) <= limit:
        return message
    # An error says the most in its first words; torch's end in addresses.
    return message[: limit - 3] + "..."


def with_class(error: BaseException, limit: int = 240) -> str:
    """Return "RuntimeError: the message", as `one_line` does; for exceptions whose message says
    little by itself.
    """
    name = type(error).__name__
    message = one_line(error, limit)
    if message == name:
        return name
    return f"{name}: {message}"


def shortlist(names: Sequence[object], most: int = 3, limit: int = 64) -> str:
    """Join the first few names, each of at most `limit` characters, and count the rest."""
    listed = ", ".join(printable(name, limit) for name in names[:most])
    if len(names) > most:
        listed += f" and {len(names) - most} more"
    return listed


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of each row of a table, its columns one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def plural(count: int, noun: str) -> str:
    """Return the count with its noun: "1 class", "2 classes"."""
    ending = "s"
    if noun.endswith("s"):
        ending = "es"
    if count == 1:
        ending = ""
    return f"{count:,} {noun}{ending}"


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return a question, in brackets, for what a word may stand for; nothing if it is like none."""
    close = difflib.get_close_matches(word[:64], known, n=2, cutoff=0.5)
    if not close:
        return ""
    return f" (did you mean {' or '.join(close)}?)"


def json_text(values: dict[str, Any]) -> str:
    """Return a JSON object on one line; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def cause_of(error: BaseException) -> str:
    """Return in one line what an error, which libraries wrap in others, comes from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return with_class(error).rstrip(".")
