"""The recipes that come with the package."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import retrofit
from retrofit.errors import UsageError
from retrofit.utils.text import printable

_PACKAGE = Path(retrofit.__file__).parent


def _recipes_folder() -> Path:
    """Return the folder of recipes: in the installed package, or beside it in a source checkout."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def recipe_summaries() -> dict[str, str]:
    """Return the first comment line of each shipped recipe, by name."""
    files = sorted(_recipes_folder().glob("*.yaml"))
    return {path.stem: path.read_text().partition("\n")[0].lstrip("# ") for path in files}


def recipe_text(name: str) -> str:
    """Return a shipped recipe's text.

    Raises:
        UsageError: If there is none of that name; the message shows the closest ones.
    """
    path = _recipes_folder() / f"{name}.yaml"
    if "/" in name or not os.path.isfile(path):
        known = list(recipe_summaries())
        close = difflib.get_close_matches(name, known, n=2, cutoff=0.4) or known
        raise UsageError(
            f"no recipe {printable(repr(name), 100)}; did you mean {' or '.join(close)}? `retrofit recipes` lists them"
        )
    return path.read_text()
