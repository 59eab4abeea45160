"""Which normalization layers follow each other, and which lie on branches beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.diagnose.probe import Probe
from retrofit.utils.hooks import hooked


def predecessors(model: nn.Module, probes: Sequence[Probe], pixels: Tensor) -> dict[str, tuple[str, ...]]:
    """Find the layers that come directly before each layer: whose output reaches it with none of the others between.

    The graph of autograd shows it, also of networks that cannot be traced. An identity shortcut past layers does not
    count: what it goes around comes between.

    Args:
        model: The network, in evaluation mode.
        probes: Its layers.
        pixels: Images (N, C, H, W); one is enough.

    Returns:
        For each layer that is called, in the order of the first calls, the names of those before it. Nothing where
        autograd cannot follow the network, such as one that writes into a view.
    """
    entered: dict[str, Any] = {}  # the nodes are held, so that autograd hands out the same objects again
    left: dict[str, Any] = {}

    def enter(name: str, _module: nn.Module, args: Any) -> None:
        entered.setdefault(name, args[0].grad_fn)

    def leave(name: str, _module: nn.Module, _args: Any, out: Tensor) -> None:
        left.setdefault(name, out.grad_fn)

    before_each = (one.layer.register_forward_pre_hook(partial(enter, one.name)) for one in probes)
    after_each = (one.layer.register_forward_hook(partial(leave, one.name)) for one in probes)
    try:
        with hooked(before_each), hooked(after_each), torch.enable_grad():
            model(pixels.detach().requires_grad_().clone())  # a network may write into its input
    except RuntimeError:
        return {}
    names = {node: name for name, node in left.items() if node is not None}
    before = {name: _reached(node, names) for name, node in entered.items()}
    return _without_detours(before)


def main_path(before: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the longest chain of layers that follow each other; layers beside it lie on parallel branches.

    Args:
        before: The layers directly before each, earlier layers first.
    """
    chains: dict[str, list[str]] = {}
    for name, nearest in before.items():
        chains[name] = [*max((chains[other] for other in nearest), key=len, default=[]), name]
    return max(chains.values(), key=len, default=[])


def _reached(node: Any, names: Mapping[Any, str]) -> set[str]:
    """Return the layers whose output is met first on the ways back from `node`."""
    found: set[str] = set()
    seen = {None}
    ahead = [node]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in names:
            found.add(names[node])
        else:
            ahead += [earlier for earlier, _ in node.next_functions]
    return found


def _without_detours(before: Mapping[str, set[str]]) -> dict[str, tuple[str, ...]]:
    """Leave out a layer that another one of the same set already follows, directly or not."""
    order = {name: number for number, name in enumerate(before)}
    all_before: dict[str, set[str]] = {}
    kept: dict[str, tuple[str, ...]] = {}
    for name in before:
        nearest = {other for other in before[name] if order[other] < order[name]}
        behind = set().union(*(all_before[other] for other in nearest))
        all_before[name] = nearest | behind
        kept[name] = tuple(sorted(nearest - behind, key=order.__getitem__))
    return kept
