"""Folders of small pictures whose class can be read off their colour."""

import tarfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from retrofit.record import Preprocess

PLAIN = Preprocess((3, 16, 16), (0.0,) * 3, (1.0,) * 3, "nearest", 1.0)
COLOURS = {"ant": (250, 10, 10), "bee": (10, 250, 10), "cat": (10, 10, 250)}


def write_folder(root: Path, wrong: int = 2, each: int = 4) -> Path:
    """Write `each` pictures of each colour into the folder of its class; the first `wrong` bees
    look like ants.
    """
    for name in COLOURS:
        (root / name).mkdir(parents=True)
        for number in range(each):
            colour = COLOURS["ant" if name == "bee" and number < wrong else name]
            Image.new("RGB", (40, 30), colour).save(root / name / f"{number}.png")
    return root


def write_tar(root: Path, path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for file in sorted(root.rglob("*.png")):
            tar.add(file, str(file.relative_to(root)))
    return path


class Colours(nn.Module):
    """Scores a picture in [0, 1] by how near its mean colour is to each class's, at the first 3 of
    7 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("palette", torch.tensor(list(COLOURS.values())) / 255)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3))
        scores = torch.full((len(x), 7), -9.0)
        scores[:, :3] = -torch.cdist(mean, self.palette)
        return scores
