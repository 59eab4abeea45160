"""Peak memory of a piece of work, as the allocator saw it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_memory(work: Callable[[], Any], device: torch.device) -> int:
    """Return how many bytes of tensors were alive at once during `work`, beyond those before it.

    On a GPU the caching allocator's own count; on a CPU every allocation and release as the profiler records them, so
    that the figure does not depend on what the process did before or on when memory goes back to the system.

    Args:
        work: Runs once.
        device: Where it runs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events: Any = recorded.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    alive = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        alive += change.nbytes()
        peak = max(peak, alive)
    return peak


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the profiler's native code from writing its log to stderr."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
