"""Image files in a folder or a tar, a folder per class."""

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from retrofit.errors import RetrofitError
from retrofit.utils.text import printable

# What people call images. Those that Pillow cannot read are listed as unreadable: none is dropped.
_SUFFIXES = (
    *(
        ".avif",
        ".bmp",
        ".dib",
        ".gif",
        ".heic",
        ".heif",
        ".j2k",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".jxl",
    ),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".svg", ".tga", ".tif", ".tiff", ".webp"),
)
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
# gzip, bzip2, xz, zstd
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
ADVICE = "give a folder or tar with a folder per class"

# offset and size in a file
Place = tuple[int, int]
_WHOLE: Place = (0, -1)


class ImageFiles:
    """Images below a folder, or inside a tar and the tars in it, in natural order; their folders
    are the classes.

    With `topmost` the topmost folder is the class, as for torchvision's ImageFolder, and not the
    innermost; images of no folder are then left out. A RetrofitError says that a folder or the tar
    cannot be read, that two paths lead to one folder, so that its images would count twice, or that
    there is no image.
    """

    def __init__(self, root: Path, *, topmost: bool = False) -> None:
        self.root, self._packed = str(root), not root.is_dir()
        names, empty = ([], []) if self._packed else _in_folder(root)
        # folders without an image, which are no classes
        self.empty = tuple(empty)
        places = dict(_in_tar(root)) if self._packed else dict.fromkeys(names, _WHOLE)
        if topmost:
            places = {name: place for name, place in places.items() if "/" in name}
        if not places:
            raise RetrofitError(
                f"no images found in {root} (.png, .jpg, .webp, .tif, ...); {ADVICE}"
            )
        self._names = sorted(places, key=_natural)
        self._places = [places[name] for name in self._names]
        labels = [
            name.split("/")[0] if topmost else os.path.basename(os.path.dirname(name))
            for name in self._names
        ]
        order: Callable[[str], Any] = str if topmost else _natural
        # in the order of the targets
        self.classes = sorted(set(labels), key=order)
        number = {name: index for index, name in enumerate(self.classes)}
        self._targets = [number[label] for label in labels]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        """Return an image's bytes and its target; an OSError if it is not a regular file, or cannot
        be read.

        Nothing is kept open: processes that share an open file would move each other's place in it.
        """
        path = self.root if self._packed else os.path.join(self.root, self._names[index])
        # opening a pipe would wait for ever
        if not os.path.isfile(path):
            raise OSError(f"{path} is not a regular file")
        offset, size = self._places[index]
        with open(path, "rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(size)), self._targets[index]

    def filename(self, index: int) -> str:
        """Return an image's path inside the folder or tar."""
        return self._names[index]


def _in_folder(root: Path) -> tuple[list[str], list[str]]:
    """Return the images below a folder, and the folders without any; a link to a folder above holds
    nothing new.
    """

    def refuse(error: OSError) -> None:
        what = f"cannot read the folder {printable(error.filename, 200)} ({error.strerror})"
        raise RetrofitError(
            f"{what}; its images would be missing: make it readable or remove it"
        ) from error

    images: list[str] = []
    empty: list[str] = []
    paths: dict[tuple[int, int], Path] = {}
    for place, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        folders.sort()
        path, status = Path(os.path.relpath(place, root)), os.stat(place)
        first = paths.setdefault((status.st_dev, status.st_ino), path)
        if first in path.parents:
            folders.clear()
            continue
        if first != path:
            raise RetrofitError(
                f"{first} and {path} in {root} are the same folder and would count twice; remove one"
            )
        names = [str(path / name) for name in files if _is_image(name)]
        images += names
        if not names and not folders and path != Path():
            empty.append(str(path))
    return images, empty


def _in_tar(path: Path) -> Iterator[tuple[str, Place]]:
    """Give the paths and places of the images in a tar; a tar in it counts as a folder."""
    if not path.name.lower().endswith(_TARS):
        raise RetrofitError(
            f"no images found in {path}, which is neither a folder nor a .tar; {ADVICE}"
        )
    try:
        with open(path, "rb") as file:
            if file.read(6).startswith(_COMPRESSED):
                raise RetrofitError(
                    f"{path} is compressed; decompress it to a .tar, or unpack it into a folder"
                )
            file.seek(0)
            yield from _members(file, "", 0)
    except (OSError, tarfile.TarError) as error:
        raise RetrofitError(f"no images found in {path} ({error}); {ADVICE}") from error


def _members(file: IO[bytes] | None, folder: str, start: int) -> Iterator[tuple[str, Place]]:
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            name = os.path.normpath(os.path.join(folder, member.name))
            if _is_image(name):
                target = member
                # a file that was packed twice is a link to its first copy
                while target.islnk():
                    target = tar.getmember(target.linkname)
                yield name, (start + target.offset_data, target.size if target.isreg() else 0)
            elif member.isreg() and name.lower().endswith(".tar"):
                yield from _members(tar.extractfile(member), name[:-4], start + member.offset_data)
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        # tarfile takes a damaged header for the end
        if tar.fileobj.read(512).strip(b"\0"):
            raise tarfile.ReadError(f"damaged at byte {start + tar.offset:,}")


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def _natural(name: str) -> tuple[list[object], str]:
    """Order numbers in names by value, as timm does; names that differ in case alone have an order
    too.
    """
    parts: list[object] = re.split(r"(\d+)", name.lower())
    return [int(str(part)) if index % 2 else part for index, part in enumerate(parts)], name
