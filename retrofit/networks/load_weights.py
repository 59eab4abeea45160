"""Weights into a network: by name, or in order, and what is said where they do not fit."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks.state_tensors import described, fits, list_misfit, state_tensors, versioned
from retrofit.utils.text import one_line, printable, shortlist

# BatchNorm's and AveragedModel's, which are no weights.
_COUNTERS = {"num_batches_tracked", "n_averaged"}
_ROLES = {"weight", "bias", "running_mean", "running_var"}
# Parts of a name that may be a prefix: "model.backbone.module." has three.
_PARTS = 6

Tensors = Mapping[str, Tensor]
Names = list[str]
# How a checkpoint's tensors are paired with a network's.
Match = Literal["name", "order"]


@dataclass
class Loaded:
    """What became of a checkpoint's tensors.

    Attributes:
        left_out: The checkpoint's tensors that the network did not take.
        left_random: The network's tensors that the checkpoint did not give.
        warnings: Sentences for the user.
    """

    left_out: Names = field(default_factory=list)
    left_random: Names = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def load_into(
    model: nn.Module, state: Tensors, match: Match = "name", partial: bool = False
) -> Loaded:
    """Load a checkpoint's tensors into a network: all of them, into all of its tensors, unless
    `partial`.

    By name: one prefix that the weights' names share ("model.", DistributedDataParallel's
    "module.") is taken off. timm's converter for the architecture translates foreign names and
    sizes, where more tensors fit then. With `partial`, tensors may be missing, left over or of
    another shape; they are listed.

    By order: tensors are paired by position and shape, whatever they are called.

    Only counters (`num_batches_tracked`, AveragedModel's `n_averaged`) may be absent on either
    side. If the tensors do not fit, the network may be half loaded.

    Args:
        model: The network.
        state: The checkpoint's tensors, by name.
        match: How they are paired with the network's.
        partial: Whether to take what fits.

    Raises:
        RetrofitError: If the tensors do not fit.
        UsageError: If "order" is given with `partial`.
    """
    if match == "order":
        if partial:
            raise UsageError("`match='order'` pairs all tensors; drop it or `checkpoint_partial`")
        loaded = _load_by_order(model, state)
    else:
        loaded = _load_by_name(model, state, partial)
    broken = [
        name
        for name, tensor in state_tensors(model).items()
        if not tensor.isfinite().all() and name not in loaded.left_random
    ]
    if broken:
        loaded.warnings.append(
            f"{len(broken)} tensors of the checkpoint hold NaN or infinity: {shortlist(broken)}"
        )
    return loaded


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] in _COUNTERS


def weight_names(names: Iterable[str]) -> Names:
    """Return the names but for those of counters."""
    return [name for name in names if not _is_counter(name)]


def under_prefix(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def weights_beside(prefix: str, tensors: Tensors) -> Names:
    """Return the names of weights that do not have a prefix."""
    return weight_names(name for name in tensors if not name.startswith(prefix))


def _load_by_name(model: nn.Module, state: Tensors, partial: bool) -> Loaded:
    """Load the tensors that fit by name, shape and type; unless `partial`, refuse if not all do."""
    ours = state_tensors(model)
    if ours.keys().isdisjoint(state):
        # Of DistributedDataParallel, AveragedModel and torch.compile, one around the other.
        state = clean_state_dict(clean_state_dict(state))
    prefix = _prefix(ours, state)
    beside = weights_beside(prefix, state)
    state = _translated(model, under_prefix(prefix, state))
    unfit = _unfit(ours, state)
    taken = {name: tensor for name, tensor in state.items() if name not in unfit}
    left_random, unexpected = _load(model, taken)
    unexpected += beside
    left_out = unexpected + unfit
    total = len(weight_names(ours))
    is_whole = not left_random and not left_out
    fills_none = len(left_random) == total
    if not is_whole and (not partial or fills_none):
        missing = [name for name in left_random if name not in unfit]
        problem = list_misfit(ours, state, missing, unexpected, unfit)
        advice = _advice_on_misfit(ours, state, left_random)
        raise _misfit_error(model, f"{problem}; {advice}")
    warnings = [
        *_partly(left_random, f"of the network's {total} tensors are left RANDOM"),
        *_partly(left_out, "tensors of the checkpoint are left out"),
    ]
    return Loaded(left_out, left_random, warnings)


def _advice_on_misfit(ours: Tensors, state: Tensors, left_random: Names) -> str:
    """Say what to do about a checkpoint whose tensors do not fit by name."""
    if left_random and _order_problem(ours, state) is None:
        return "all tensors pair up in order and shape: pass `match='order'`"
    return (
        "check which network it is of, its `num_classes` and `in_chans`, or pass "
        "`checkpoint_partial=True` to take what fits"
    )


def _partly(names: Names, description: str) -> list[str]:
    """Return a warning of the tensors that were not taken, if there are some."""
    if not names:
        return []
    return [f"PARTIAL: {len(names)} {description} ({shortlist(names)})"]


def _misfit_error(model: nn.Module, why: str) -> RetrofitError:
    return RetrofitError(f"the checkpoint does not fit this {type(model).__name__}: {why}")


def _load(model: nn.Module, tensors: Tensors) -> tuple[Names, Names]:
    """Load tensors; return the names of weights that are missing, and that are unexpected.

    torch's own hooks may rename what older versions of a network called otherwise.
    """
    try:
        result = model.load_state_dict(versioned(model, tensors), strict=False)
    # ValueError is that of a network that wants to know the version of what it loads.
    except (RuntimeError, ValueError) as error:
        raise _misfit_error(model, f"{one_line(error, 400)}; check whose it is") from error
    return weight_names(result.missing_keys), weight_names(result.unexpected_keys)


def _prefix(ours: Tensors, state: Tensors) -> str:
    """Return the prefix under which a checkpoint has at least half of the network's names; empty
    for none.

    Two prefixes that fit equally well are refused: the file holds two sets of weights.
    """
    weights = set(weight_names(ours))
    counts = _count_prefixes(weights, state)
    half = len(weights) / 2
    most = max([half, *counts.values()])
    fitting = [prefix for prefix, count in counts.items() if count == most]
    if not fitting or "" in fitting:
        return ""
    first = fitting[0]
    if len(fitting) > 1:
        places = shortlist(fitting)
        key = printable(first.strip("."), 64)
        raise RetrofitError(
            f"the checkpoint holds several sets of weights, under {places}; choose "
            f"with `checkpoint_key={key!r}`"
        )
    return first


def _count_prefixes(weights: set[str], names: Iterable[str]) -> Counter[str]:
    """For each prefix, the number of names that consist of it and the name of a weight."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        tails = (".".join(parts[length:]) for length in range(min(_PARTS, len(parts))))
        counts.update(name.removesuffix(tail) for tail in tails if tail in weights)
    return counts


def _alike(ours: Tensor, theirs: Tensor, name: str) -> bool:
    """Whether a tensor can take another's values; a counter may be of any type."""
    return fits(ours, theirs) or (_is_counter(name) and ours.shape == theirs.shape)


def _translated(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Translate names and sizes with timm's converter for the architecture, if more tensors fit
    then.
    """
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state
    ours = state_tensors(model)
    try:
        with torch.no_grad():
            entries = convert(dict(state), model).items()
            converted = {name: value for name, value in entries if isinstance(value, Tensor)}
    # It was written for other checkpoints, and fails on this one in its own way.
    except Exception:
        return state
    if _count_fitting(ours, converted) > _count_fitting(ours, state):
        return converted
    return state


def _unfit(ours: Tensors, state: Tensors) -> Names:
    """Return the names that both have, with tensors that do not fit."""
    common = [name for name in ours if name in state]
    return [name for name in common if not _alike(ours[name], state[name], name)]


def _count_fitting(ours: Tensors, state: Tensors) -> int:
    return len(ours.keys() & state.keys()) - len(_unfit(ours, state))


def _load_by_order(model: nn.Module, state: Tensors) -> Loaded:
    ours = state_tensors(model)
    problem = _order_problem(ours, state)
    if problem is not None:
        raise _misfit_error(model, problem)
    pairs = list(zip(weight_names(ours), weight_names(state), strict=True))
    our_counters = [name for name in ours if _is_counter(name)]
    their_counters = [name for name in state if _is_counter(name)]
    if len(our_counters) == len(their_counters):
        pairs += zip(our_counters, their_counters, strict=True)
    _load(model, {our: state[their] for our, their in pairs})
    return Loaded(warnings=_odd_pairs(pairs))


def _odd_pairs(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a warning of pairs whose names say that their tensors have different roles."""
    odd = []
    for our, their in pairs:
        roles = {our.rpartition(".")[2], their.rpartition(".")[2]}
        # A weight and a bias, say.
        if len(roles & _ROLES) == 2:
            odd.append(f"{printable(their, 64)} as {our}")
    if not odd:
        return []
    return [f"{len(odd)} tensors were paired against their names: {shortlist(odd, limit=120)}"]


def _order_problem(ours: Tensors, state: Tensors) -> str | None:
    """Say where the tensors of a network and of a checkpoint stop pairing up; None if all do."""
    pairs = zip_longest(weight_names(ours), weight_names(state))
    for number, (our, their) in enumerate(pairs, start=1):
        if our is None or their is None or not _alike(ours[our], state[their], our):
            in_network = f"{_described(ours, our)} in the network"
            in_checkpoint = f"{_described(state, their)} in the checkpoint"
            return f"tensor {number} is {in_network}, {in_checkpoint}; check which network it is of"
    return None


def _described(tensors: Tensors, name: str | None) -> str:
    """Return a tensor's name, shape and type."""
    if name is None:
        return "nothing"
    return f"{printable(name, 64)} {printable(described(tensors[name]), 48)}"
