"""Class maps: files with one class name a line, in the order of a model's outputs."""

import os
from pathlib import Path
from typing import Any

from timm.data.readers.class_map import load_class_map

from retrofit.errors import RetrofitError
from retrofit.utils.files import ensure_readable, read_text
from retrofit.utils.text import one_line, shown

FileName = str | os.PathLike[str]
_ADVICE = "give a .txt file with one class name a line"
# ImageNet-22k's names take less than one.
_MOST_BYTES = 16 * 2**20


def read_class_map(class_map: FileName) -> dict[str, int]:
    """Return the model's output, 0 to n - 1, for each class name of a class map's file.

    Raises:
        RetrofitError: If the file cannot be read, or names and outputs are not one to one.
    """
    pairs = _class_map_entries(Path(class_map))
    outputs: dict[str, int] = {}
    free = set(range(len(pairs)))
    for name, index in pairs or [("", 0)]:
        if name == "" or name in outputs or type(index) is not int or index not in free:
            last = max(len(pairs) - 1, 0)
            raise RetrofitError(
                f"the class map {class_map} is not one to one, with output {shown(index)} for "
                f"{shown(name)}; give each output, from 0 to {last}, one name of its own"
            )
        outputs[name] = index
        free.discard(index)
    return outputs


def _class_map_entries(path: Path) -> list[tuple[Any, Any]]:
    """Return the names and outputs of a class map as they stand in the file."""
    limits: dict[str, Any] = {"most": _MOST_BYTES, "advice": _ADVICE}
    # Of a name that comes twice, timm's reader of text keeps the last.
    if path.suffix.lower() == ".txt":
        lines = read_text(path, "class map", **limits).rstrip().split("\n")
        return [(line.strip(), number) for number, line in enumerate(lines)]
    ensure_readable(path, "class map", **limits)
    try:
        return list(load_class_map(str(path)).items())
    # timm asserts, and pickle raises anything on a damaged file.
    except Exception as error:
        raise RetrofitError(
            f"cannot read the class map {path} ({one_line(error)}); {_ADVICE}"
        ) from error
