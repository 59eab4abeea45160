"""Recipe files: those of the package, and others, which may come from anywhere and are read within bounds."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.text import one_line, printable, shortlist

_PACKAGE = Path(__file__).parents[1]
_MOST_BYTES = 2**14  # a recipe is a page of text


def _recipes_folder() -> Path:
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"  # beside it in a source checkout


def recipe_summaries() -> dict[str, str]:
    """Return the first comment line of each shipped recipe, by name."""
    files = sorted(_recipes_folder().glob("*.yaml"))
    return {path.stem: path.read_text().partition("\n")[0].lstrip("# ") for path in files}


def recipe_text(name: str) -> str:
    """Return a shipped recipe's text; for a name that does not exist, a UsageError shows the closest ones."""
    names = list(recipe_summaries())
    if name not in names:
        close = difflib.get_close_matches(name, names, n=2, cutoff=0.4) or names
        raise UsageError(
            f"no recipe {printable(repr(name), 100)}; did you mean {' or '.join(close)}? `retrofit recipes` lists them"
        )
    return (_recipes_folder() / f"{name}.yaml").read_text()


def recipe_settings(name: str | Path) -> dict[str, Any]:
    """Read the settings of a shipped recipe, or of a YAML file with one `name: value` a line.

    A RetrofitError says why the file cannot be read; a UsageError, that there is no such recipe, or no settings in it.
    """
    what, path = f"recipe {printable(name, 100)}", Path(name)
    if path.suffix in (".yaml", ".yml") or os.path.exists(path):
        text = _small_text(path, what)
    else:
        text = recipe_text(str(name))
    try:
        values = yaml.load(text, _SettingsLoader)
    except Exception as error:  # numbers and dates raise ValueError, and more
        raise UsageError(
            f"{what} is not YAML that can be read ({one_line(error)}); write one `name: value` a line"
        ) from error
    if values is not None and not isinstance(values, dict):
        raise UsageError(f"{what} holds no settings; write one `name: value` a line")
    return {key if isinstance(key, str) else f"<{type(key).__name__}>": value for key, value in (values or {}).items()}


def _small_text(path: Path, what: str) -> str:
    if not os.path.isfile(path):  # opening a pipe would wait for ever
        problem = "is not a regular file" if os.path.exists(path) else "is not there"
        raise RetrofitError(f"cannot read the {what}, which {problem}; check the path")
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise RetrofitError(f"{what} has {size:,} bytes, more than {_MOST_BYTES:,}; check the path")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RetrofitError(f"cannot read the {what} ({one_line(error)}); check the path") from error


class _SettingsLoader(yaml.SafeLoader):
    """Refuses a name that stands twice, and merged mappings, of which a few lines can stand for gigabytes."""

    def flatten_mapping(self, node: Any) -> None:
        """Merge nothing: the name `<<` is then one that yaml cannot construct."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            counts = Counter(str(key.value) for key, _ in node.value)
            raise yaml.YAMLError(f"it sets {shortlist([name for name in counts if counts[name] > 1])} twice")
        return mapping
