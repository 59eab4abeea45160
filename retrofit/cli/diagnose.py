"""Measure how normal MODEL's features are, whether it collapses, and what noise does to it, layer
by layer.

Write a page (index.html) with figures, the figures as PNG files, and results.json to a folder.

\b
    $ retrofit diagnose resnet50 --pretrained --data-dir photos
    $ retrofit diagnose resnet50 --pretrained --against resnet50-bnn.safetensors --data-dir photos
"""

from pathlib import Path
from typing import Any

import click

from retrofit.cli import options
from retrofit.cli.console import emit, progress_bar, say


@options.command("diagnose", __doc__, against="The measurement")
@options.model
@options.against("Second network to measure alongside MODEL.")
@options.option(
    "--images", "Maximum number of images to measure on.", click.IntRange(2), default=200
)
# On a CPU, memory of larger batches is handed back and asked for anew at every layer, which takes
# as long as computing.
@options.option("-b --batch-size", "Images per batch.", click.IntRange(2), default=6)
@options.option("--channels", "Channels per plot.", click.IntRange(1), default=20)
@options.device
@options.option(
    "--seed",
    "Random seed for channels, values and noise.",
    click.IntRange(0, 2**32 - 1),
    default=0,
)
@options.option(
    "-o --output folder", "Folder to write (default: NAME-diagnosis).", Path, metavar="DIR"
)
@options.attack
@options.data
@options.weights
@options.architecture
@options.force
@options.json
def command(
    model: str, against: str | None, folder: Path | None, force: bool, **arguments: Any
) -> None:
    from retrofit.attack import attack_on
    from retrofit.cli.network import device_named, file_stem, open_against, open_data, open_network
    from retrofit.diagnose.diagnosis import diagnose, labelled_batches
    from retrofit.diagnose.findings import sentences
    from retrofit.diagnose.report_folder import check_folder, write_report

    device = device_named(arguments["device"])
    kind = arguments.pop("attack")
    eps = arguments.pop("eps")
    folder = folder or Path(f"{file_stem(model)}-diagnosis")
    check_folder(folder, force)
    # The second network needs these too; `open_network` takes them out of `arguments`.
    pretrained = arguments["pretrained"]
    builder = arguments["network"]
    networks = {file_stem(model): open_network(model, arguments, beside=against)}
    if against is not None:
        name = file_stem(against)
        if name in networks:
            name += " (against)"
        networks[name] = open_against(against, builder, pretrained=pretrained)
    facts = {
        "schema": 1,
        "models": {name: network.facts for name, network in networks.items()},
        "data": arguments["data_dir"] or arguments["dataset"],
        "seed": arguments["seed"],
    }
    diagnoses = {}
    for name, network in networks.items():
        data = open_data(network, dict(arguments))
        batches = labelled_batches(network, data, arguments["images"], arguments["batch_size"])
        with progress_bar(f"measuring {name}") as move:
            diagnoses[name] = diagnose(
                network.model.to(device),
                batches,
                channels=arguments["channels"],
                seed=arguments["seed"],
                attack=attack_on(network.preprocess, kind, eps),
                progress=move,
            )
    for sentence in sentences(diagnoses):
        say(sentence)
    results = write_report(diagnoses, facts, folder)
    say(f"wrote {folder}/index.html", "bold")
    emit({**results, "output": str(folder)})
