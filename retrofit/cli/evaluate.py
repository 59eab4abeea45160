"""Measure MODEL's top-1 and top-5 accuracy, with its own preprocessing.

MODEL may also be an .onnx file written by `retrofit export`, whose metadata says how to preprocess
images. Images that cannot be read are listed and left out of the figures.

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

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli import options
from retrofit.cli.console import emit, progress_bar, say, warn, warn_of_unreadable
from retrofit.errors import UsageError
from retrofit.utils.text import plural

if TYPE_CHECKING:
    from retrofit.evaluation import Accuracy

# Flags that an exported file takes.
_OF_FILES = (
    "model",
    "data_dir",
    "dataset",
    "split",
    "class_map",
    "batch_size",
    "workers",
    "runtime",
    "json",
)
_AS_IT_IS = (
    "whose weights and sizes are its own, which runs in float32 on the CPU, and which gives no "
    "gradients"
)


@options.command("evaluate", __doc__, batch_size="Machine and runtime", attack="Attack")
@options.model
@options.data
@options.weights
@options.option("-b --batch-size", "Images per batch.", click.IntRange(1), default=64)
@options.option("-j --workers", "Processes that decode images.", click.IntRange(0), default=2)
@options.precision
@options.runtime
@options.attack
@options.architecture
@options.json
def command(model: str, runtime: Any, attack: Any, eps: float | None, **arguments: Any) -> None:
    """Measure accuracy.

    Raises:
        UsageError: If `--runtime` is given for a network that is no exported file.
    """
    from retrofit.attack import attack_on
    from retrofit.cli.network import open_data, open_network, placement, taken
    from retrofit.evaluation import ExportedFile, evaluate, open_exported
    from retrofit.layers.strength import odd_strengths
    from retrofit.networks.open_model import Network

    network: Network | ExportedFile
    if Path(model).suffix == ".onnx":
        of_files: tuple[str, ...] = _OF_FILES
        if arguments["device"] == "cpu":
            of_files = (*_OF_FILES, "device")
        options.refuse_flags(f"{model} is an exported file, {_AS_IT_IS}", but=of_files)
        network = open_exported(Path(model), runtime or "onnxruntime")
        arguments["device"] = "cpu"
        say(str(network), "bold")
    elif runtime is not None:
        raise UsageError(f"--runtime runs exported files (.onnx), and {model} is none; drop it")
    else:
        network = open_network(model, arguments)
    device, amp = placement(arguments)
    under = attack_on(network.preprocess, attack, eps)
    odd = odd_strengths(network.model)
    if odd:
        warn(odd)
    answer = {**network.facts, "data": arguments["data_dir"] or arguments["dataset"]}
    data = open_data(network, arguments)
    with progress_bar("evaluating") as move:
        result = evaluate(
            network.model,
            data,
            network.preprocess,
            **taken(arguments, evaluate),
            device=device,
            amp=amp,
            attack=under,
            progress=move,
        )
    _warn_of(result, data.doubt(result.outputs, network.labels))
    say(f"top-1 {result.top1:.2f}% ({result.correct1} of {result.images})", "bold")
    say(f"top-5 {result.top5:.2f}% ({result.correct5} of {result.images})", "bold")
    doubt = result.no_better_than_one_answer(data.names)
    if doubt:
        warn(doubt)
    answer |= result.to_dict()
    if under is not None:
        attacked = f"top-1 {result.attacked_top1:.2f}% ({result.attacked1} of {result.images})"
        say(f"{attacked} under {under}", "bold")
        answer["attack"] = {
            **under.to_dict(),
            "top1": result.attacked_top1,
            "correct1": result.attacked1,
        }
    emit(answer)


def _warn_of(result: "Accuracy", doubt: str) -> None:
    """Warn of what makes the figures doubtful."""
    if doubt:
        warn(f"{doubt}; if that is wrong, give --class-map FILE")
    warn_of_unreadable(result.skipped)
    if result.not_finite:
        images = plural(result.not_finite, "image")
        warn(f"{images} gave scores that are not finite, counted as wrong")
