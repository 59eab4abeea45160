"""What the power transform costs after export: the source folded, exact and poly, in ONNX Runtime
and OpenVINO.

    pip install openvino
    python benchmarks/export_latency.py
    python benchmarks/export_latency.py --checkpoint run/best.safetensors --data-dir photos.tar

Each network is converted (BatchNorm to bnn, LayerNorm to lnn) at strength 1, its lambdas drawn
evenly from [0.4, 1.6], its running statistics taken layer by layer for them, and gammas that are 0
at initialisation set to 0.2; where lambda is estimated from the input, "poly" is --freeze-lambda. A
--checkpoint is a converted and trained artifact, as it is; the images of --data-dir are fitted on,
and exact and poly are compared on all of them. Every round runs each file once, so that ratios are
of one moment.
"""

from __future__ import annotations

import argparse
import copy
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from harness import command_line, markdown, publish
from torch import Tensor, nn

import retrofit
from retrofit.bench import measure_files
from retrofit.images.samples import sample_batches
from retrofit.layers.batch_norm import RunningNormality
from retrofit.networks.open_model import open_model
from retrofit.utils.onnx_runtimes import RUNTIMES, open_onnx

MODELS = ["resnet50", "tf_efficientnet_lite0", "vit_tiny_patch16_224"]
VARIANTS = ["source", "strength 0", "exact", "poly"]
BATCH = 8
THREADS = 2


@torch.no_grad()
def spread(model: nn.Module, images: Tensor) -> nn.Module:
    """Draw lambda from [0.4, 1.6] and take the running statistics that belong to it, layer by layer
    in one pass.
    """

    def settle(layer: Any, args: tuple[Tensor, ...]) -> None:
        layer.running_lambda.uniform_(0.4, 1.6)
        layer.running_var, layer.running_mean = torch.var_mean(args[0], (0, 2, 3))
        layer.weight[layer.weight == 0] = 0.2

    layers = [layer for layer in model.modules() if isinstance(layer, RunningNormality)]
    handles = [layer.register_forward_pre_hook(settle) for layer in layers]
    model.eval()(images)
    for handle in handles:
        handle.remove()
    return model


@dataclass(frozen=True)
class Subject:
    """What is exported.

    Attributes:
        source: The network before its conversion.
        model: After it, as it was trained or at strength 1.
        images: Batches to fit on.
        size: (C, H, W).
    """

    source: nn.Module
    model: nn.Module
    images: list[Tensor]
    size: Sequence[int]


def trained(args: argparse.Namespace) -> Subject:
    """Open the artifact of --checkpoint."""
    network = open_model(args.checkpoint)
    model = network.model.eval()
    source = timm.create_model(network.source.name, num_classes=model.num_classes)
    images = sample_batches(args.data_dir, network.preprocess, images=256)
    return Subject(source, model, images, network.preprocess.input_size)


def untrained(name: str) -> Subject:
    """Convert a network with random weights and lambdas."""
    source = timm.create_model(name).eval()
    size = source.pretrained_cfg["input_size"]
    images = list(torch.randn(32, *size).split(8))
    to = "lnn" if name.startswith("vit") else "bnn"
    model, _ = retrofit.convert(copy.deepcopy(source), to)
    retrofit.set_strength(model, 1.0)
    return Subject(source, spread(model, images[0]), images, size)


def export(name: str, folder: Path, args: argparse.Namespace) -> list[Path]:
    """Write what is missing of a network's variants; return them."""
    stem = "checkpoint" if args.checkpoint else name
    files = [folder / f"{stem}-{variant.replace(' ', '')}.onnx" for variant in VARIANTS]
    if not all(file.exists() for file in files):
        torch.manual_seed(0)
        subject = trained(args) if args.checkpoint else untrained(name)
        write_folded(subject, files[:-1])
        write_poly(subject, files[-1], args)
    return files


def write_folded(subject: Subject, files: Sequence[Path]) -> None:
    """Write the variants that keep the function: source, strength 0 and exact."""
    at_0 = copy.deepcopy(subject.model)
    retrofit.set_strength(at_0, 0.0)
    for file, model in zip(files, (subject.source, at_0, subject.model), strict=True):
        write(file, model, subject.size)


def write_poly(subject: Subject, file: Path, args: argparse.Namespace) -> None:
    """Write the approximation."""
    tolerance = args.tolerance
    if args.degree and tolerance is None:
        tolerance = 1.0
    fold: dict[str, Any] = {"fold": "poly", "degree": args.degree}
    if not any(isinstance(layer, RunningNormality) for layer in subject.model.modules()):
        fold = {"freeze_lambda": True}
    write(
        file,
        subject.model,
        subject.size,
        calibrate=subject.images,
        tolerance=tolerance,
        **fold,
    )


def write(file: Path, model: nn.Module, size: Sequence[int], **options: Any) -> None:
    """Export a network, unless its file exists, and show how far the file is from it."""
    if file.exists():
        return
    report = retrofit.export_onnx(model, file, input_size=size, force=True, **options)
    degrees = sorted({f"{layer.form} {layer.degree}" for layer in report.layers if layer.degree})
    parity = report.parity
    print(
        f"{file.name}: differs by {parity.max_abs_diff / parity.scale:.2g}, "
        f"top-1 {parity.top1_agreement}, {', '.join(degrees)}, {report.nodes}",
        flush=True,
    )


def disagreement(files: Sequence[Path], args: argparse.Namespace) -> float:
    """Return the share of all images for which poly's highest output is not exact's, in percent."""
    preprocess = open_model(args.checkpoint).preprocess
    batches = sample_batches(args.data_dir, preprocess, images=10**9)
    exact, poly = (open_onnx(files[VARIANTS.index(variant)]) for variant in ("exact", "poly"))
    differs = [
        exact(batch.numpy())[0].argmax(1) != poly(batch.numpy())[0].argmax(1) for batch in batches
    ]
    return 100 * float(np.concatenate(differs).mean())


def latencies(files: Sequence[Path], runtime: str, rounds: int) -> list[str]:
    """Measure a network's variants in turns; return a cell for each."""
    # The last file is the reference: the source.
    turned = {file.stem: file for file in reversed(files)}
    costs = measure_files(turned, runtime, batch_size=BATCH, rounds=rounds, threads=THREADS)
    cells = []
    for cost in reversed(costs):
        ratio = 1.0 if cost.time_ratio is None else cost.time_ratio.median
        cells.append(f"{1e3 * cost.seconds.median:.0f} ({ratio:.2f})")
    return cells


def rows(name: str, folder: Path, args: argparse.Namespace) -> Iterator[list[str]]:
    """Export a network and measure it; give a row for each runtime."""
    files = export(name, folder, args)
    if not args.rounds:
        return
    label = Path(name).name
    if args.checkpoint:
        label += f" (top-1 differs for {disagreement(files, args):.1f}%)"
    for runtime in args.runtimes:
        yield [label, runtime, *latencies(files, runtime, args.rounds)]


def main() -> None:
    parser = command_line(__doc__, out="export_latency.md")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=list(RUNTIMES))
    parser.add_argument("--checkpoint", help="a trained artifact, instead of --models")
    parser.add_argument("--data-dir", help="images, for --checkpoint")
    parser.add_argument(
        "--degree", type=int, default=2, help="of polynomials; 0 to choose by --tolerance"
    )
    parser.add_argument("--tolerance", type=float, help="as retrofit export takes it")
    parser.add_argument("--rounds", type=int, default=15, help="0 only exports")
    parser.add_argument(
        "--folder", type=Path, help="keep the exported files here, and use those that are there"
    )
    args = parser.parse_args()
    if args.checkpoint and not args.data_dir:
        parser.error("--checkpoint needs --data-dir")
    args.degree = args.degree or None
    table = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in [args.checkpoint] if args.checkpoint else args.models:
            for cells in rows(name, folder, args):
                table.append(cells)
                print(*cells, flush=True)
    if not args.rounds:
        return
    head = (
        f"{platform.machine()} CPU, {THREADS} threads, batch {BATCH}, float32; medians of {args.rounds} rounds, ms and "
        "ratio to the source"
    )
    publish(args.out, [head, "", *markdown(["network", "runtime", *VARIANTS], table)])


if __name__ == "__main__":
    main()
