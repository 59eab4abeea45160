"""`retrofit evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli.console import emit, names, progress_bar, say
from retrofit.cli.device import chosen_device, precision_of
from retrofit.cli.options import (
    architecture_options,
    attack_options,
    data_options,
    json_option,
    model_argument,
    weights_options,
)
from retrofit.errors import UsageError
from retrofit.utils.text import plural

if TYPE_CHECKING:
    from torch import nn

    from retrofit.record import Preprocess

HELP = """Measure MODEL's top-1 and top-5 accuracy, with its own preprocessing.

MODEL may also be an .onnx file that `retrofit export` wrote. Its metadata say how images are prepared.
Images that cannot be read are left out of the figures and listed.

\b
$ retrofit evaluate tf_efficientnet_lite0 --checkpoint lite0.pth --match order \\
    --data-dir photos.tar --class-map classes.txt
weights: checkpoint lite0.pth
top-1 89.00% (178 of 200)
top-5 98.00% (196 of 200)

\b
$ retrofit evaluate lite0-ln.safetensors --data-dir photos.tar --class-map classes.txt \\
    --json 2>/dev/null | jq -c '[.strength, .top1, .images]'
[1,85,200]
\b
$ retrofit evaluate lite0-ln.onnx --data-dir photos.tar --class-map classes.txt
$ retrofit evaluate lite0-ln.safetensors --data-dir photos.tar --class-map classes.txt \\
    --attack pgd --eps 4/255
"""


@dataclass(frozen=True)
class _Classifier:
    """What is evaluated: a network or an exported file, and what --json says of it."""

    model: nn.Module
    preprocess: Preprocess
    labels: list[str] | None
    facts: dict[str, Any]


@click.command("evaluate", help=HELP)
@model_argument
@data_options
@weights_options
@click.option("-b", "--batch-size", type=click.IntRange(min=1), default=64, metavar="N", help="Default: 64.")
@click.option("-j", "--workers", type=click.IntRange(min=0), default=2, metavar="N", help="Decoders (default: 2).")
@click.option("--device", metavar="NAME", help="Default: cuda if there is one, else cpu.")
@click.option("--amp", is_flag=True, help="Mixed precision.")
@click.option("--amp-dtype", type=click.Choice(["float16", "bfloat16"]), help="Default: float16 (cpu: bfloat16).")
@click.option("--channels-last", is_flag=True, help="Use the channels-last memory format.")
@click.option(
    "--runtime",
    type=click.Choice(["onnxruntime", "openvino"]),
    help="What runs an .onnx file (default: onnxruntime).",
)
@attack_options
@architecture_options
@json_option
def command(
    model: str,
    data_dir: str | None,
    dataset: str,
    split: str,
    class_map: Path | None,
    batch_size: int,
    workers: int,
    device: str | None,
    amp: bool,
    amp_dtype: str | None,
    channels_last: bool,
    runtime: Any,
    attack: Any,
    eps: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `retrofit evaluate`."""
    from retrofit.evaluation.accuracy import evaluate
    from retrofit.evaluation.attack import attack_on
    from retrofit.evaluation.strengths import odd_strengths
    from retrofit.images.dataset import open_images

    if data_dir is None and not dataset:
        raise UsageError("there is nothing to evaluate on; give --data-dir DIR or --dataset NAME")
    if Path(model).suffix == ".onnx":
        if attack is not None:
            raise UsageError("an exported file gives no gradients to attack with; attack the network it came from")
        place, precision = chosen_device("cpu"), None
        given = {"device": device, "amp": amp, "amp_dtype": amp_dtype, "channels_last": channels_last, **options}
        network = _exported(model, runtime or "onnxruntime", given)
    else:
        if runtime is not None:
            raise UsageError(f"--runtime runs exported files (.onnx), and {model} is none; drop it")
        place = chosen_device(device)
        precision = precision_of(place, amp, amp_dtype)
        network = _opened(model, options)
    under = attack_on(network.preprocess, attack, eps)
    if odd := odd_strengths(network.model):
        say(f"warning: {odd}", style="yellow")
    data = open_images(
        data_dir,
        dataset=dataset,
        split=split,
        class_map=class_map,
        labels=network.labels,
        channels=network.preprocess.input_size[0],
    )
    for note in data.notes:
        say(f"note: {note}")
    with progress_bar("evaluating") as progress:
        result = evaluate(
            network.model,
            data,
            network.preprocess,
            batch_size=batch_size,
            workers=workers,
            device=place,
            amp=precision,
            channels_last=channels_last,
            attack=under,
            progress=progress,
        )
    if data.matched == "order" and data.classes is not None:
        unlike = ""
        if data.classes != result.outputs:
            unlike = f"the data has {data.classes} classes and the model {result.outputs} outputs"
        elif data.contradicts(network.labels):
            unlike = f"the data's classes ({names(data.names or ())}) are not what the model calls its outputs"
        if unlike:
            say(
                f"warning: {unlike}: the classes, sorted by name, were taken for outputs 0 to {data.classes - 1}; if "
                "that is wrong, give --class-map FILE",
                style="yellow",
            )
    if result.skipped:
        say(f"warning: {plural(len(result.skipped), 'image')} cannot be read: {names(result.skipped)}", style="yellow")
    if result.not_finite:
        say(f"warning: {result.not_finite} images gave scores that are not finite, counted as wrong", style="yellow")
    say(f"top-1 {result.top1:.2f}% ({result.correct1} of {result.images})", style="bold")
    say(f"top-5 {result.top5:.2f}% ({result.correct5} of {result.images})", style="bold")
    facing = {}
    if under is not None:
        facing["attack"] = {**under.to_dict(), "top1": result.attacked_top1, "correct1": result.attacked1}
        say(f"top-1 {result.attacked_top1:.2f}% ({result.attacked1} of {result.images}) under {under}", style="bold")
    if as_json:
        emit(
            {
                "schema": 1,
                **network.facts,
                "data": data_dir or dataset,
                "images": result.images,
                "top1": result.top1,
                "top5": result.top5,
                "loss": result.loss,
                "correct1": result.correct1,
                "correct5": result.correct5,
                **facing,
                "skipped": list(result.skipped),
            }
        )


def _opened(model: str, options: dict[str, Any]) -> _Classifier:
    """Open a network or an artifact."""
    from retrofit.cli.network import open_network

    network = open_network(model, **options)
    facts = {"model": network.source.name, **network.conversion, "weights": network.weights}
    return _Classifier(network.model, network.preprocess, network.labels, facts)


def _exported(model: str, runtime: Any, given: dict[str, Any]) -> _Classifier:
    """Open an exported file; it has its own weights and sizes, and runs in float32 on the CPU."""
    from retrofit.export.onnx.exported_file import open_exported

    if flags := [f"--{name.replace('_', '-')}" for name, value in given.items() if value and value != "cpu"]:
        raise UsageError(
            f"{model} is an exported file: its weights and sizes are its own, and it runs in float32 on the CPU; "
            f"drop {', '.join(flags)}"
        )
    file = open_exported(Path(model), runtime)
    say(str(file), style="bold")
    facts = {
        "model": file.facts.get("model"),
        "target": file.facts.get("target"),
        "strength": file.facts.get("strength"),
        "weights": {"kind": "onnx", "from": model},
        "fold": file.facts.get("fold"),
        "runtime": file.runtime,
    }
    return _Classifier(file.network, file.preprocess, file.labels, facts)
