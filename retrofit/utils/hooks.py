"""Hooks for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register hooks, `layer.register_forward_hook(look) for layer in layers`, and remove them when the body ends."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield
