"""Open the network that a command line names, and say aloud whose weights it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofit.cli.console import say, waiting
from retrofit.errors import UsageError

if TYPE_CHECKING:
    from retrofit.networks.models import Network


def open_network(text: str, *, beside: str | None = None, **options: Any) -> Network:
    """Open MODEL and write the weights line and every warning to stderr.

    Args:
        text: MODEL.
        beside: The command's other MODEL, which its --network may be for.
        **options: As for `retrofit.networks.models.open_model`.

    Raises:
        UsageError: If options contradict each other.
        RetrofitError: As `retrofit.networks.models.open_model` does.
    """
    for name in ("match", "checkpoint_key", "checkpoint_partial"):
        if options.get(name) and not options.get("checkpoint"):
            raise UsageError(
                f"--{name.replace('_', '-')} says what to take of a checkpoint; give --checkpoint FILE too"
            )
    from retrofit.networks import models

    if beside is not None and models.is_artifact(beside) and not models.is_artifact(text):
        options["network"] = None
    options["match"] = options.get("match") or "name"
    with waiting(f"opening {text}"):
        network = models.open_model(text, **options)
    say(
        models.weights_sentence(network.weights), style="bold yellow" if network.weights["kind"] == "random" else "bold"
    )
    if (strength := models.strength_sentence(network.model)) is not None:
        say(strength)
    for warning in network.warnings:
        say(f"warning: {warning}", style="yellow")
    return network


def output_file(given: Path | None, default: str, force: bool) -> Path:
    """Return the file that a command writes, after checking that it can be written and will be recognised.

    Args:
        given: What -o says; `default` if None.
        default: The name if there is no -o; its ending is the one that a given name must have too.
        force: Whether an existing file may be replaced.

    Raises:
        UsageError: If the name has another ending. With --force it could be that of the artifact which is being read.
        RetrofitError: If the file cannot be written there.
    """
    from retrofit.utils import files

    output = given or Path(default)
    if output.suffix != (ending := Path(default).suffix):
        raise UsageError(f"{output} would not be recognised later; give -o a name that ends in {ending}")
    files.ensure_writable(output, force)
    return output


def file_stem(model: str) -> str:
    """Return the part of a MODEL string that names a file: no library prefix, no folders, no file ending."""
    prefix, _, rest = model.partition(":")
    if prefix == "py":
        return rest.replace(":", "-")
    known = prefix.replace("_", "-").lower() in ("tv", "torchvision", "hf-hub", "local-dir")
    path = Path(rest if known else model)
    stem = path.name.removesuffix(".safetensors")
    in_run = stem in ("best", "last") and path.parent.name  # of a fine-tuning run, whose folder tells it from others
    return f"{path.parent.name}-{stem}" if in_run else stem
