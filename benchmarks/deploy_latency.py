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
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from evidence_train import machine
from export_latency import spread
from torch import Tensor, nn

import retrofit
from retrofit.bench import measure_files
from retrofit.images.dataset import sample_batches
from retrofit.networks.models import open_model
from retrofit.utils.onnx_runtimes import RUNTIMES

CONVOLUTIONAL: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    # label: target, its options, options of the export
    "source": (None, {}, {}),
    "bnn, polynomials": ("bnn", {}, {"fold": "poly", "degree": 2}),
    "bnn, for OpenVINO": ("bnn", {}, {"fold": "poly", "degree": 2, "runtime": "openvino"}),
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
BATCH, THREADS = 8, 2


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
        retrofit.bake(model, images, tolerance=math.inf)
    return model.eval()


def variants(name: str) -> dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]]:
    """Return what is measured of a network."""
    return TRANSFORMER if name.startswith("vit") else CONVOLUTIONAL


def write(name: str, folder: Path, args: argparse.Namespace) -> list[File]:
    """Write the files of a network that are missing; return those there are, the source last."""
    found = []
    size = timm.create_model(name).pretrained_cfg["input_size"]
    images = list(torch.randn(8, *size, generator=torch.Generator().manual_seed(0)).split(4))
    if trained(name, args):
        images = sample_batches(args.images, open_model(name).preprocess, images=args.number)
    for label, (_, _, export) in variants(name).items():
        model = None
        for precision in args.precisions:
            stem = "-".join((name, label.replace(", ", "-").replace(" ", "-"), precision))
            path, facts = folder / f"{stem}.onnx", folder / f"{stem}.json"
            if not facts.exists():
                model = network(name, label, images, args) if model is None else model
                report = retrofit.export_onnx(
                    copy.deepcopy(model),
                    path,
                    input_size=size,
                    calibrate=images,
                    precision=precision,
                    tolerance=math.inf,
                    force=True,
                    **export,
                )
                facts.write_text(
                    json.dumps({"agreement": report.parity.top1_agreement, "bytes": report.bytes})
                )
                print(stem, facts.read_text(), flush=True)
            found.append(File(label, precision, path, **json.loads(facts.read_text())))
    return sorted(found, key=lambda file: file.label == "source")


def trained(name: str, args: argparse.Namespace) -> bool:
    """Whether a network has trained weights."""
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
                ratio = cost.time_ratio
                if ratio is None:
                    cells[cost.file].append(f"1 ({1e3 * cost.seconds.median:.0f} ms)")
                else:
                    cells[cost.file].append(
                        f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
                    )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "deploy_latency.md"
    )
    args = parser.parse_args()
    if args.checkpoint and not args.images:
        parser.error("--checkpoint needs --images")
    head = [
        f"{RUNTIMES[runtime]} {precision}"
        for runtime in args.runtimes
        for precision in args.precisions
    ]
    lines = [
        f"{machine()}, {THREADS} threads, batches of {BATCH}; time over the source's in the same column "
        f"(medians of {args.rounds} turns, quartiles in brackets). Agreement: of the INT8 file with the network, "
        "where weights are trained.",
        "",
        f"| network | variant | {' | '.join(head)} | agreement | float32, INT8: MB |",
        f"|---|---|{'---|' * (len(head) + 2)}",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            files = write(name, folder, args)
            for label, cells in latencies(files, args).items():
                own = [file for file in files if file.label == label]
                same = own[-1].agreement if trained(name, args) else None
                sizes = ", ".join(f"{file.bytes / 1e6:.1f}" for file in own)
                cells += ["" if same is None else f"{same:.1%}", sizes]
                lines.append(f"| {name} | {label} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
