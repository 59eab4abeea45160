"""The house: imports run downwards, and no name stands for two things."""

import ast
import graphlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import retrofit

PACKAGE = Path(retrofit.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Each room may import those before it.
ROOMS = [
    {"errors"}, {"utils"}, {"registry"}, {"builtin_targets"}, {"conversion_options"}, {"record"},
    {"comparison"}, {"inputs"}, {"compare"}, {"layers"}, {"graph"}, {"surgery"}, {"running_statistics"},
    {"networks"}, {"attack", "images"}, {"evaluation"},
    {"baking", "bench", "diagnose", "export", "finetune"}, {"callbacks", "opacus", "cli"},
]  # fmt: skip
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


MODULES = {".".join(("retrofit", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
           for file in FILES}  # fmt: skip


def imported(file: Path, typing: bool = True) -> Iterator[str]:
    """Yield the dotted names of our modules that a file imports, wherever in it and in whatever
    form.

    Without `typing`, what only a type checker imports is left out.
    """
    tree = ast.parse(file.read_text())
    checked = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if node in checked and not typing:
            continue
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} imports by dots"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            ]
        for parts in (name.split(".") for name in names):
            prefixes = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
            yield from [prefix for prefix in prefixes if prefix in MODULES][:1]


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_imports_run_downwards(room: str) -> None:
    files = [file for file in FILES if room_of(file) == room]
    assert files
    for file in files:
        for name in imported(file):
            other = name.split(".")[1]
            assert other == room or FLOOR[other] < FLOOR[room], (
                f"{file.relative_to(PACKAGE)} imports {name}"
            )


def test_no_circle_between_files() -> None:
    """A package counts as its files: importing `retrofit.surgery` runs its `__init__`, which is
    left out here.
    """
    uses = {
        name: {one for one in imported(file, typing=False) if MODULES[one].stem != "__init__"}
        for name, file in MODULES.items()
    }
    graphlib.TopologicalSorter(uses).prepare()  # a CycleError lists the files


def test_every_room_has_its_floor() -> None:
    anywhere = {"__init__", "__main__"}  # the public API, imported lazily
    assert {room_of(file) for file in FILES} == {*anywhere, *FLOOR}


def test_names_of_files_and_classes_stand_once() -> None:
    files = Counter(
        file.stem for file in FILES if room_of(file) != "cli"
    )  # there, files are commands
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text()))]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    twice = {name for name, count in (files + classes).items() if count > 1}
    assert twice <= {"__init__", "Call"}  # of a network, and of an activation
