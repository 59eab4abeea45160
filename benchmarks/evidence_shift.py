"""What the trained networks of the evidence do on corrupted pictures, each against its best baseline.

    python benchmarks/evidence_shift.py --checkpoint efficientnet-lite0.pth --keep DIR --test test.tar

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed, at the arm's learning rate,
is measured on the first --images test pictures of each class, clean and under six corruptions made with Pillow and
numpy; what is random in them is the same for all networks. The lines go to evidence_shift.jsonl, the table to
evidence_shift.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import torch
from evidence_arms import ARMS
from evidence_data import Labelled, read_tar, still
from evidence_kept import measured, parser
from evidence_table import Line, error
from evidence_train import measure
from PIL import Image, ImageEnhance, ImageFilter
from torch import nn

_Corruption = Callable[[Image.Image, np.random.Generator], Image.Image]


def _noise(picture: Image.Image, generator: np.random.Generator) -> Image.Image:
    values = np.asarray(picture, np.float32) + generator.normal(0, 20, (*picture.size[::-1], 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def _impulse(picture: Image.Image, generator: np.random.Generator) -> Image.Image:
    values = np.array(picture)
    places = generator.random(values.shape[:2]) < 0.04
    values[places] = generator.integers(0, 2, (int(places.sum()), 1)) * 255
    return Image.fromarray(values)


def _jpeg(picture: Image.Image, _: np.random.Generator) -> Image.Image:
    file = BytesIO()
    picture.save(file, "JPEG", quality=15)
    return Image.open(file).convert("RGB")


AGAINST = {
    "bn-frozen-std": "bn-frozen",
    "ln": "bn-frozen",
    "ln-pn": "bn-frozen",
    "bnn-0.1": "bn-noise-0.1",
    "bnn": "bn",
}
CORRUPTIONS: dict[str, _Corruption] = {
    "clean": lambda picture, _: picture,
    "Gaussian noise, 20 of 255": _noise,
    "impulse noise, 4%": _impulse,
    "blur, 1 pixel": lambda picture, _: picture.filter(ImageFilter.GaussianBlur(1)),
    "contrast 0.3": lambda picture, _: ImageEnhance.Contrast(picture).enhance(0.3),
    "brightness 1.8": lambda picture, _: ImageEnhance.Brightness(picture).enhance(1.8),
    "JPEG, quality 15": _jpeg,
}


def corrupted(pictures: Labelled, name: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return corrupted pictures as they are evaluated, and their labels."""
    generator = np.random.default_rng(0)
    return still([(CORRUPTIONS[name](picture, generator), label) for picture, label in pictures], size)


def table(lines: list[Line], arms: list[str], batch: int) -> list[str]:
    """Return top-1 of each arm under each corruption, and the calibration error, with the paired difference."""
    names = [name for name in arms if any(line["arm"] == name for line in lines)]
    heads = [
        ARMS[name].label + (f" (against {ARMS[AGAINST[name]].label})" if name in AGAINST else "") for name in names
    ]
    text = [f"| batches of {batch} | {' | '.join(heads)} |", "|---|" + "---|" * len(names)]
    rows = [(name, "top1") for name in CORRUPTIONS] + [("mean of the corrupted", "top1")]
    rows += [("clean", "ece"), ("mean of the corrupted", "ece")]
    for corruption, part in rows:
        wanted = [name for name in CORRUPTIONS if name != "clean"] if "mean" in corruption else [corruption]
        cells = []
        for name in names:
            own, theirs = (
                {
                    line["seed"]: statistics.fmean(line[part][key] for key in wanted)
                    for line in lines
                    if (line["arm"], line["batch"]) == (one, batch)
                }
                for one in (name, AGAINST.get(name))
            )
            gains = [own[seed] - theirs[seed] for seed in sorted(own.keys() & theirs.keys())]
            gain = f" ({statistics.fmean(gains):+.1f} ± {error(gains)})" if gains else ""
            cells.append(f"{statistics.fmean(own.values()):.1f}{gain}")
        what = "calibration error, " if part == "ece" else ""
        text.append(f"| {what}{corruption} | {' | '.join(cells)} |")
    return text


def main() -> None:
    options = parser(__doc__, list(dict.fromkeys([*AGAINST.values(), *AGAINST])), "evidence_shift.jsonl")
    options.add_argument("--images", type=int, default=100, help="test pictures of each class")
    args = options.parse_args()

    @functools.cache
    def tensors(size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        pictures = read_tar(args.test)
        chosen = [one for label in range(10) for one in [p for p in pictures if p[1] == label][: args.images]]
        return {one: corrupted(chosen, one, size) for one in CORRUPTIONS}

    def corruptions(model: nn.Module, run: Line) -> dict[str, Any]:
        found = {one: measure(model, *tensors(run["img_size"])[one]) for one in CORRUPTIONS}
        made = {part: {one: round(value[part], 2) for one, value in found.items()} for part in ("top1", "ece")}
        return {"images_each": args.images, **made}

    lines = measured(args, corruptions)
    seeds = sorted({line["seed"] for line in lines})
    text = [
        f"Top-1 in percent, mean over {len(seeds)} seeds, {10 * args.images:,} test pictures; in brackets the paired "
    ]
    text[0] += "difference to the baseline, ± standard error over seeds."
    for batch in args.batch_sizes:
        text += ["", *table(lines, args.arms, batch)]
    args.out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
