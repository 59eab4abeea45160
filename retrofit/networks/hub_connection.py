"""The Hugging Face hub where there is no connection to it."""

import logging
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from huggingface_hub import constants

from retrofit.utils.forward_pass import replaced


@contextmanager
def no_waiting_for_the_hub() -> Iterator[None]:
    """Use only cached files where there is no connection: the hub's client would retry for 20
    seconds a file, and log it.
    """
    offline = constants.HF_HUB_OFFLINE
    log = logging.getLogger("huggingface_hub")
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname or "", 443)
        except OSError:
            offline = True
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with replaced(constants, "HF_HUB_OFFLINE", offline):
            yield
    finally:
        log.setLevel(level)
