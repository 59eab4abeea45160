"""What the shell completes: words that are known without torch, and networks, for which timm is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

FAMILIES = ("bn", "ln", "gn", "in", "frozen-bn")
_ENOUGH = 2  # typed characters from which names of networks are worth the seconds that importing timm takes


def one_of(words: Iterable[str]) -> Completer:
    """Complete a few known words."""
    return lambda _ctx, _param, typed: _items(words, typed)


def recipe(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the recipes that come with the package, and files."""
    from retrofit.finetune.recipe_files import recipe_summaries

    return [*_items(recipe_summaries(), typed), CompletionItem(typed, type="file")]


def model(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete files, and once some of it is typed the networks of timm and, behind tv:, of torchvision."""
    return [*_items(_networks(typed), typed), CompletionItem(typed, type="file")]


def _networks(typed: str) -> list[str]:
    if len(typed) < _ENOUGH or "/" in typed:
        return []
    if typed.startswith("tv:"):
        from torchvision.models import list_models

        return [f"tv:{name}" for name in list_models()]
    from timm import list_models as timm_models

    return timm_models(f"{typed}*")


def _items(words: Iterable[str], typed: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(typed)]
