"""`retrofit diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrofit.cli import completion
from retrofit.cli.console import emit, progress_bar, say
from retrofit.cli.device import chosen_device
from retrofit.cli.options import (
    architecture_options,
    attack_options,
    data_options,
    json_option,
    model_argument,
    weights_options,
)
from retrofit.errors import UsageError

if TYPE_CHECKING:
    from retrofit.diagnose import Diagnosis
    from retrofit.images.dataset import ImageData, SampledBatches
    from retrofit.networks.models import Network

HELP = """Measure how Gaussian MODEL's features are, whether it collapses, and what noise does to it, layer by layer.

Writes a page (index.html) with figures, the figures as PNG, and results.json into a folder.

\b
$ retrofit diagnose resnet50 --pretrained --data-dir photos
$ retrofit diagnose resnet50 --pretrained --against resnet50-bnn.safetensors --data-dir photos
"""


@click.command("diagnose", help=HELP)
@model_argument
@click.option("--against", metavar="MODEL", shell_complete=completion.model, help="A second network, beside the first.")
@data_options
@click.option("--images", type=click.IntRange(min=2), default=200, metavar="N", help="At most (default: 200).")
# On a CPU, memory of larger batches is handed back and asked for anew at every layer, which takes as long as computing.
@click.option("-b", "--batch-size", type=click.IntRange(min=2), default=6, metavar="N", help="Default: 6.")
@click.option(
    "--channels", type=click.IntRange(min=1), default=20, metavar="N", help="Q-Q plots a layer and batch (20)."
)
@click.option("--device", metavar="NAME", help="Default: cuda if there is one, else cpu.")
@click.option("--seed", type=int, default=0, metavar="N", help="Chooses channels, values and noise (default: 0).")
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path), metavar="DIR", help="NAME-diagnosis if left out."
)
@attack_options
@weights_options
@architecture_options
@click.option("--force", is_flag=True, help="Replace an earlier report.")
@json_option
def command(
    model: str,
    against: str | None,
    data_dir: str | None,
    dataset: str,
    split: str,
    class_map: Path | None,
    images: int,
    batch_size: int,
    channels: int,
    device: str | None,
    seed: int,
    folder: Path | None,
    attack: Any,
    eps: float | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `retrofit diagnose`."""
    from retrofit.cli.network import file_stem, open_network
    from retrofit.diagnose import DiagnosisOptions, Unlabelled, check_folder, diagnose, sentences, write_report
    from retrofit.evaluation.attack import attack_on
    from retrofit.images.dataset import SampledBatches, open_images
    from retrofit.networks.models import is_artifact

    if data_dir is None and not dataset:
        raise UsageError("there is nothing to measure on; give --data-dir DIR or --dataset NAME")
    place = chosen_device(device)
    folder = folder or Path(f"{file_stem(model)}-diagnosis")
    check_folder(folder, force)
    opened = {file_stem(model): open_network(model, beside=against, **options)}
    if against is not None:
        name = file_stem(against)
        second = {"network": options["network"]} if is_artifact(against) else {"pretrained": options["pretrained"]}
        opened[f"{name} (against)" if name in opened else name] = open_network(against, **second)
    found: dict[str, Diagnosis] = {}
    for name, network in opened.items():
        data = open_images(
            data_dir,
            dataset=dataset,
            split=split,
            class_map=class_map,
            labels=network.labels,
            channels=network.preprocess.input_size[0],
        )
        batches = SampledBatches(data, network.preprocess, images, batch_size)
        with progress_bar(f"measuring {name}", lines=True) as move:
            found[name] = diagnose(
                network.model.to(place),
                batches if _targets_are_outputs(network, data, batches) else Unlabelled(batches),
                DiagnosisOptions(channels=channels, seed=seed, attack=attack_on(network.preprocess, attack, eps)),
                None if move is None else lambda what, done, total: move(done, total, what),
            )
    for sentence in sentences(found):
        say(sentence)
    facts = {
        "schema": 1,
        "models": {
            name: {
                "model": network.source.name,
                **network.conversion,
                "weights": network.weights,
            }
            for name, network in opened.items()
        },
        "data": data_dir or dataset,
        "seed": seed,
    }
    write_report(found, facts, folder)
    say(f"wrote {folder}/index.html", style="bold")
    if as_json:
        networks = {name: diagnosis.to_dict() for name, diagnosis in found.items()}
        emit({**facts, "output": str(folder), "networks": networks})


def _targets_are_outputs(network: Network, data: ImageData, batches: SampledBatches) -> bool:
    """Whether the data's classes are known to be the network's outputs, so that an accuracy means something."""
    import torch

    from retrofit.utils.evaluating import evaluating
    from retrofit.utils.placement import device_of

    if data.matched != "order":
        return True
    if data.contradicts(network.labels):
        return False
    with evaluating(network.model):
        scores = network.model(batches[0][0][:1].to(device_of(network.model)))
    return isinstance(scores, torch.Tensor) and scores.ndim == 2 and scores.shape[1] == data.classes
