"""Weights from files that others wrote: what a file holds, and which of it is taken."""

import re
import warnings
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from retrofit.errors import RetrofitError
from retrofit.networks.load_weights import Tensors, under_prefix, weights_beside
from retrofit.utils.files import ensure_readable
from retrofit.utils.text import printable, shortlist, with_class

# Where training scripts put the weights, the averaged ones first (timm.models.load_state_dict's
# order); last, the top of the file.
_NESTS = ("state_dict_ema", "model_ema", "state_dict", "model", "")
# Times that a file's content may be larger than the file: torch compresses nothing.
_GROWTH = 4
# Bytes that any file may unpack to.
_SMALL = 2**24
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
# What training scripts save beside the weights, by the names that pickle has for it.
_BESIDE_WEIGHTS = {
    "argparse": ("Namespace",),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights out of a file.

    Attributes:
        tensors: The weights, by name.
        key: Where in the file they lie, "state_dict_ema", say; empty for its top.
        others: Where other sets of weights lie.
        left_out: Names beside the weights, where `key` chose what follows a prefix.
    """

    tensors: dict[str, Tensor]
    key: str = ""
    others: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def read_checkpoint(path: str | Path, key: str | None = None) -> Checkpoint:
    """Read the tensors of a safetensors file, or of what torch.save wrote, without executing
    anything from it.

    Nested training checkpoints are opened as timm opens them: averaged weights before plain ones.

    Args:
        path: The file.
        key: Which of several sets of weights to take: a key ("model_ema"; dots lead further down),
            or how the names of the weights begin ("teacher", for "teacher.conv1.weight").

    Raises:
        RetrofitError: If there is no such file, or it holds no weights that can be read, or several
            sets of them and no `key` that says which.
    """
    file = ensure_readable(path, "checkpoint file")
    sets = _weight_sets(_content(file))
    if not sets:
        raise RetrofitError(
            f"there are no tensors in {path}; give a checkpoint with a model's state_dict"
        )
    nest, prefix = _choose(sets, key, path)
    tensors = sets[nest]
    return Checkpoint(
        tensors=under_prefix(prefix, tensors),
        key=f"{nest}.{prefix}".strip("."),
        others=tuple(other for other in sets if other not in ("", nest)),
        left_out=tuple(weights_beside(prefix, tensors)),
    )


class _Ignored:
    """What stands for an object beside the weights: it takes any arguments and does nothing."""

    def __new__(cls, *_args: Any) -> "_Ignored":
        return super().__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        pass


def _content(file: Path) -> Any:
    """Return what a file of any kind holds, without the code that may be in it."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if zipfile.is_zipfile(file):
            check_zip(file)
        names = [f"{module}.{name}" for module, names in _BESIDE_WEIGHTS.items() for name in names]
        ignored = torch.serialization.safe_globals([(_Ignored, name) for name in names])
        with warnings.catch_warnings(action="ignore"), ignored:
            return torch.load(file, map_location="cpu", weights_only=True)
    # safetensors, zipfile and torch.load raise anything on a damaged file.
    except Exception as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused:
            raise RetrofitError(
                f"{file} holds Python objects ({printable(refused[1], 64)}), which could "
                "run code when loaded; save weights"
            ) from error
        raise RetrofitError(
            f"{file} is not a whole checkpoint ({with_class(error, 100)}); fetch it again, or save "
            "weights as .safetensors or .pth"
        ) from error


def check_zip(file: Path) -> None:
    """Raise ValueError for a zip file that would fill the memory when torch unpacks it, or whose
    bytes have changed: torch compares no checksums.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        if unpacked > max(_SMALL, _GROWTH * file.stat().st_size):
            raise ValueError(f"it unpacks to {unpacked:,} bytes, far more than it has")
        damaged = None
        # torch can be told to write no checksums; they are 0 then.
        if any(entry.CRC for entry in entries):
            damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} in it is wrong")


def _weight_sets(content: Any) -> dict[str, dict[str, Tensor]]:
    """Return the mappings in a file that hold named tensors, by the keys that lead to them.

    Each comes once, those near the top first.
    """
    sets: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    places = deque([("", content)])
    while places:
        nest, value = places.popleft()
        if not isinstance(value, Mapping) or id(value) in seen:
            continue
        seen.add(id(value))
        named = {name: entry for name, entry in value.items() if isinstance(name, str)}
        tensors = {name: entry for name, entry in named.items() if isinstance(entry, Tensor)}
        if tensors:
            sets[nest] = tensors
        places += [(f"{nest}.{name}".strip("."), entry) for name, entry in named.items()]
    return sets


def _choose(sets: Mapping[str, Tensors], key: str | None, path: str | Path) -> tuple[str, str]:
    """Return where the weights to take lie, and what their names begin with if the key says so."""
    usual = [nest for nest in _NESTS if nest in sets]
    if len(sets) == 1:
        usual = [*sets]
    if key is None and usual:
        return usual[0], ""
    key = (key or "").strip(".")
    for nest, prefix in _places(key, (*usual, *sets)):
        if any(name.startswith(prefix) for name in sets.get(nest, ())):
            return nest, prefix
    nests = shortlist([*map(repr, sets)], most=6)
    raise RetrofitError(
        f"{path} holds several sets of weights, or none of that name ({nests}); give "
        "`checkpoint_key` one of these, or how the names of the weights begin"
    )


def _places(key: str, nests: Iterable[str]) -> list[tuple[str, str]]:
    """Return the places that a key may mean: a nest, and what the names in it begin with."""
    places = [(key, "")]
    for nest in nests:
        # The key may begin with the nest: "state_dict.teacher".
        prefix = f"{key}.".removeprefix(f"{nest}.")
        places.append((nest, prefix))
    return places
