"""The processes that decode images for a DataLoader, and the signals that they heed."""

import os
import signal
import threading
from typing import Any

import torch


def heed_the_main_process(_worker: object) -> Any:
    """Ignore signals that go to all processes (Ctrl-C, `timeout`, a batch system): the main process
    still needs its workers, and ends them itself.

    It is for a DataLoader's `worker_init_fn`, and for timm's `worker_seeding`, which wants the
    worker's seed, an int, as torch chose it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler would not be told who sent the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()
    info = torch.utils.data.get_worker_info()
    assert info is not None
    return info.seed % 2**32


def _end_when_told(parent: int) -> None:
    """End this process at a SIGTERM of its parent, in silence, as torch's workers do."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
