"""Weights from files that others wrote: what a file holds, and which of it is taken."""

import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from retrofit.errors import RetrofitError
from retrofit.networks.load_weights import Tensors, under_prefix, weights_beside
from retrofit.utils.files import ensure_readable
from retrofit.utils.text import one_line, printable, shortlist

# Where training scripts put the weights, the averaged ones first (timm.models.load_state_dict's
# order); last, the top of the file.
_NESTS = ("state_dict_ema", "model_ema", "state_dict", "model", "")
# Levels of a file in which weights are looked for.
_DEPTH = 3
# Times that a file's content may be larger than the file: torch compresses nothing.
_GROWTH = 4
# Bytes that any file may unpack to.
_SMALL = 2**24
# What training scripts save beside the weights, by the names that pickle has for it.
_BESIDE_WEIGHTS = {
    "argparse": ("Namespace",),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": (
        "Path",
        "PosixPath",
        "PurePath",
        "PurePosixPath",
        "PureWindowsPath",
        "WindowsPath",
    ),
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
    _check_dense(file, tensors)
    unpacked = sum(tensor.nbytes for tensor in tensors.values())
    _check_growth(file, unpacked)
    return Checkpoint(
        tensors=under_prefix(prefix, tensors),
        key=f"{nest}.{prefix}".strip("."),
        others=tuple(other for other in sets if other not in ("", nest)),
        left_out=tuple(weights_beside(prefix, tensors)),
    )


def _content(file: Path) -> Any:
    """Return what a file of any kind holds."""
    if file.suffix != ".safetensors":
        return _unpickled(file)
    try:
        return load_file(file)
    # A TypeError or OverflowError: a shape that torch does not have.
    except (
        safetensors.SafetensorError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
    ) as error:
        raise RetrofitError(
            f"{file} is not a whole safetensors file ({one_line(error)}); fetch it again"
        ) from error


class _Ignored:
    """What stands for an object beside the weights: it takes any arguments and does nothing."""

    def __new__(cls, *_args: Any) -> "_Ignored":
        return super().__new__(cls)

    def __init__(self, *_args: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


@contextmanager
def _objects_ignored() -> Iterator[None]:
    """Let torch read files with objects beside the weights, none of which is made."""
    names = [f"{module}.{name}" for module, names in _BESIDE_WEIGHTS.items() for name in names]
    with torch.serialization.safe_globals([(_Ignored, name) for name in names]):
        yield


def _unpickled(file: Path) -> Any:
    """Return what torch.save wrote, without the code that may be in it."""
    try:
        with file.open("rb") as opened:
            zipped = opened.read(2) == b"PK"
        if zipped:
            # Before torch unpacks it.
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
                _check_growth(file, unpacked)
        with warnings.catch_warnings(action="ignore"), _objects_ignored():
            return torch.load(file, map_location="cpu", weights_only=True)
    except RetrofitError:
        raise
    # zipfile and torch.load raise anything on a damaged file.
    except Exception as error:
        raise RetrofitError(f"{file} {_unreadable(file, error)}") from error


def _unreadable(file: Path, error: Exception) -> str:
    """Say why torch cannot read a file."""
    if "TorchScript" in str(error):
        return "is a TorchScript archive, not a checkpoint; save the model's state_dict() instead"
    names = _python_objects(file, error)
    if names:
        return (
            f"holds Python objects ({shortlist(names)}), which could run code when loaded; "
            "save weights"
        )
    why = one_line(error, 100)
    return (
        f"is not a whole checkpoint ({why}); fetch it again, or save weights as .safetensors "
        "or .pth"
    )


def _python_objects(file: Path, error: Exception) -> list[str]:
    """Name the classes and functions in a file that torch does not load; empty if it fails
    otherwise.
    """
    if not isinstance(error, pickle.UnpicklingError):
        return []
    try:
        with _objects_ignored():
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    # It is not of the zip format.
    except Exception:
        return str(error).partition("Unsupported global: GLOBAL ")[2].split()[:1]


def _check_growth(file: Path, unpacked: int) -> None:
    size = file.stat().st_size
    if unpacked > max(_SMALL, _GROWTH * size):
        raise RetrofitError(
            f"{file} has {size:,} bytes and unpacks to {unpacked:,}; save it again, as torch does"
        )


def _check_dense(file: Path, tensors: Tensors) -> None:
    special = [
        name
        for name, tensor in tensors.items()
        if tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
    ]
    if special:
        raise RetrofitError(
            f"{len(special)} tensors of {file} are sparse, quantized, nested or without data "
            f"({shortlist(special)}); save them dense"
        )


def _weight_sets(content: Any) -> dict[str, dict[str, Tensor]]:
    """Return the mappings in a file that hold named tensors, by the keys that lead to them.

    Each comes once, those near the top first.
    """
    sets: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    level = [("", content)]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for nest, value in level:
            if not isinstance(value, Mapping) or id(value) in seen:
                continue
            seen.add(id(value))
            named = {name: entry for name, entry in value.items() if isinstance(name, str)}
            tensors = {name: entry for name, entry in named.items() if isinstance(entry, Tensor)}
            if tensors:
                sets[nest] = tensors
            below += [(f"{nest}.{name}".strip("."), entry) for name, entry in named.items()]
        level = below
    return sets


def _choose(sets: Mapping[str, Tensors], key: str | None, path: str | Path) -> tuple[str, str]:
    """Return the nest of the weights to take, and the prefix of their names if the key is one."""
    usual = [nest for nest in _NESTS if nest in sets]
    if not usual and len(sets) == 1:
        usual = [*sets]
    if key is not None:
        nests = (*usual[:1], *sets)
        return _chosen_by_key(sets, key, nests, path)
    if not usual:
        raise RetrofitError(
            f"{path} holds several sets of weights ({_listed(sets)}); choose with "
            "`checkpoint_key=NAME`"
        )
    return usual[0], ""


def _chosen_by_key(
    sets: Mapping[str, Tensors], key: str, nests: Iterable[str], path: str | Path
) -> tuple[str, str]:
    """Return the nest that a key names, or the first that holds names with the key as prefix."""
    key = key.strip(".")
    if key in sets:
        return key, ""
    for nest in nests:
        # The key may begin with the nest: "state_dict.teacher".
        prefix = f"{key}.".removeprefix(f"{nest}.")
        if any(name.startswith(prefix) for name in sets[nest]):
            return nest, prefix
    raise RetrofitError(
        f"{path} holds no weights under {printable(key, 64)!r} (it holds {_listed(sets)}); give "
        "`checkpoint_key` one of these, or how the names of the weights begin"
    )


def _listed(sets: Mapping[str, Tensors]) -> str:
    return shortlist([nest or "weights at its top" for nest in sets], most=6)
