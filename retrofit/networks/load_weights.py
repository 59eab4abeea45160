"""A checkpoint's tensors into a network: by name or in order, all of them unless a part is asked for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks.checkpoint import is_counter
from retrofit.networks.tensors import tensors_of
from retrofit.utils.text import one_line, printable, shortlist

_ROLES = {"weight", "bias", "running_mean", "running_var"}
_PARTS = 6  # of a name that may be a prefix: "model.backbone.module." has three


@dataclass
class Loaded:
    """What became of a checkpoint's tensors.

    Attributes:
        left_out: The checkpoint's tensors that the network did not take.
        left_random: The network's tensors that the checkpoint did not give.
        warnings: Sentences for the user.
    """

    left_out: list[str] = field(default_factory=list)
    left_random: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def load_into(
    model: nn.Module, state: Mapping[str, Tensor], match: Literal["name", "order"] = "name", partial: bool = False
) -> Loaded:
    """Load a checkpoint's tensors into a network: all of them, into all of its tensors, unless `partial`.

    By name, one prefix that the weights' names share ("model.") is taken off, and what timm's own converter for the
    architecture makes of foreign names and sizes is accepted too. Only counters (`num_batches_tracked`, AveragedModel's
    `n_averaged`) may be absent on either side.

    Args:
        model: The network, changed in place.
        state: Tensors by name.
        match: "name", or "order" to pair tensors by position and shape whatever they are called.
        partial: Whether tensors may be missing, left over or of another shape (by name only); they are listed.

    Raises:
        UsageError: If `match` is neither, or "order" with `partial`.
        RetrofitError: If the tensors do not fit; the network may then be half loaded.
    """
    if match not in ("name", "order"):
        raise UsageError(f"`match={match!r}` is unknown; choose name or order")
    if match == "order" and partial:
        raise UsageError("`match='order'` pairs all tensors; drop it or `checkpoint_partial`")
    loaded = _load_by_name(model, state, partial) if match == "name" else _load_by_order(model, state)
    broken = [
        name
        for name, tensor in tensors_of(model).items()
        if tensor.is_floating_point() and not tensor.isfinite().all() and name not in loaded.left_random
    ]
    if broken:
        loaded.warnings.append(
            f"{len(broken)} tensors of the checkpoint hold NaN or infinite values: {shortlist(broken)}"
        )
    return loaded


def _load_by_name(model: nn.Module, state: Mapping[str, Tensor], partial: bool) -> Loaded:
    prefix = _prefix(model, state)
    beside = [name for name in state if not name.startswith(prefix) and not is_counter(name)]
    state = _translated(
        model, {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    )
    own = tensors_of(model)
    unfit = [name for name in own if name in state and not _alike(name, own[name], state[name])]
    try:  # torch's own hooks may rename what older versions of a network called otherwise
        result = model.load_state_dict({name: t for name, t in state.items() if name not in unfit}, strict=False)
    except RuntimeError as error:
        raise RetrofitError(
            f"the checkpoint does not fit this {type(model).__name__} ({one_line(error)}); check whose it is"
        ) from error
    missing = _weights(name for name in result.missing_keys if name not in unfit)
    unexpected = _weights(result.unexpected_keys) + beside
    weights = _weights(own)
    if (missing or unexpected or unfit) and (not partial or len(missing + unfit) == len(weights)):
        pairs = [_difference(name, state[name], own[name]) for name in unfit]
        word = "shape" if any(own[name].shape != state[name].shape for name in unfit) else "type"
        parts = ((missing, "missing", 64), (unexpected, "unexpected", 64), (pairs, f"of another {word}", 120))
        listed = [f"{len(names)} {what} ({shortlist(names, limit=limit)})" for names, what, limit in parts if names]
        hint = _hint(own, state, missing, unexpected, unfit, prefix if beside else "")
        raise RetrofitError(f"the checkpoint does not fit this {type(model).__name__}: {', '.join(listed)}; {hint}")
    loaded = Loaded(unexpected + unfit, missing + unfit)
    random = f"of the network's {len(weights)} tensors are left RANDOM"
    for names, what in ((loaded.left_random, random), (loaded.left_out, "tensors of the checkpoint are left out")):
        if names:
            loaded.warnings.append(f"PARTIAL: {len(names)} {what} ({shortlist(names)})")
    return loaded


def _hint(
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    missing: list[str],
    unexpected: list[str],
    unfit: list[str],
    prefix: str,
) -> str:
    """Say what the user may try."""
    if unfit and not missing and not unexpected:
        pairs = [(own[name].shape, state[name].shape) for name in unfit]
        classes = {theirs[:1] for ours, theirs in pairs if ours != theirs and ours[1:] == theirs[1:]}
        if len(classes) == 1 and all(ours[1:] == theirs[1:] for ours, theirs in pairs):
            return f"only the classifier differs: pass `num_classes={classes.pop()[0]}`, or `checkpoint_partial=True`"
        ours, theirs = pairs[0]
        if len(pairs) == 1 and len(ours) == len(theirs) == 4 and (ours[0], *ours[2:]) == (theirs[0], *theirs[2:]):
            return f"only the input channels differ: pass `in_chans={theirs[1]}`"
    if prefix and not missing and not unfit:
        return f"pass `checkpoint_key={printable(prefix.strip('.'), 64)!r}` to take what is under it and no more"
    if _order_problem(own, state) is None:
        return "all tensors pair up in order and shape: pass `match='order'`"
    if 2 * len(missing + unfit) <= len(own):
        return "pass `checkpoint_partial=True` to take what fits"
    return "check which network the checkpoint is of"


def _prefix(model: nn.Module, state: Mapping[str, Tensor]) -> str:
    """Return what stands before the network's own names in a checkpoint's, if at least half of them are there.

    Raises:
        RetrofitError: If two prefixes fit equally well: the file holds two sets of weights.
    """
    own = set(_weights(tensors_of(model)))
    found: Counter[str] = Counter()
    for name in state:
        head, rest = "", name
        for _ in range(_PARTS):
            found[head] += rest in own
            first, dot, rest = rest.partition(".")
            if not dot:
                break
            head += f"{first}."
    best = max(found.values(), default=0)
    if 2 * best < len(own) or found[""] == best:
        return ""
    fitting = [prefix for prefix, count in found.items() if count == best]
    if len(fitting) > 1:
        raise RetrofitError(
            f"the checkpoint holds several sets of weights, under {shortlist(fitting)}; "
            f"choose with `checkpoint_key={printable(fitting[0].strip('.'), 64)!r}`"
        )
    return fitting[0]


def _alike(name: str, ours: Tensor, theirs: Tensor) -> bool:
    """Whether a tensor can take another's values: of its shape, and a number with a fraction if it is one."""
    return ours.shape == theirs.shape and (_kind(ours) == _kind(theirs) or is_counter(name))


def _kind(tensor: Tensor) -> str:
    return "float" if tensor.is_floating_point() else "complex" if tensor.is_complex() else "integer"


def _difference(name: str, theirs: Tensor, ours: Tensor) -> str:
    kinds = (theirs.dtype, ours.dtype) if theirs.shape == ours.shape else (list(theirs.shape), list(ours.shape))
    return f"{printable(name, 64)} {printable(kinds[0], 32)} for {kinds[1]}".replace("torch.", "")


def _translated(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Translate names and sizes with the function that timm has for the architecture, where more fits then."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    own = tensors_of(model)
    if convert is None or _fitting(own, state) == len(own) == len(state):
        return state
    try:
        with torch.no_grad():
            converted = {
                name: value for name, value in convert(dict(state), model).items() if isinstance(value, Tensor)
            }
    except Exception:  # it was written for other checkpoints, and fails on this one in its own way
        return state
    return converted if _fitting(own, converted) > _fitting(own, state) else state


def _fitting(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> int:
    return sum(name in state and _alike(name, tensor, state[name]) for name, tensor in own.items())


def _load_by_order(model: nn.Module, state: Mapping[str, Tensor]) -> Loaded:
    own = tensors_of(model)
    if problem := _order_problem(own, state):
        raise RetrofitError(f"the checkpoint does not fit this {type(model).__name__} in order: {problem}")
    pairs = list(zip(_weights(own), _weights(state), strict=True))
    counters = [[name for name in names if is_counter(name)] for names in (own, state)]
    if len(counters[0]) == len(counters[1]):
        pairs += zip(*counters, strict=True)
    model.load_state_dict({ours: state[theirs] for ours, theirs in pairs}, strict=False)
    odd = [f"{printable(theirs, 64)} as {ours}" for ours, theirs in pairs if _roles_differ(ours, theirs)]
    said = f"{len(odd)} tensors were paired against their names: {shortlist(odd, limit=120)}"
    return Loaded(warnings=[said] if odd else [])


def _order_problem(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str | None:
    """Say where the tensors of a network and of a checkpoint stop pairing up; None if they all do."""
    ours, theirs = _weights(own), _weights(state)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        if not _alike(a, own[a], state[b]):
            return (
                f"tensor {k} is {a} {_described(own[a])} in the network, {printable(b, 64)} {_described(state[b])} in "
                "the checkpoint; check which network it is of"
            )
    if len(ours) != len(theirs):
        k = min(len(ours), len(theirs))
        side, name = ("network", ours[k]) if len(ours) > k else ("checkpoint", theirs[k])
        return (
            f"the network has {len(ours)} tensors, the checkpoint {len(theirs)} (the first left over is "
            f"{printable(name, 64)} of the {side}); check which network it is of"
        )
    return None


def _described(tensor: Tensor) -> str:
    shape = printable(list(tensor.shape), 32)
    return shape if tensor.is_floating_point() else f"{shape} {tensor.dtype}".replace("torch.", "")


def _roles_differ(ours: str, theirs: str) -> bool:
    a, b = ours.rpartition(".")[2], theirs.rpartition(".")[2]
    return a != b and {a, b} <= _ROLES


def _weights(names: Iterable[str]) -> list[str]:
    """Leave out what counts something."""
    return [name for name in names if not is_counter(name)]
