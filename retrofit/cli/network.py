"""The network and the images that a command line names, and the file that it writes; imported when
a command runs.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from retrofit.cli.console import say, waiting, warn
from retrofit.errors import UsageError
from retrofit.evaluation import ExportedFile
from retrofit.images.dataset import ImageData, open_images
from retrofit.images.samples import sample_batches
from retrofit.layers.strength import strength_sentence
from retrofit.networks.artifact import artifact_path
from retrofit.networks.model_sources import split_prefix
from retrofit.networks.open_model import Network, open_model, weights_sentence
from retrofit.utils.files import ensure_writable
from retrofit.utils.text import one_line


def taken(arguments: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Pop the arguments of a function from those that a command was given."""
    return {
        name: arguments.pop(name)
        for name in inspect.signature(function).parameters
        if name in arguments
    }


def open_network(text: str, arguments: dict[str, Any], beside: str | None = None) -> Network:
    """Open MODEL with its options, and say what it is; --network may be for the one `beside` it."""
    options = taken(arguments, open_model)
    if beside is not None and artifact_path(beside) is not None and artifact_path(text) is None:
        options["network"] = None
    with waiting(f"opening {text}"):
        network = open_model(text, **options)
    introduce(network)
    return network


def open_against(text: str, network: str | None, **named: Any) -> Network:
    """Open the network that --against names, and say what it is.

    Args:
        text: The network.
        network: What --network says, for an artifact.
        **named: Options for one that is no artifact.
    """
    if artifact_path(text) is None:
        return open_network(text, named)
    return open_network(text, {"network": network})


def introduce(network: Network) -> None:
    """Write whose weights a network has, how far it is converted, and every warning to stderr."""
    style = "bold"
    if network.weights["kind"] == "random":
        style = "bold yellow"
    say(weights_sentence(network.weights, network.artifact), style)
    strength = strength_sentence(network.model)
    if strength is not None:
        say(strength)
    for warning in network.warnings:
        warn(warning)


def open_data(network: Network | ExportedFile, arguments: dict[str, Any]) -> ImageData:
    """Open images for a network, and print any notes about them."""
    named = {name: arguments.pop(name) for name in ("data_dir", "dataset", "split", "class_map")}
    data = open_images(**named, labels=network.labels, channels=network.preprocess.input_size[0])
    for note in data.notes:
        say(f"note: {note}")
    return data


def read_calibration(arguments: dict[str, Any], network: Network, images: int = 128) -> None:
    """Replace the --calibrate folder with its images."""
    if arguments["calibrate"] is not None:
        arguments["calibrate"] = sample_batches(arguments["calibrate"], network.preprocess, images)


def device_named(name: str | None) -> torch.device:
    """Return a device to run on, by default a GPU if there is one.

    Raises:
        UsageError: If there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        value = torch.zeros(1, device=name)
        # The device "meta" takes tensors, and computes nothing.
        value.item()
        return value.device
    # torch raises RuntimeError, AssertionError, NotImplementedError, ...
    except Exception as error:
        why = one_line(error).rstrip(".")
        raise UsageError(
            f"cannot use `device={name!r}` ({why}); leave it out or use cpu"
        ) from error


def placement(arguments: dict[str, Any]) -> tuple[torch.device, torch.dtype | None]:
    """Pop the device and the data type of mixed precision (None for none) from a command's
    arguments.

    The default data type is torch's: bfloat16 on a CPU, float16 elsewhere.

    Raises:
        UsageError: If there is no such device, or a data type without mixed precision.
    """
    device = device_named(arguments.pop("device"))
    amp = arguments.pop("amp")
    amp_dtype = arguments.pop("amp_dtype")
    if amp_dtype is not None and not amp:
        raise UsageError("`amp_dtype` chooses the data type of mixed precision; give `amp` too")
    if not amp:
        return device, None
    if amp_dtype is None:
        return device, torch.get_autocast_dtype(device.type)
    return device, getattr(torch, amp_dtype)


def output_file(path: Path | None, default: str, force: bool) -> Path:
    """Return the file that a command writes: what -o says, or `default`.

    Raises:
        RetrofitError: If it cannot be written.
        UsageError: If it has another ending than `default`: with --force it could be the artifact
            that is read.
    """
    output = path or Path(default)
    ending = Path(default).suffix
    if output.suffix != ending:
        raise UsageError(
            f"{output} would not be recognised later; give -o a name that ends in {ending}"
        )
    ensure_writable(output, force)
    return output


def file_stem(model: str) -> str:
    """Return the part of a MODEL string that names a file: no library prefix, no folders, no file
    ending.
    """
    prefix, rest = split_prefix(model)
    if prefix == "py":
        return rest.replace(":", "-")
    if prefix not in ("tv", "torchvision", "hf-hub", "local-dir"):
        rest = model
    path = Path(rest)
    stem = path.name.removesuffix(".safetensors")
    folder = path.parent.name
    # A file of a fine-tuning run: only the folder tells it from other runs'.
    in_run = folder and stem in ("best", "last")
    if in_run:
        return f"{folder}-{stem}"
    return stem
