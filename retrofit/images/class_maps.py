"""Class maps: files with one class name a line, in the order of a model's outputs."""

import os
from pathlib import Path

from retrofit.errors import RetrofitError
from retrofit.utils.files import read_text
from retrofit.utils.text import shown

FileName = str | os.PathLike[str]
# ImageNet-22k's names take less than one.
_MOST_BYTES = 16 * 2**20


def read_class_map(class_map: FileName) -> dict[str, int]:
    """Return the model's output, 0 to n - 1, for each class name of a class map's file.

    Raises:
        RetrofitError: If the file cannot be read, or a name is empty or comes twice.
    """
    text = read_text(
        Path(class_map),
        "class map",
        most=_MOST_BYTES,
        advice="give a .txt file with one class name a line",
    )
    outputs: dict[str, int] = {}
    for index, line in enumerate(text.rstrip().split("\n")):
        name = line.strip()
        if not name or name in outputs:
            raise RetrofitError(
                f"the class map {class_map} has {shown(name)} on line {index + 1}; give each "
                "output, in order, one name of its own"
            )
        outputs[name] = index
    return outputs
