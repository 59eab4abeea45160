"""What the processes that decode images have in common."""

from __future__ import annotations

import signal
from typing import Any

import torch


def heed_no_signals(_worker: object) -> Any:
    """Leave signals that go to a whole process group (Ctrl-C, `timeout`, a batch system) to the main process.

    It ends its workers itself. For a DataLoader's `worker_init_fn`, or timm's `worker_seeding`, which asks for the
    worker's seed, an int, as torch chose it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    info = torch.utils.data.get_worker_info()
    assert info is not None
    return info.seed % 2**32
