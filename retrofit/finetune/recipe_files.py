"""Recipe files: those of the package, and others, which may come from anywhere and are read within
bounds.
"""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from retrofit.errors import UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.images import NAMED_BY_TIMM
from retrofit.utils.files import read_text
from retrofit.utils.text import did_you_mean, one_line, plural, printable, shown

_INSTALLED = Path(__file__).parents[1] / "recipes"
# In a source checkout they lie beside the package.
_RECIPES = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "recipes"
# A recipe is a page of text.
_MOST_BYTES = 2**14
_SOURCES = frozenset({"data_dir", "dataset"})
# Characters for what is wrong with a recipe.
_LONGEST = 520


def load_recipe(name: str | Path | None, overrides: Mapping[str, Any]) -> Recipe:
    """Read a shipped recipe, a YAML file or, for None, the defaults alone.

    Args:
        name: The recipe's name or file.
        overrides: Settings by field name, which win.

    Raises:
        UsageError: If there is no such recipe; or a list of everything that is wrong with it.
        RetrofitError: If its file cannot be read.
    """
    title = "the settings"
    settings: dict[str, Any] = {}
    if name is not None:
        title = f"recipe {printable(name, 100)}"
        settings = recipe_settings(name)
    # Images come from one place: a command line's replaces the recipe's.
    if overrides.keys() & _SOURCES:
        for source in _SOURCES:
            settings.pop(source, None)
    settings.update(overrides)
    data_dir = settings.get("data_dir")
    is_dataset = _names_a_dataset(data_dir)
    if is_dataset and not settings.get("dataset"):
        settings["dataset"] = data_dir
        settings["data_dir"] = None
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        sentences = _mistakes(settings, error)
    mistakes = plural(len(sentences), "mistake")
    listed = printable(", ".join(sentences), _LONGEST)
    raise UsageError(f"{mistakes} in {title}: {listed}; change what is named")


def _names_a_dataset(path: Any) -> bool:
    return isinstance(path, str) and path.startswith(NAMED_BY_TIMM) and not os.path.exists(path)


def _mistakes(settings: dict[str, Any], error: ValidationError) -> list[str]:
    """Say everything that is wrong with settings, each mistake once."""
    problems = error.errors()
    # Contradictions show only where each value by itself is right.
    wrong_alone = {problem["loc"][0] for problem in problems if problem["loc"]}
    others = {key: value for key, value in settings.items() if key not in wrong_alone}
    try:
        Recipe.model_validate(others)
    except ValidationError as contradictions:
        problems += contradictions.errors()
    return list(dict.fromkeys(_sentence(dict(problem)) for problem in problems))


def _sentence(problem: dict[str, Any]) -> str:
    """Say what is wrong with one value."""
    key = "".join(map(str, problem["loc"][:1]))
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(key.replace("-", "_"), Recipe.model_fields)
        return f"unknown setting {shown(key)}{hint}"
    if not key:
        return str(problem["msg"]).removeprefix("Value error, ")
    rule = str(problem["msg"]).removeprefix("Input should be ").replace(";", ",")
    if problem["type"] in ("missing", "too_long"):
        rule = "two numbers"
    return f"{key} should be {printable(rule, 100)}, not {shown(problem['input'])}"


def recipe_summaries() -> dict[str, str]:
    """Return the first comment line of each shipped recipe, by name."""
    files = sorted(_RECIPES.glob("*.yaml"))
    return {path.stem: path.read_text().partition("\n")[0].lstrip("# ") for path in files}


def recipe_text(name: str) -> str:
    """Return a shipped recipe's text.

    Raises:
        UsageError: If there is none of that name; it shows the closest ones.
    """
    names = list(recipe_summaries())
    if name not in names:
        hint = did_you_mean(name, names)
        raise UsageError(f"no recipe {shown(name, 100)}{hint}; `retrofit recipes` lists them all")
    return (_RECIPES / f"{name}.yaml").read_text()


def recipe_settings(name: str | Path) -> dict[str, Any]:
    """Read the settings of a shipped recipe, or of a YAML file with one `name: value` a line.

    Raises:
        RetrofitError: If the file cannot be read.
        UsageError: If there is no such recipe, or no settings in it.
    """
    title = f"recipe {printable(name, 100)}"
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or os.path.exists(path):
        text = read_text(path, "recipe", most=_MOST_BYTES)
    else:
        text = recipe_text(str(name))
    try:
        settings = yaml.load(text, _SettingsLoader)
    # Numbers and dates raise ValueError, and more.
    except Exception as error:
        raise UsageError(
            f"{title} is not YAML ({one_line(error)}); write one `name: value` a line"
        ) from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UsageError(f"{title} holds no settings; write one `name: value` a line")
    return {
        key if isinstance(key, str) else f"<{type(key).__name__}>": value
        for key, value in settings.items()
    }


class _SettingsLoader(yaml.SafeLoader):
    """Refuses a name that stands twice, and merged mappings, of which a few lines can stand for
    gigabytes.
    """

    def flatten_mapping(self, node: Any) -> None:
        """Merge nothing: the name `<<` is then one that yaml cannot construct."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Read a mapping.

        Raises:
            YAMLError: If a name stands twice.
        """
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            names = Counter(str(key.value) for key, _ in node.value)
            ((twice, _),) = names.most_common(1)
            raise yaml.YAMLError(f"it sets {twice} twice")
        return mapping
