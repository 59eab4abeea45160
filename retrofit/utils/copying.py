"""Copies of networks, for what may not change the original."""

from __future__ import annotations

import copy

from torch import nn

from retrofit.errors import RetrofitError
from retrofit.utils.text import one_line


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a network.

    Raises:
        RetrofitError: If it holds what cannot be copied, as weights that pruning computes at each call.
    """
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise RetrofitError(
            "the network cannot be copied: it holds tensors that were computed, as pruned layers do; make them "
            f"permanent first, by torch.nn.utils.prune.remove for example ({one_line(error)[:100]})"
        ) from error
