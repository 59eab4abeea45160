"""Open the network that a command line names, and say aloud whose weights it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofit.cli.console import say, waiting
from retrofit.errors import UsageError

if TYPE_CHECKING:
    from retrofit.models import Network


def open_network(text: str, **options: Any) -> Network:
    """Open MODEL and write the weights line and every warning to stderr.

    Raises:
        UsageError: If options contradict each other.
        RetrofitError: As `retrofit.models.open_model` does.
    """
    if options.get("match") and not options.get("checkpoint"):
        raise UsageError("--match says how to pair a checkpoint's tensors; give --checkpoint FILE too")
    from retrofit import models

    options["match"] = options.get("match") or "name"
    with waiting(f"opening {text}"):
        network = models.open_model(text, **options)
    say(
        models.weights_sentence(network.weights), style="bold yellow" if network.weights["kind"] == "random" else "bold"
    )
    for warning in network.warnings:
        say(f"warning: {warning}", style="yellow")
    return network


def file_stem(model: str) -> str:
    """Return the part of a MODEL string that names a file: no library prefix, no folders, no file ending."""
    prefix, _, rest = model.partition(":")
    known = prefix.replace("_", "-").lower() in ("tv", "torchvision", "hf-hub", "local-dir")
    return Path(rest if known else model).name.removesuffix(".safetensors")
