"""The house: imports run downwards, and no name stands for two things."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import retrofit

PACKAGE = Path(retrofit.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Each room may import those before it.
ROOMS = [
    {"errors", "version"},
    {"utils"},
    {"record"},
    {"inputs"},
    {"compare"},
    {"layers"},
    {"conversion_options"},  # names types of the layers; imports none of them at run time
    {"graph"},
    {"surgery"},
    {"networks"},
    {"images"},
    {"evaluation"},
    {"bench", "diagnose", "export", "finetune"},
    {"callbacks", "opacus", "cli"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
ANYWHERE = {"__init__", "__main__"}  # the public API, imported lazily


def imported(file: Path) -> Iterator[str]:
    """Yield the dotted names of ours that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("retrofit."):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("retrofit."))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_imports_run_downwards(room: str) -> None:
    files = [file for file in FILES if room_of(file) == room]
    assert files
    for file in files:
        for name in imported(file):
            other = name.split(".")[1]
            assert other == room or FLOOR[other] < FLOOR[room], f"{file.relative_to(PACKAGE)} imports {name}"


def test_every_room_has_its_floor() -> None:
    assert {room_of(file) for file in FILES} - ANYWHERE == set(FLOOR)


def test_the_top_is_empty_but_for_a_few_files() -> None:
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 9


def test_a_file_name_stands_once() -> None:
    counted = Counter(file.stem for file in FILES if room_of(file) != "cli")  # there, files are commands
    assert {name for name, count in counted.items() if count > 1} == {"__init__"}


def test_a_class_name_stands_once() -> None:
    counted = Counter(
        node.name for file in FILES for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in counted.items() if count > 1} <= {"Call"}  # of a network, and of an activation
