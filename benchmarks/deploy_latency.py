"""What converted networks cost once they are exported: every target, float32 and INT8, in both
runtimes.

    pip install openvino
    python benchmarks/deploy_latency.py --checkpoint efficientnet-lite0.pth --images photos.tar

Ratios are to the source network, folded, in the same runtime and precision and the same turn.
Latency depends on the graph, not on the weights: networks have random weights, but for
tf_efficientnet_lite0 with a --checkpoint, whose INT8 files are then compared with its own float32
on the half of --images that no range was taken from. Normality layers have lambdas drawn from [0.4,
1.6]; the migrated and the lnn network stand at t = 1; "baked" is ln at t = 1, baked whole.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from export_latency import spread
from harness import ANY_DEVIATION, command_line, machine, markdown, publish
from torch import Tensor, nn

import retrofit
from retrofit.bench import measure_files
from retrofit.images.samples import sample_batches
from retrofit.networks.open_model import open_model
from retrofit.utils.onnx_runtimes import RUNTIMES

CONVOLUTIONAL: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    # label: target, its options, options of the export
    "source": (None, {}, {}),
    "bnn, polynomials": ("bnn", {}, {"fold": "poly", "degree": 2}),
    "bnn, exact": ("bnn", {}, {}),
    "ln": ("ln", {}, {}),
    "gn, 8 groups": ("gn", {"groups": 8}, {}),
    "ln-pn": ("ln-pn", {}, {}),
    "gn-pn, 8 groups": ("gn-pn", {"groups": 8}, {}),
    "baked": ("ln", {}, {}),
}
TRANSFORMER: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    "source": (None, {}, {}),
    "lnn, lambda frozen": ("lnn", {}, {"freeze_lambda": True}),
    "lnn": ("lnn", {}, {}),
}
TRAINED = "tf_efficientnet_lite0"
BATCH = 8
THREADS = 2


@dataclass(frozen=True)
class File:
    """An exported file.

    Attributes:
        label: The variant.
        precision: As it was exported.
        path: The file.
        agreement: Share of images for which its highest output is that of the network.
        bytes: Its size.
    """

    label: str
    precision: str
    path: Path
    agreement: float
    bytes: int


def network(name: str, label: str, images: list[Tensor], args: argparse.Namespace) -> nn.Module:
    """Build a variant."""
    torch.manual_seed(0)
    if trained(name, args):
        model = open_model(name, checkpoint=args.checkpoint, match="order").model.eval()
    else:
        model = timm.create_model(name).eval()
    to, options, _ = variants(name)[label]
    if to is None:
        return model
    model, _ = retrofit.convert(model, to, check=False, **options)
    retrofit.set_strength(model, 1.0)
    if to == "bnn":
        spread(model, torch.cat(images)[:8])
    if label == "baked":
        retrofit.bake(model, images, tolerance=ANY_DEVIATION)
    return model.eval()


def variants(name: str) -> dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]]:
    """Return what is measured of a network."""
    return TRANSFORMER if name.startswith("vit") else CONVOLUTIONAL


def write(name: str, folder: Path, args: argparse.Namespace) -> list[File]:
    """Write the files of a network that are missing; return those there are, the source last."""
    size = timm.create_model(name).pretrained_cfg["input_size"]
    images = list(torch.randn(8, *size, generator=torch.Generator().manual_seed(0)).split(4))
    if trained(name, args):
        images = sample_batches(args.images, open_model(name).preprocess, images=args.number)
    files = []
    for label, (_, _, options) in variants(name).items():
        build = functools.cache(functools.partial(network, name, label, images, args))
        for precision in args.precisions:
            stem = "-".join((name, label.replace(", ", "-").replace(" ", "-"), precision))
            path = folder / f"{stem}.onnx"
            facts = path.with_suffix(".json")
            if not facts.exists():
                report = retrofit.export_onnx(
                    copy.deepcopy(build()),
                    path,
                    input_size=size,
                    calibrate=images,
                    precision=precision,
                    tolerance=ANY_DEVIATION,
                    force=True,
                    **options,
                )
                agreement = report.parity.top1_agreement
                facts.write_text(json.dumps({"agreement": agreement, "bytes": report.bytes}))
                print(stem, facts.read_text(), flush=True)
            files.append(File(label, precision, path, **json.loads(facts.read_text())))
    return sorted(files, key=lambda file: file.label == "source")


def trained(name: str, args: argparse.Namespace) -> bool:
    """Tell whether a network has trained weights."""
    return name == TRAINED and args.checkpoint is not None


def latencies(files: list[File], args: argparse.Namespace) -> dict[str, list[str]]:
    """Measure the files of a network in turns; return a cell for each runtime and precision, by
    variant.
    """
    cells: dict[str, list[str]] = {file.label: [] for file in files}
    for runtime in args.runtimes:
        for precision in args.precisions:
            paths = {file.label: file.path for file in files if file.precision == precision}
            for cost in measure_files(
                paths, runtime, batch_size=BATCH, rounds=args.rounds, threads=THREADS
            ):
                text = f"1 ({1e3 * cost.seconds.median:.0f} ms)"
                if (ratio := cost.time_ratio) is not None:
                    text = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
                cells[cost.network].append(text)
    return cells


def rows(name: str, folder: Path, args: argparse.Namespace) -> Iterator[list[str]]:
    """Measure a network; give a row for each variant."""
    files = write(name, folder, args)
    for label, cells in latencies(files, args).items():
        own = [file for file in files if file.label == label]
        agreement = f"{own[-1].agreement:.1%}" if trained(name, args) else ""
        sizes = ", ".join(f"{file.bytes / 1e6:.1f}" for file in own)
        yield [name, label, *cells, agreement, sizes]


def main() -> None:
    parser = command_line(__doc__, out="deploy_latency.md")
    parser.add_argument(
        "--models", nargs="+", default=[TRAINED, "resnet50", "vit_tiny_patch16_224"]
    )
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=list(RUNTIMES))
    parser.add_argument("--precisions", nargs="+", default=["float32", "int8"])
    parser.add_argument("--checkpoint", type=Path, help=f"trained weights of {TRAINED}")
    parser.add_argument("--images", help="folder or .tar, for --checkpoint")
    parser.add_argument(
        "--number", type=int, default=64, help="of images at most, half of them to fit on"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="keep the files here, and use those that are there"
    )
    args = parser.parse_args()
    if args.checkpoint and not args.images:
        parser.error("--checkpoint needs --images")
    table = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            for cells in rows(name, folder, args):
                table.append(cells)
                print(*cells, flush=True)
    text = (
        f"{machine()}, {THREADS} threads, batches of {BATCH}; time over the source's in the same column "
        f"(medians of {args.rounds} turns, quartiles in brackets). Agreement: of the INT8 file with the network, "
        "where weights are trained."
    )
    columns = [
        f"{RUNTIMES[runtime]} {precision}"
        for runtime in args.runtimes
        for precision in args.precisions
    ]
    head = ["network", "variant", *columns, "agreement", "float32, INT8: MB"]
    publish(args.out, [text, "", *markdown(head, table)])


if __name__ == "__main__":
    main()
