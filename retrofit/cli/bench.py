"""Measure what MODEL costs: time and peak memory for evaluation and for a training step.

An artifact is measured against the network that it was converted from, unless --against names
another one. The networks take turns; ratios are medians over the turns, with quartiles. A network
passed to --against gets images of MODEL's size; an artifact gets images of its own size.

If MODEL and --against are exported files (.onnx), --runtime runs them as they are.

\b
    $ retrofit bench resnet18-bnn.safetensors
    $ retrofit bench resnet18-bnn.safetensors --against resnet18-gn-pn.safetensors --mode train
    $ retrofit bench resnet18-bnn.onnx --against resnet18.onnx --runtime onnxruntime
"""

from __future__ import annotations

import platform
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli import options
from retrofit.cli.console import emit, progress_bar, say, show_table
from retrofit.errors import UsageError
from retrofit.utils.text import plural

if TYPE_CHECKING:
    import torch

    from retrofit.bench import Cost, Spread
    from retrofit.networks.open_model import Network

    Measured = tuple[str, torch.device, list[Cost], dict[str, Any]]


@options.command("bench", __doc__, against="The measurement")
@options.model
@options.against("Reference to measure against (default: an artifact's source network).")
@options.runtime
@options.option("--mode", "What to measure.", ("both", "eval", "train"), default="both")
@options.option("-b --batch-size", "Images per batch.", click.IntRange(2), default=16)
@options.option(
    "--rounds", "Number of times each network is timed.", click.IntRange(3, 10_000), default=15
)
@options.precision
@options.option("--compile", "Compile with torch.compile.", bool)
@options.weights
@options.architecture
@options.json
def command(model: str, against: str | None, **arguments: Any) -> None:
    """Measure time and memory.

    Raises:
        UsageError: If the two are the same, or a network and an exported file.
    """
    kinds = {Path(name).suffix == ".onnx" for name in (model, against) if name is not None}
    if len(kinds) > 1:
        raise UsageError(
            "a network and an exported file are measured in different ways; compare two of a kind"
        )
    if against == model:
        raise UsageError(
            f"{model} would be measured against itself; name another network with --against"
        )
    if kinds == {True}:
        measured = _measure_files(model, against, arguments)
    else:
        measured = _measure_networks(model, against, arguments)
    conditions, device, costs, facts = measured
    machine = _machine(device)
    batch_size = arguments["batch_size"]
    rounds = arguments["rounds"]
    say(f"{rounds} turns each, batches of {batch_size} {conditions}, {machine}")
    emit(
        {
            "batch_size": batch_size,
            "rounds": rounds,
            "machine": machine,
            **facts,
            "costs": [asdict(cost) for cost in costs],
        }
    )


def _machine(device: torch.device) -> str:
    """Name the device and the torch that were measured."""
    import torch

    name = f"{plural(torch.get_num_threads(), 'thread')}, {platform.machine()} CPU"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


def _measure_networks(model: str, against: str | None, arguments: dict[str, Any]) -> Measured:
    """Return the conditions, the device, the costs, and what else --json says."""
    from retrofit.bench import Setting, measure
    from retrofit.cli.network import placement, taken

    if arguments["runtime"] is not None:
        raise UsageError(f"--runtime runs exported files (.onnx), and {model} is none; drop it")
    device, amp = placement(arguments)
    networks = _opened(model, against, arguments)
    sizes = {name: network.preprocess.input_size for name, network in networks.items()}
    measured = {name: (network.model, sizes[name]) for name, network in networks.items()}
    mode = arguments["mode"]
    setting = Setting(**taken(dict(arguments), Setting), device=device, amp=amp)
    with progress_bar("measuring") as move:
        costs = measure(measured, setting, mode, move)
    _show(costs, "peak MB", "memory ratio")
    shapes = ", ".join(dict.fromkeys(" x ".join(map(str, size)) for size in sizes.values()))
    facts = {name: network.facts for name, network in networks.items()}
    return f"at {shapes}", device, costs, {"networks": facts}


def _opened(model: str, against: str | None, arguments: dict[str, Any]) -> dict[str, Network]:
    """Open a network and its reference, by the name to show."""
    from retrofit.cli.network import open_against, open_network
    from retrofit.networks.model_sources import build
    from retrofit.networks.open_model import Network
    from retrofit.record import set_record

    builder = arguments["network"]
    network = open_network(model, arguments, beside=against)
    if against is not None:
        size = network.preprocess.input_size[-1]
        return {model: network, against: open_against(against, builder, img_size=size)}
    if network.artifact is None:
        raise UsageError(
            f"{model} is no artifact, whose source would be the reference; give --against MODEL"
        )
    source = build(network.source)
    # So that it gets images of the artifact's size.
    set_record(source, preprocess=network.preprocess)
    return {model: network, network.source.name: Network(source)}


def _measure_files(model: str, against: str | None, arguments: dict[str, Any]) -> Measured:
    import torch

    from retrofit.bench import measure_files

    of_files = ("model", "against", "runtime", "batch_size", "rounds", "json")
    options.refuse_flags("an exported file is run as it is", but=of_files)
    if against is None:
        raise UsageError(f"{model} is measured against another file; name it with --against")
    files = {name: Path(name) for name in (model, against)}
    runtime: Any = arguments["runtime"] or "onnxruntime"
    with progress_bar("measuring") as move:
        costs = measure_files(
            files,
            runtime,
            batch_size=arguments["batch_size"],
            rounds=arguments["rounds"],
            threads=torch.get_num_threads(),
            progress=move,
        )
    _show(costs, "MB", "size ratio")
    cpu = torch.device("cpu")
    return f"in {runtime}", cpu, costs, {"runtime": runtime}


def _show(costs: list[Cost], size: str, size_ratio: str) -> None:
    rows = []
    for cost in costs:
        time_ratio = "1"
        memory_ratio = "1"
        ratios = cost.time_ratio
        if ratios is not None:
            time_ratio = _spread(ratios, ".2f")
        if cost.memory_ratio is not None:
            memory_ratio = f"{cost.memory_ratio:.2f}"
        seconds = _spread(cost.seconds, ".1f", 1e3)
        megabytes = f"{cost.bytes / 1e6:.1f}"
        row = cost.mode, cost.network, seconds, time_ratio, megabytes, memory_ratio
        rows.append(row)
    columns = "mode", "network", "ms a batch", "time ratio", size, size_ratio
    show_table(columns, rows)


def _spread(spread: Spread, form: str, unit: float = 1.0) -> str:
    median, low, high = (format(unit * figure, form) for figure in astuple(spread))
    return f"{median} ({low} to {high})"
