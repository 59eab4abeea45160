"""What the shell is told when someone presses the tab key."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from retrofit.cli import main, options
from retrofit.conversion_options import CONVERTERS
from retrofit.surgery import FAMILIES, TARGETS


def completed(*words: str) -> list[str]:
    *args, typed = words
    shell = ShellComplete(main, {}, "retrofit", "_RETROFIT_COMPLETE")
    return [item.value if item.type == "plain" else item.type for item in shell.get_completions(args, typed)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["conv"], ["convert"]),
        (["convert", "resnet18", "--to", "gn"], ["gnn", "gn", "gn-pn"]),
        (["convert", "resnet18", "--to", "bnn", "--from", "f"], ["frozen-bn"]),
        (["finetune", "net.safetensors", "--recipe", "imagenet-gn-pn"],
         ["imagenet-gn-pn-efficientnet", "imagenet-gn-pn-resnet50", "file"]),
        (["evaluate", "test_resn"], ["test_resnet", "file"]),
        (["evaluate", "tv:resnet1"], ["tv:resnet18", "tv:resnet101", "tv:resnet152", "file"]),
        (["export", "r"], ["file"]),
        (["bench", "a.safetensors", "--against", "runs/di"], ["file"]),
    ],
)  # fmt: skip
def test_words(words: list[str], expected: list[str]) -> None:
    assert sorted(completed(*words)) == sorted(expected)


def test_every_target_and_family_is_known() -> None:
    assert list(CONVERTERS) == list(TARGETS)
    assert set(options.FAMILIES) == set(FAMILIES)
