"""Weights from files that others wrote: what a file holds, which of it is taken, and how it fits a
network.
"""

import argparse
import pickle
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks.contents import fits, list_misfit, tensors_of
from retrofit.utils.text import one_line, printable, shortlist

# Where training scripts put the weights, the averaged ones first (timm.models.load_state_dict's
# order).
_NESTS = ("state_dict_ema", "model_ema", "state_dict", "model")
# BatchNorm's and AveragedModel's: no weights
_COUNTERS = {"num_batches_tracked", "n_averaged"}
_ROLES = {"weight", "bias", "running_mean", "running_var"}
# levels of a file in which weights are looked for
_DEPTH = 3
# of a name that may be a prefix: "model.backbone.module." has three
_PARTS = 6
# times that a file's content may be larger than the file: torch compresses nothing
_GROWTH = 4
# bytes that any file may unpack to
_SMALL = 2**24

Tensors = Mapping[str, Tensor]
Names = list[str]
# how a checkpoint's tensors are paired with a network's
Match = Literal["name", "order"]


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights out of a file."""

    tensors: dict[str, Tensor]
    # where in the file they lie, "state_dict_ema", say; empty for its top
    key: str = ""
    # where other sets of weights lie
    others: tuple[str, ...] = ()
    left_out: tuple[
        str, ...
        # names beside the weights, where `key` chose what follows a prefix
    ] = ()


@dataclass
class Loaded:
    """What became of a checkpoint's tensors."""

    left_out: Names = field(
        default_factory=list
    )  # the checkpoint's tensors that the network did not take
    left_random: Names = field(
        default_factory=list
    )  # the network's tensors that the checkpoint did not give
    # sentences for the user
    warnings: list[str] = field(default_factory=list)


def read_checkpoint(path: str | Path, key: str | None = None) -> Checkpoint:
    """Read the tensors of a safetensors file, or of what torch.save wrote, without executing
    anything from it.

    Nested training checkpoints are opened as timm opens them: averaged weights before plain ones.
    Where the file holds several sets of weights, `key` says which: a key ("model_ema"; dots lead
    further down), or how the names of the weights begin ("teacher", for "teacher.conv1.weight").
    """
    file = Path(path)
    if not file.is_file():
        raise RetrofitError(f"there is no checkpoint file at {path}; check the path")
    try:
        content = load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise RetrofitError(
            f"{file} is not a whole safetensors file ({one_line(error)}); fetch it again"
        ) from error
    sets = _weight_sets(content)
    if not sets:
        raise RetrofitError(
            f"there are no tensors in {path}; give a checkpoint with a model's state_dict"
        )
    nest, prefix = _choose(sets, key, path)
    held = sets[nest]
    special = [
        n
        for n, t in held.items()
        if t.layout != torch.strided or t.is_quantized or t.is_nested or t.is_meta
    ]
    if special:
        what = f"{len(special)} tensors of {file} are sparse, quantized, nested or without data ({shortlist(special)})"
        raise RetrofitError(f"{what}; save them dense")
    _check_growth(file, sum(tensor.nbytes for tensor in held.values()))
    return Checkpoint(
        tensors={
            name.removeprefix(prefix): tensor
            for name, tensor in held.items()
            if name.startswith(prefix)
        },
        key=f"{nest}.{prefix}".strip("."),
        others=tuple(other for other in sets if other not in ("", nest)),
        left_out=tuple(_weights(name for name in held if not name.startswith(prefix))),
    )


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] in _COUNTERS


def _weights(names: Iterable[str]) -> list[str]:
    return [name for name in names if not _is_counter(name)]


def _unpickled(file: Path) -> Any:
    """Return what torch.save wrote, without the code that may be in it."""
    try:
        with file.open("rb") as opened:
            zipped = opened.read(2) == b"PK"
        if zipped:
            with zipfile.ZipFile(file) as archive:
                _check_growth(
                    file, sum(entry.file_size for entry in archive.infolist())
                )  # before torch unpacks it
        with (
            warnings.catch_warnings(action="ignore"),
            torch.serialization.safe_globals([argparse.Namespace]),
        ):
            return torch.load(file, map_location="cpu", weights_only=True)
    except RetrofitError:
        raise
    # zipfile and torch.load raise anything on a damaged file
    except Exception as error:
        why = one_line(error, 100)
        problem = f"is not a whole checkpoint ({why}); fetch it again, or save weights as .safetensors or .pth"
        if "TorchScript" in str(error):
            problem = (
                "is a TorchScript archive, not a checkpoint; save the model's state_dict() instead"
            )
        elif isinstance(error, pickle.UnpicklingError):
            try:
                names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
            # not the zip format
            except Exception:
                names = str(error).partition("Unsupported global: GLOBAL ")[2].split()[:1]
            if names:
                problem = f"holds Python objects ({shortlist(names)}), which could run code when loaded; save weights"
        raise RetrofitError(f"{file} {problem}") from error


def _check_growth(file: Path, unpacked: int) -> None:
    size = file.stat().st_size
    if unpacked > max(_SMALL, _GROWTH * size):
        raise RetrofitError(
            f"{file} has {size:,} bytes and unpacks to {unpacked:,}; save it again, as torch does"
        )


def _weight_sets(content: Any) -> dict[str, dict[str, Tensor]]:
    """Find the mappings that hold named tensors, by the keys that lead there; each once, those near
    the top first.
    """
    sets: dict[str, dict[str, Tensor]] = {}
    level, seen = [("", content)], set()
    for _ in range(_DEPTH):
        below = []
        for nest, value in level:
            if isinstance(value, Mapping) and id(value) not in seen:
                seen.add(id(value))
                entries = {name: entry for name, entry in value.items() if isinstance(name, str)}
                if tensors := {
                    name: entry for name, entry in entries.items() if isinstance(entry, Tensor)
                }:
                    sets[nest] = tensors
                below += [(f"{nest}.{name}".strip("."), entry) for name, entry in entries.items()]
        level = below
    return sets


def _choose(sets: Mapping[str, Tensors], key: str | None, path: str | Path) -> tuple[str, str]:
    """Return the nest of the weights to take, and how their names begin, where the key says that."""
    usual = next(
        (nest for nest in (*_NESTS, "") if nest in sets),
        next(iter(sets)) if len(sets) == 1 else None,
    )
    held = shortlist([nest or "weights at its top" for nest in sets], most=6)
    if key is None:
        if usual is None:
            raise RetrofitError(
                f"{path} holds several sets of weights ({held}); choose with `checkpoint_key=NAME`"
            )
        return usual, ""
    key = key.strip(".")
    if key in sets:
        return key, ""
    for nest in sets if usual is None else (usual, *sets):
        prefix = key.removeprefix(f"{nest}.") if nest else key
        if prefix and any(name.startswith(f"{prefix}.") for name in sets[nest]):
            return nest, f"{prefix}."
    what = f"{path} holds no weights under {printable(key, 64)!r} (it holds {held})"
    raise RetrofitError(
        f"{what}; give `checkpoint_key` one of these, or how the names of the weights begin"
    )


def load_into(
    model: nn.Module, state: Tensors, match: Match = "name", partial: bool = False
) -> Loaded:
    """Load a checkpoint's tensors into a network: all of them, into all of its tensors, unless
    `partial`.

    By name, one prefix that the weights' names share ("model.", DistributedDataParallel's
    "module.") is taken off, and what timm's own converter for the architecture makes of foreign
    names and sizes is accepted too; with `partial` tensors may be missing, left over or of another
    shape, and are listed. In "order", tensors are paired by position and shape, whatever they are
    called. Only counters (`num_batches_tracked`, AveragedModel's `n_averaged`) may be absent on
    either side. Where the tensors do not fit, the network may be half loaded.
    """
    if match not in ("name", "order"):
        raise UsageError(f"`match={match!r}` is unknown; choose name or order")
    if match == "order" and partial:
        raise UsageError("`match='order'` pairs all tensors; drop it or `checkpoint_partial`")
    loaded = (
        _load_by_name(model, state, partial) if match == "name" else _load_by_order(model, state)
    )
    own = tensors_of(model).items()
    broken = [
        name for name, value in own if not value.isfinite().all() and name not in loaded.left_random
    ]
    if broken:
        loaded.warnings.append(
            f"{len(broken)} tensors of the checkpoint hold NaN or infinity: {shortlist(broken)}"
        )
    return loaded


def _load_by_name(model: nn.Module, state: Tensors, partial: bool) -> Loaded:
    own = tensors_of(model)
    while (
        own.keys().isdisjoint(state) and (cleaned := clean_state_dict(state)).keys() != state.keys()
    ):
        # of what DistributedDataParallel, AveragedModel or torch.compile put before, one by one
        state = cleaned
    prefix = _prefix(own, state)
    beside = _weights(name for name in state if not name.startswith(prefix))
    state = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    state = _translated(model, state)
    unfit = [name for name in own if name in state and not _alike(own[name], state[name], name)]
    # torch's own hooks may rename what older versions of a network called otherwise
    try:
        result = model.load_state_dict(
            {name: t for name, t in state.items() if name not in unfit}, strict=False
        )
    except RuntimeError as error:
        what = f"the checkpoint does not fit this {type(model).__name__} ({one_line(error)})"
        raise RetrofitError(f"{what}; check whose it is") from error
    missing = _weights(name for name in result.missing_keys if name not in unfit)
    unexpected = _weights(result.unexpected_keys) + beside
    weights = _weights(own)
    if (missing or unexpected or unfit) and (not partial or len(missing + unfit) == len(weights)):
        listed = list_misfit(
            missing, unexpected, {name: (state[name], own[name]) for name in unfit}
        )
        hint = _hint(own, state, missing, unexpected, unfit, prefix if beside else "")
        raise RetrofitError(
            f"the checkpoint does not fit this {type(model).__name__}: {listed}; {hint}"
        )
    loaded = Loaded(unexpected + unfit, missing + unfit)
    random = f"of the network's {len(weights)} tensors are left RANDOM"
    for names, what in (
        (loaded.left_random, random),
        (loaded.left_out, "tensors of the checkpoint are left out"),
    ):
        if names:
            loaded.warnings.append(f"PARTIAL: {len(names)} {what} ({shortlist(names)})")
    return loaded


def _hint(
    own: Tensors, state: Tensors, missing: Names, unexpected: Names, unfit: Names, prefix: str
) -> str:
    """Say what the user may try."""
    sizes = [enumerate(zip_longest(own[name].shape, state[name].shape)) for name in unfit]
    differing = {
        (axis, theirs) for both in sizes for axis, (ours, theirs) in both if ours != theirs
    }
    if len(differing) == 1 and not missing and not unexpected:
        ((axis, size),) = differing
        if axis == 0 and size:
            return f"only the classifier differs: pass `num_classes={size}`, or `checkpoint_partial=True`"
        if axis == 1 and len(unfit) == 1 and own[unfit[0]].ndim == 4:
            return f"only the input channels differ: pass `in_chans={size}`"
    if prefix and not missing and not unfit:
        return f"pass `checkpoint_key={printable(prefix.strip('.'), 64)!r}` to take what is under it and no more"
    if _order_problem(own, state) is None:
        return "all tensors pair up in order and shape: pass `match='order'`"
    if 2 * len(missing + unfit) <= len(own):
        return "pass `checkpoint_partial=True` to take what fits"
    return "check which network the checkpoint is of"


def _prefix(own: Tensors, state: Tensors) -> str:
    """Return what stands before the network's own names in a checkpoint's, if at least half of them
    are there.

    A RetrofitError says that two prefixes fit equally well: the file holds two sets of weights.
    """
    weights = set(_weights(own))
    counts: Counter[str] = Counter()
    for name in state:
        parts = name.split(".")
        tails = (".".join(parts[length:]) for length in range(min(_PARTS, len(parts))))
        counts.update(name.removesuffix(tail) for tail in tails if tail in weights)
    best = max(counts.values(), default=0)
    if counts[""] == best or 2 * best < len(weights):
        return ""
    fitting = [prefix for prefix, count in counts.items() if count == best]
    if len(fitting) > 1:
        choose = f"choose with `checkpoint_key={printable(fitting[0].strip('.'), 64)!r}`"
        raise RetrofitError(
            f"the checkpoint holds several sets of weights, under {shortlist(fitting)}; {choose}"
        )
    return fitting[0]


def _alike(ours: Tensor, theirs: Tensor, name: str) -> bool:
    """Whether a tensor can take another's values; a counter may be of any type."""
    return fits(ours, theirs) or (_is_counter(name) and ours.shape == theirs.shape)


def _translated(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Translate names and sizes with the function that timm has for the architecture, where more
    fits then.
    """
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    own = tensors_of(model)
    if convert is None or _fitting(own, state) == len(own) == len(state):
        return state
    try:
        with torch.no_grad():
            entries = convert(dict(state), model).items()
            converted = {name: value for name, value in entries if isinstance(value, Tensor)}
    # it was written for other checkpoints, and fails on this one in its own way
    except Exception:
        return state
    return converted if _fitting(own, converted) > _fitting(own, state) else state


def _fitting(own: Tensors, state: Tensors) -> int:
    return sum(name in state and _alike(tensor, state[name], name) for name, tensor in own.items())


def _load_by_order(model: nn.Module, state: Tensors) -> Loaded:
    own = tensors_of(model)
    if problem := _order_problem(own, state):
        raise RetrofitError(
            f"the checkpoint does not fit this {type(model).__name__} in order: {problem}"
        )
    pairs = list(zip(_weights(own), _weights(state), strict=True))
    counters = [[name for name in names if _is_counter(name)] for names in (own, state)]
    if len(counters[0]) == len(counters[1]):
        pairs += zip(*counters, strict=True)
    model.load_state_dict({ours: state[theirs] for ours, theirs in pairs}, strict=False)
    ends = [{name.rpartition(".")[2] for name in pair} for pair in pairs]
    against = [pair for pair, roles in zip(pairs, ends, strict=True) if len(roles & _ROLES) == 2]
    odd = [f"{printable(theirs, 64)} as {ours}" for ours, theirs in against]
    said = f"{len(odd)} tensors were paired against their names: {shortlist(odd, limit=120)}"
    return Loaded(warnings=[said] if odd else [])


def _order_problem(own: Tensors, state: Tensors) -> str | None:
    """Say where the tensors of a network and of a checkpoint stop pairing up; None if they all do."""

    def said(tensors: Tensors, name: str | None) -> str:
        kind = (
            ""
            if name is None
            else f"{list(tensors[name].shape)} {tensors[name].dtype}".replace("torch.", "")
        )
        return f"{printable(name or 'nothing', 64)} {printable(kind, 48)}".strip()

    for number, (ours, theirs) in enumerate(zip_longest(_weights(own), _weights(state)), start=1):
        if ours is None or theirs is None or not _alike(own[ours], state[theirs], ours):
            here, there = (
                f"{said(own, ours)} in the network",
                f"{said(state, theirs)} in the checkpoint",
            )
            return f"tensor {number} is {here}, {there}; check which network it is of"
    return None
