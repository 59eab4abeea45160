"""Settings from a YAML file that may come from anywhere: one flat mapping, read within bounds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.text import one_line, printable, shortlist

_MOST = 2**16  # bytes: a recipe is a page of text
_EVENTS = 1000  # names, values, and the ends of lists
_DEPTH = 2  # the mapping, and lists as values


def read_text(path: Path, what: str) -> str:
    """Read a small text file.

    Raises:
        RetrofitError: If it cannot be read, is not a regular file or not UTF-8, or is too long.
    """
    name = printable(path, 200)
    if os.path.exists(path) and not os.path.isfile(path):
        raise RetrofitError(f"{what} {name} is not a regular file; give the path of a YAML file")
    try:
        if path.stat().st_size > _MOST:
            raise RetrofitError(f"{what} {name} has {path.stat().st_size:,} bytes, more than {_MOST:,}; check the path")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RetrofitError(f"cannot read the {what} {name} ({one_line(error)}); check the path") from error


def parse(text: str, what: str) -> dict[str, Any]:
    """Read the settings that a text holds.

    Nothing in it may refer to another part of it: a few lines of YAML with references stand for gigabytes.

    Args:
        text: YAML, one `name: value` a line.
        what: What the text is, for messages.

    Raises:
        UsageError: If it is not YAML, no mapping, too long or nested, holds references, or a name stands in it twice.
    """
    advice = "write one `name: value` a line"
    try:
        _check_events(text)
        node = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except Exception as error:  # numbers and dates raise ValueError, and more
        raise UsageError(f"{what} is not YAML that can be read ({one_line(error)}); {advice}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{what} holds no settings; {advice}")
    if len(values) < len(node.value):
        counts = Counter(str(key.value) for key, _ in node.value)
        twice = [name for name, count in counts.items() if count > 1]
        raise UsageError(f"{what} sets {shortlist(twice or ['a name'])} twice; keep one")
    return {_name(key): value for key, value in values.items()}


def _check_events(text: str) -> None:
    """Look through a text without building anything from it."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        if number > _EVENTS:
            raise yaml.YAMLError(f"it holds more than {_EVENTS:,} names and values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.YAMLError("it holds references, & or *")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH:
            raise yaml.YAMLError("its values are nested")


def _name(key: Hashable) -> str:
    return key if isinstance(key, str) else f"<{type(key).__name__}>"
