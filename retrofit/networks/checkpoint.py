"""Weights from files that others wrote: what a file holds, and which of it is taken."""

from __future__ import annotations

import argparse
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrofit.errors import RetrofitError
from retrofit.utils.text import one_line, printable, shortlist

# Where training scripts put the weights, the averaged ones first (timm.models.load_state_dict's order).
_NESTS = ("state_dict_ema", "model_ema", "state_dict", "model")
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and AveragedModel, and of torch.compile
_COUNTERS = {"num_batches_tracked", "n_averaged"}  # BatchNorm's and AveragedModel's: no weights
_DEPTH = 3  # levels of a file in which weights are looked for
_GROWTH = 4  # times that a file's content may be larger than the file: torch compresses nothing
_SMALL = 2**24  # bytes that any file may unpack to
_DAMAGED = "is not a whole checkpoint that torch can read; fetch or save it again"


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights out of a file.

    Attributes:
        path: The file.
        tensors: The weights by name.
        key: Where in the file they lie, "state_dict_ema", say; empty for the top of the file.
        others: Where other sets of weights lie.
        left_out: Names beside the weights, where `key` chose what follows a prefix.
    """

    path: str
    tensors: dict[str, Tensor]
    key: str = ""
    others: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def read_checkpoint(path: str | Path, key: str | None = None) -> Checkpoint:
    """Read the tensors of a checkpoint, without executing anything from it.

    Nested training checkpoints are opened as timm opens them: averaged weights before plain ones. The prefixes of
    DistributedDataParallel and torch.compile are removed.

    Args:
        path: A .safetensors file, or what torch.save wrote (.pth, .pt, .bin, .tar, ...).
        key: Which weights, where the file holds several: a key ("model_ema"; dots lead further down), or how the
            names of the weights begin ("teacher", for "teacher.conv1.weight").

    Raises:
        RetrofitError: If the file is missing, a folder, damaged, unpacks to far more than its size, holds more than
            weights, no tensor, tensors that are not dense, several sets of weights, or none at `key`.
    """
    file = Path(path)
    if file.is_dir():
        raise RetrofitError(f"{path} is a folder; name the checkpoint file in it")
    if not file.is_file():
        raise RetrofitError(f"there is no checkpoint at {path}; check the path")
    if file.suffix in {".npz", ".npy"}:
        raise RetrofitError(f"{path} is a NumPy file; give a .safetensors, .pth, .pt or .bin checkpoint")
    content = _safetensors(file) if file.suffix == ".safetensors" else _pickle(file)
    sets = _sets(content)
    if not sets:
        raise RetrofitError(f"there are no tensors in {path}; give a checkpoint with a model's state_dict")
    nest, prefix = _chosen(sets, key, path)
    tensors = _dense(sets[nest], file)
    left_out: tuple[str, ...] = ()
    if prefix:
        left_out = tuple(name for name in tensors if not name.startswith(prefix) and not is_counter(name))
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    others = tuple(other for other in sets if other not in ("", nest))
    chosen = f"{nest}.{prefix}".strip(".") if prefix else nest
    return Checkpoint(str(path), _unwrapped(tensors), chosen, others, left_out)


def is_counter(name: str) -> bool:
    """Whether a tensor counts something, and is no weight."""
    return name.rpartition(".")[2] in _COUNTERS


def _safetensors(file: Path) -> dict[str, Tensor]:
    import safetensors
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise RetrofitError(f"{file} is not a whole safetensors file ({one_line(error)}); fetch it again") from error


def _pickle(file: Path) -> Any:
    _check_zip(file)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises anything on a damaged file
        what = _DAMAGED
        if isinstance(error, pickle.UnpicklingError) and (named := _forbidden(file, str(error))):
            what = f"holds Python objects ({named}), not only weights, and loading them could run code; save weights"
        elif "TorchScript" in str(error):
            what = "is a TorchScript archive, not a checkpoint; save the model's state_dict() instead"
        raise RetrofitError(f"{file} {what}") from error


def _check_zip(file: Path) -> None:
    """Refuse an archive that unpacks to far more than its size, before torch unpacks it."""
    with file.open("rb") as opened:
        if opened.read(2) != b"PK":
            return
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # zipfile raises anything on a damaged archive
        raise RetrofitError(f"{file} {_DAMAGED}") from error
    _check_growth(file, unpacked)


def _check_growth(file: Path, unpacked: int) -> None:
    size = file.stat().st_size
    if unpacked > max(_SMALL, _GROWTH * size):
        raise RetrofitError(
            f"{file} has {size:,} bytes and unpacks to {unpacked:,}, which no checkpoint does; save it again"
        )


def _forbidden(file: Path, said: str) -> str:
    """Name the Python objects that kept a checkpoint from loading; empty if that was not the reason."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # not the zip format
        _, found, rest = said.partition("Unsupported global: GLOBAL ")
        names = rest.split()[:1] if found else []
    return shortlist(names)


def _sets(content: Any) -> dict[str, Mapping[Any, Any]]:
    """Find the mappings that hold tensors, by the keys that lead there; each once, those near the top first."""
    found: dict[str, Mapping[Any, Any]] = {}
    level, seen = [("", content)], set()
    for _ in range(_DEPTH):
        below = []
        for nest, value in level:
            if not isinstance(value, Mapping) or id(value) in seen:
                continue
            seen.add(id(value))
            if any(isinstance(entry, Tensor) for entry in value.values()):
                found[nest] = value
            below += [(f"{nest}.{key}".strip("."), entry) for key, entry in value.items() if isinstance(key, str)]
        level = below
    return found


def _chosen(sets: Mapping[str, Mapping[Any, Any]], key: str | None, path: str | Path) -> tuple[str, str]:
    """Return the nest of the weights to take, and how their names begin, where the key says that."""
    usual = next((nest for nest in (*_NESTS, "") if nest in sets), None)
    if usual is None and len(sets) == 1:
        usual = next(iter(sets))
    held = shortlist([nest or "weights at its top" for nest in sets], most=6)
    if key is None:
        if usual is None:
            raise RetrofitError(f"{path} holds several sets of weights ({held}); choose with `checkpoint_key=NAME`")
        return usual, ""
    key = key.strip(".")
    if key in sets:
        return key, ""
    for nest in sets if usual is None else (usual, *sets):
        prefix = key.removeprefix(f"{nest}.") if nest else key
        if prefix and any(isinstance(name, str) and name.startswith(f"{prefix}.") for name in sets[nest]):
            return nest, f"{prefix}."
    raise RetrofitError(
        f"{path} holds no weights under {printable(key, 64)!r} (it holds {held}); "
        "give `checkpoint_key` one of these, or how the names of the weights begin"
    )


def _dense(found: Mapping[Any, Any], file: Path) -> dict[str, Tensor]:
    """Return a set's tensors, if they are what a state dict holds: numbers in memory under names."""
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if strange := [name for name in tensors if not isinstance(name, str)]:
        raise RetrofitError(
            f"{len(strange)} tensors of {file} go by no name but a {type(strange[0]).__name__}; save a state_dict()"
        )
    special = [
        name
        for name, value in tensors.items()
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested
    ]
    if special:
        raise RetrofitError(
            f"{len(special)} tensors of {file} are sparse, quantized, nested or without data ({shortlist(special)}); "
            "save them dense"
        )
    _check_growth(file, sum(value.nbytes for value in tensors.values()))
    return tensors


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take off the prefixes that wrappers give to all names."""
    while True:
        weights = [name for name in tensors if not is_counter(name)]
        prefix = next((one for one in _WRAPPERS if weights and all(name.startswith(one) for name in weights)), None)
        if prefix is None:
            return tensors
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
