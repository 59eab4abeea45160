"""What the trained networks of the evidence do on corrupted pictures, each against its best baseline.

    python benchmarks/evidence_shift.py --checkpoint efficientnet-lite0.pth --keep DIR --test test.tar

DIR holds the weights that `evidence.py --keep DIR` left. Each arm's network of each seed, at the arm's learning rate,
is measured on the first --images test pictures of each class, clean and under six corruptions made with Pillow and
numpy; what is random in them is the same for all networks. The lines go to evidence_shift.jsonl, the table to
evidence_shift.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence_arms import ARMS, convert, trained_network
from evidence_data import Labelled, read_tar, still
from evidence_table import SETUP, Line, Setup, error
from evidence_train import file_name, measure
from PIL import Image, ImageEnhance, ImageFilter

RESULTS = Path(__file__).parent / "results"
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


AGAINST = {"ln": "bn-frozen", "ln-pn": "bn-frozen", "bnn-0.1": "bn-noise-0.1", "bnn": "bn"}
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
    for corruption, measured in rows:
        wanted = [name for name in CORRUPTIONS if name != "clean"] if "mean" in corruption else [corruption]
        cells = []
        for name in names:
            own, theirs = (
                {
                    line["seed"]: statistics.fmean(line[measured][key] for key in wanted)
                    for line in lines
                    if (line["arm"], line["batch"]) == (one, batch)
                }
                for one in (name, AGAINST.get(name))
            )
            gains = [own[seed] - theirs[seed] for seed in sorted(own.keys() & theirs.keys())]
            gain = f" ({statistics.fmean(gains):+.1f} ± {error(gains)})" if gains else ""
            cells.append(f"{statistics.fmean(own.values()):.1f}{gain}")
        what = "calibration error, " if measured == "ece" else ""
        text.append(f"| {what}{corruption} | {' | '.join(cells)} |")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder of trained weights; none: only the table")
    parser.add_argument("--checkpoint", help="of the source network")
    parser.add_argument("--test", metavar="TAR")
    parser.add_argument("--images", type=int, default=100, help="test pictures of each class")
    parser.add_argument(
        "--arms", nargs="+", default=list(dict.fromkeys([*AGAINST.values(), *AGAINST])), choices=list(ARMS)
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8])
    parser.add_argument("--runs", type=Path, default=RESULTS / "evidence.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_shift.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    every = [json.loads(line) for line in args.runs.read_text().splitlines()]
    done: list[Line] = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    setup = Setup([line for line in every if line["data"] == "cifar10" and line["images"] == 500])
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for batch in args.batch_sizes if args.keep else []:
        for name in args.arms:
            for line in setup.of(name, batch):
                key: dict[str, Any] = {one: line[one] for one in (*SETUP, "arm", "batch", "lr", "seed")}
                weights = args.keep / f"{file_name(in_order(line))}.pth"
                if any(all(one[part] == value for part, value in key.items()) for one in done) or not weights.exists():
                    continue
                if not tensors:
                    pictures = read_tar(args.test)
                    chosen = [
                        one for label in range(10) for one in [p for p in pictures if p[1] == label][: args.images]
                    ]
                    tensors = {one: corrupted(chosen, one, line["img_size"]) for one in CORRUPTIONS}
                model = convert(trained_network(line["model"], args.checkpoint, 10, line["seed"]), ARMS[name])
                model.load_state_dict(torch.load(weights, weights_only=True))
                found = {one: measure(model, *tensors[one]) for one in CORRUPTIONS}
                made = {part: {one: round(value[part], 2) for one, value in found.items()} for part in ("top1", "ece")}
                done.append({**key, "images_each": args.images, **made})
                with args.out.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(name, batch, line["seed"], made, flush=True)
    seeds = sorted({line["seed"] for line in done})
    text = [
        f"Top-1 in percent, mean over {len(seeds)} seeds, {10 * args.images:,} test pictures; in brackets the paired "
    ]
    text[0] += "difference to the baseline, ± standard error over seeds."
    for batch in args.batch_sizes:
        text += ["", *table(done, args.arms, batch)]
    args.out.with_suffix(".md").write_text("\n".join(text) + "\n")


def in_order(line: Line) -> dict[str, Any]:
    """Return the part of a line that names its run, in the order of its making."""
    names = list(line)
    return {name: line[name] for name in names[: names.index("seed") + 1]}


if __name__ == "__main__":
    main()
