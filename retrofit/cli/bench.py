"""`retrofit bench`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli import completion
from retrofit.cli.console import emit, progress_bar, say, show_table
from retrofit.cli.device import chosen_device, precision_of
from retrofit.cli.options import architecture_options, json_option, model_argument, weights_options
from retrofit.errors import UsageError

if TYPE_CHECKING:
    from retrofit.bench import Cost
    from retrofit.bench.exported import FileCost
    from retrofit.networks.models import Network
    from retrofit.utils.onnx_runtimes import Runtime

HELP = """Measure what MODEL costs: time and peak memory of evaluation and of a training step.

An artifact is measured against the network that it was converted from, unless --against names another one. The
networks take turns; ratios are medians over the turns, with their quartiles. A network named by --against gets images
of MODEL's size; an artifact there gets its own.

With --runtime, MODEL and --against are exported files, which are run as they are.

\b
$ retrofit bench resnet18-bnn.safetensors
$ retrofit bench resnet18-bnn.safetensors --against resnet18-gn-pn.safetensors --mode train
$ retrofit bench resnet18-bnn.onnx --against resnet18.onnx --runtime onnxruntime
"""


@click.command("bench", help=HELP)
@model_argument
@click.option(
    "--against",
    metavar="MODEL",
    shell_complete=completion.model,
    help="The reference (default: an artifact's source network).",
)
@click.option(
    "--runtime", type=click.Choice(["onnxruntime", "openvino"]), help="Measure exported files in this runtime."
)
@click.option("--mode", "modes", type=click.Choice(["both", "eval", "train"]), default="both", help="Default: both.")
@click.option("-b", "--batch-size", type=click.IntRange(min=2), default=16, metavar="N", help="Default: 16.")
@click.option("--rounds", type=click.IntRange(min=3), default=15, metavar="N", help="Turns of each network (15).")
@click.option("--device", metavar="NAME", help="Default: cuda if there is one, else cpu.")
@click.option("--amp", is_flag=True, help="Mixed precision.")
@click.option("--amp-dtype", type=click.Choice(["float16", "bfloat16"]), help="Default: float16 (cpu: bfloat16).")
@click.option("--channels-last", is_flag=True, help="Use the channels-last memory format.")
@click.option("--compile", is_flag=True, help="Run through torch.compile.")
@weights_options
@architecture_options
@json_option
def command(
    model: str,
    against: str | None,
    runtime: Runtime | None,
    modes: str,
    batch_size: int,
    rounds: int,
    device: str | None,
    amp: bool,
    amp_dtype: str | None,
    channels_last: bool,
    compile: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `retrofit bench`."""
    if runtime is not None:
        own = {
            "mode": modes != "both",
            "device": device,
            "amp": amp,
            "channels-last": channels_last,
            "compile": compile,
        }
        _bench_files(model, against, runtime, batch_size, rounds, as_json, {**own, **options})
        return
    if model.endswith(".onnx"):
        raise UsageError(f"{model} is an exported file; say with --runtime what to run it in")
    if against is not None and against.endswith(".onnx"):
        raise UsageError(f"{against} is an exported file and {model} is none; compare two of a kind")
    from retrofit.bench import Setting, measure
    from retrofit.bench.cost import MODES
    from retrofit.cli.network import open_network

    place = chosen_device(device)
    precision = precision_of(place, amp, amp_dtype)
    network = open_network(model, beside=against, **options)
    name, reference = _reference(model, network, against, options["network"])
    networks = {
        model: (network.model, network.preprocess.input_size),
        name: (reference.model, reference.preprocess.input_size),
    }
    if len(networks) == 1:
        raise UsageError(f"{model} would be measured against itself; name another network with --against")
    setting = Setting(batch_size, rounds, place, precision, channels_last, compile)
    with progress_bar("measuring") as move:
        found = measure(networks, setting, MODES if modes == "both" else (modes,), move)  # type: ignore[arg-type]
    _show(found)
    sizes = ", ".join(dict.fromkeys(" x ".join(map(str, size)) for _, size in networks.values()))
    say(f"{rounds} turns each, batches of {batch_size} at {sizes}, {_machine(place)}")
    if as_json:
        conversions = {model: network.conversion, name: reference.conversion}
        emit({"schema": 1, "machine": _machine(place), "batch_size": batch_size, "rounds": rounds,
              "networks": conversions, "costs": [asdict(cost) for cost in found]})  # fmt: skip


def _bench_files(
    model: str,
    against: str | None,
    runtime: Runtime,
    batch_size: int,
    rounds: int,
    as_json: bool,
    others: dict[str, Any],
) -> None:
    """Measure exported files."""
    from pathlib import Path

    import torch

    from retrofit.bench.exported import measure_files

    if given := [name.replace("_", "-") for name, value in others.items() if value]:
        raise UsageError(f"an exported file is run as it is; drop --{given[0]}")
    if against is None or against == model:
        raise UsageError(f"{model} is measured against another file; name it with --against")
    files = {name: Path(name) for name in (model, against)}
    with progress_bar("measuring") as move:
        found = measure_files(
            files, runtime, batch_size=batch_size, rounds=rounds, threads=torch.get_num_threads(), progress=move
        )
    rows = [(cost.file, *_times(cost), f"{cost.bytes / 1e6:.1f}") for cost in found]
    show_table(("file", "ms a batch", "time ratio", "MB"), rows)
    place = torch.device("cpu")
    say(f"{rounds} turns each, batches of {batch_size} in {runtime}, {_machine(place)}")
    if as_json:
        emit({"schema": 1, "machine": _machine(place), "runtime": runtime, "batch_size": batch_size, "rounds": rounds,
              "costs": [asdict(cost) for cost in found]})  # fmt: skip


def _reference(model: str, network: Network, against: str | None, own: str | None) -> tuple[str, Network]:
    """Return the name to show, and the network to measure against."""
    from retrofit.cli.network import open_network
    from retrofit.networks.library import build
    from retrofit.networks.models import is_artifact

    if against is not None:
        options = {"network": own} if is_artifact(against) else {"img_size": network.preprocess.input_size[-1]}
        return against, open_network(against, **options)
    if network.artifact is None:
        raise UsageError(f"{model} is no artifact, whose source would be the reference; give --against MODEL")
    return network.source.name, replace(network, model=build(network.source), artifact=None)


def _show(found: list[Cost]) -> None:
    rows = []
    for cost in found:
        memory = "1" if cost.memory_ratio is None else f"{cost.memory_ratio:.2f}"
        rows.append((cost.mode, cost.network, *_times(cost), f"{cost.bytes / 1e6:.1f}", memory))
    show_table(("mode", "network", "ms a batch", "time ratio", "peak MB", "memory ratio"), rows)


def _times(cost: Cost | FileCost) -> tuple[str, str]:
    """Return the milliseconds of a batch, and how many times the reference's they are."""
    time, ratio = cost.seconds, cost.time_ratio
    milliseconds = f"{time.median * 1e3:.1f} ({time.low * 1e3:.1f} to {time.high * 1e3:.1f})"
    return milliseconds, "1" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _machine(place: Any) -> str:
    import platform

    import torch

    from retrofit.utils.text import plural

    if place.type == "cuda":
        return f"{torch.cuda.get_device_name(place)}, torch {torch.__version__}"
    return f"{plural(torch.get_num_threads(), 'thread')} of a {platform.machine()} CPU, torch {torch.__version__}"
