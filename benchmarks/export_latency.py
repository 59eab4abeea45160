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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

import retrofit
from retrofit.bench import measure_files
from retrofit.images.dataset import sample_batches
from retrofit.layers.batch_norm import RunningNormality
from retrofit.networks.models import open_model
from retrofit.utils.onnx_runtimes import RUNTIMES, open_onnx

MODELS = ["resnet50", "tf_efficientnet_lite0", "vit_tiny_patch16_224"]
VARIANTS = ["source", "strength 0", "exact", "poly"]
BATCH, THREADS = 8, 2


@torch.no_grad()
def spread(model: nn.Module, images: Tensor) -> nn.Module:
    """Draw lambda from [0.4, 1.6] and take the running statistics that belong to it, layer by layer
    in one pass.
    """

    def settle(layer: Any, args: tuple[Tensor, ...]) -> None:
        layer.running_lambda.uniform_(0.4, 1.6)
        layer.running_var, layer.running_mean = torch.var_mean(args[0], (0, 2, 3))
        layer.weight[layer.weight == 0] = 0.2

    found = [layer for layer in model.modules() if isinstance(layer, RunningNormality)]
    handles = [layer.register_forward_pre_hook(settle) for layer in found]
    model.eval()(images)
    for handle in handles:
        handle.remove()
    return model


def export(name: str, folder: Path, args: argparse.Namespace) -> dict[str, list[Path]]:
    """Write what is missing of a network's variants; return them for each runtime."""
    stem = "checkpoint" if args.checkpoint else name
    *shared, poly = (f"{stem}-{variant.replace(' ', '')}" for variant in VARIANTS)
    common = [folder / f"{variant}.onnx" for variant in shared]
    polys = {runtime: folder / f"{poly}-{runtime}.onnx" for runtime in args.runtimes}
    files = {runtime: [*common, file] for runtime, file in polys.items()}
    if all(file.exists() for file in [*common, *polys.values()]):
        return files
    torch.manual_seed(0)
    if args.checkpoint:
        network = open_model(args.checkpoint)
        model, images = (
            network.model.eval(),
            sample_batches(args.data_dir, network.preprocess, images=256),
        )
        source = timm.create_model(network.source.name, num_classes=model.num_classes)
        size: Sequence[int] = network.preprocess.input_size
    else:
        source = timm.create_model(name).eval()
        size = source.pretrained_cfg["input_size"]
        images = list(torch.randn(32, *size).split(8))
        to = "lnn" if name.startswith("vit") else "bnn"
        model = retrofit.convert(copy.deepcopy(source), to)[0]
        retrofit.set_strength(model, 1.0)
        spread(model, images[0])
    at_0 = copy.deepcopy(model)
    retrofit.set_strength(at_0, 0.0)
    estimated = not any(isinstance(layer, RunningNormality) for layer in model.modules())
    loose = 1.0 if args.tolerance is None else args.tolerance
    options = {"calibrate": images, "tolerance": loose if args.degree else args.tolerance}
    jobs: list[tuple[Path, nn.Module, dict[str, Any]]]
    jobs = [(file, net, {}) for file, net in zip(common, (source, at_0, model), strict=True)]
    for runtime, file in polys.items():
        fold = (
            {"freeze_lambda": True}
            if estimated
            else {"fold": "poly", "runtime": runtime, "degree": args.degree}
        )
        jobs.append((file, model, {**fold, **options}))
    for file, net, extra in jobs:
        if file.exists():
            continue
        report = retrofit.export_onnx(net, file, input_size=size, force=True, **extra)
        degrees = sorted(
            {f"{layer.form} {layer.degree}" for layer in report.layers if layer.degree}
        )
        agreement = report.parity.top1_agreement
        share = report.parity.max_abs_diff / report.parity.scale
        print(
            f"{file.name}: differs by {share:.2g}, top-1 {agreement}, {', '.join(degrees)}, {report.nodes}",
            flush=True,
        )
    return files


def disagreement(files: Sequence[Path], args: argparse.Namespace) -> float:
    """Share of all images for which poly's highest output is not exact's, in percent."""
    preprocess = open_model(args.checkpoint).preprocess
    batches = sample_batches(args.data_dir, preprocess, images=10**9)
    exact, poly = (open_onnx(files[VARIANTS.index(variant)]) for variant in ("exact", "poly"))
    differs = [
        exact(batch.numpy())[0].argmax(1) != poly(batch.numpy())[0].argmax(1) for batch in batches
    ]
    return 100 * float(np.concatenate(differs).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=list(RUNTIMES))
    parser.add_argument("--checkpoint", help="a trained artifact, instead of --models")
    parser.add_argument("--data-dir", help="images, for --checkpoint")
    parser.add_argument(
        "--degree", type=int, default=2, help="of polynomials, or lines; 0 to choose by --tolerance"
    )
    parser.add_argument("--tolerance", type=float, help="as retrofit export takes it")
    parser.add_argument("--rounds", type=int, default=15, help="0 only exports")
    parser.add_argument(
        "--folder", type=Path, help="keep the exported files here, and use those that are there"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "export_latency.md"
    )
    args = parser.parse_args()
    if args.checkpoint and not args.data_dir:
        parser.error("--checkpoint needs --data-dir")
    args.degree = args.degree or None
    lines = [
        f"{platform.machine()} CPU, {THREADS} threads, batch {BATCH}, float32; medians of {args.rounds} rounds, ms and "
        "ratio to the source",
        "",
        f"| network | runtime | {' | '.join(VARIANTS)} |",
        f"|---|---|{'---|' * len(VARIANTS)}",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in [args.checkpoint] if args.checkpoint else args.models:
            files = export(name, folder, args)
            if not args.rounds:
                continue
            for runtime, variants in files.items():
                label = Path(name).name
                if args.checkpoint:
                    label += f" (top-1 differs for {disagreement(variants, args):.1f}%)"
                turned = {
                    file.stem: file for file in reversed(variants)
                }  # the last is the reference: the source
                costs = measure_files(
                    turned, runtime, batch_size=BATCH, rounds=args.rounds, threads=THREADS
                )
                ratios = [
                    1.0 if cost.time_ratio is None else cost.time_ratio.median
                    for cost in reversed(costs)
                ]
                times = [1e3 * cost.seconds.median for cost in reversed(costs)]
                cells = [f"{ms:.0f} ({ratio:.2f})" for ms, ratio in zip(times, ratios, strict=True)]
                lines.append(f"| {label} | {runtime} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    if args.rounds:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
