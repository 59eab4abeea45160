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
    with tarfile.open(args.test) as tar:
        files = sorted((one for one in tar.getmembers() if one.isfile()), key=lambda one: one.name)
        folders = sorted({PurePosixPath(one.name).parent.name for one in files})
        chosen = [
            (one, label)
            for label, folder in enumerate(folders)
            for one in [one for one in files if PurePosixPath(one.name).parent.name == folder][
                : args.images
            ]
        ]
        pictures = [
            np.asarray(
                Image.open(BytesIO(tar.extractfile(one).read()))
                .convert("RGB")
                .resize((args.size,) * 2, Image.BICUBIC)
            )
            for one, _ in chosen
        ]
    made = {"clean": np.stack(pictures)}
    for name in get_corruption_names():
        for severity in args.severities:
            np.random.seed(0)  # the library draws from it
            made[f"{name} {severity}"] = np.stack(
                [
                    np.uint8(corrupt(one, severity=severity, corruption_name=name))
                    for one in pictures
                ]
            )
    np.savez(args.out, labels=np.array([label for _, label in chosen]), **made)


if __name__ == "__main__":
    main()
