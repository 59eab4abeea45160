# /// script
# requires-python = ">=3.11"
# dependencies = ["imagecorruptions-imaug==1.1.5"]
# ///
"""Test pictures under the fifteen corruptions of Hendrycks and Dietterich (2019), made by
imagecorruptions.

    uv run --script benchmarks/corrupt.py test.tar corrupted.npz

The library brings OpenCV and numba, so uv gives the script an environment of its own.
(imagecorruptions-imaug is the fork that runs with today's numpy.) The first --images pictures of
each class (one folder of the tar each) are enlarged to --size by bicubic interpolation, as the
networks see them, and corrupted at each of --severities. The file holds `labels`, (N,), and for
"clean" and each "<corruption> <severity>" the pictures as (N, size, size, 3) of uint8.
"""

from __future__ import annotations

import argparse
import tarfile
from io import BytesIO
from pathlib import PurePosixPath

import numpy as np
from imagecorruptions import corrupt, get_corruption_names
from PIL import Image


def read(archive: str, each: int, size: int) -> tuple[list[np.ndarray], list[int]]:
    """Return the first pictures of each class of a tar, enlarged, and their labels."""
    pictures: list[np.ndarray] = []
    labels: list[int] = []
    with tarfile.open(archive) as tar:
        files = sorted((file for file in tar if file.isfile()), key=lambda file: file.name)
        folders = sorted({PurePosixPath(file.name).parent.name for file in files})
        for label, folder in enumerate(folders):
            same = [file for file in files if PurePosixPath(file.name).parent.name == folder]
            for file in same[:each]:
                picture = Image.open(BytesIO(tar.extractfile(file).read())).convert("RGB")
                pictures.append(np.asarray(picture.resize((size, size), Image.BICUBIC)))
                labels.append(label)
    return pictures, labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("test", metavar="TAR")
    parser.add_argument("out", metavar="NPZ")
    parser.add_argument("--images", type=int, default=20, help="pictures of each class")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--severities", type=int, nargs="+", default=[1, 3, 5])
    args = parser.parse_args()
    pictures, labels = read(args.test, args.images, args.size)
    arrays = {"clean": np.stack(pictures)}
    for name in get_corruption_names():
        for severity in args.severities:
            np.random.seed(0)  # the library draws from it
            corrupted = [
                np.uint8(corrupt(picture, severity=severity, corruption_name=name))
                for picture in pictures
            ]
            arrays[f"{name} {severity}"] = np.stack(corrupted)
    np.savez(args.out, labels=np.array(labels), **arrays)


if __name__ == "__main__":
    main()
