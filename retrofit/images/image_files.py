"""Image files in a folder or a tar, one folder a class."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from retrofit.errors import RetrofitError
from retrofit.utils.text import printable

# What people call images. Those that Pillow cannot read are found too, and listed as unreadable: none is dropped.
_SUFFIXES = (
    *(".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".jxl"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".svg", ".tga", ".tif", ".tiff", ".webp"),
)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_ADVICE = "give a folder or tar with one folder a class"

Place = tuple[int, int]  # offset and size in a tar


class ImageFiles:
    """Images of a folder or tar in natural order, each of the class that its folder names.

    Args:
        root: The folder or tar.
        found: Each image's path inside it, "/" between folders, and its place in a tar (None in a folder).
        topmost: Whether the topmost folder is the class, as for torchvision's ImageFolder, and not the innermost.
        empty: Folders without an image.

    Attributes:
        classes: Names in the order of the targets.
        empty: Folders without an image, which are no classes.
    """

    def __init__(
        self, root: Path, found: dict[str, Place | None], *, topmost: bool = False, empty: tuple[str, ...] = ()
    ) -> None:
        order: Callable[[str], Any] = str if topmost else _natural
        self.root, self.empty = str(root), empty
        self._names = sorted(found, key=_natural)
        self._places = None if root.is_dir() else [found[name] for name in self._names]
        labels = [_topmost(name) if topmost else os.path.basename(os.path.dirname(name)) for name in self._names]
        self.classes = sorted(set(labels), key=order)
        number = {name: index for index, name in enumerate(self.classes)}
        self._targets = [number[label] for label in labels]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        """Return an image's bytes and its target.

        Nothing is kept open: processes that share an open file would move each other's place in it.

        Raises:
            OSError: If it is not a regular file, or cannot be read.
        """
        path = self.root if self._places else os.path.join(self.root, self._names[index])
        if not os.path.isfile(path):  # opening a pipe would wait for ever
            raise OSError(f"{path} is not a regular file")
        offset, size = (self._places[index] if self._places else None) or (0, -1)
        with open(path, "rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(size)), self._targets[index]

    def filename(self, index: int) -> str:
        """Return an image's path inside the folder or tar."""
        return self._names[index]


def find_images(root: Path, *, topmost: bool = False) -> ImageFiles:
    """Find the images below a folder, or inside a tar and the tars in it.

    Args:
        root: The folder or .tar file.
        topmost: As for `ImageFiles`; images of no folder are then left out.

    Raises:
        RetrofitError: If a folder or the tar cannot be read, two paths lead to one folder, so that its images would
            count twice, or there is no image.
    """
    empty: list[str] = []
    if root.is_dir():
        found: dict[str, Place | None] = dict.fromkeys(_in_folder(root, "", {}, (), empty))
    else:
        found = dict(_in_tar(root))
    if topmost:
        found = {name: place for name, place in found.items() if "/" in name}
    if not found:
        raise RetrofitError(f"no images found in {root} (.png, .jpg, .webp, .tif, ...); {_ADVICE}")
    return ImageFiles(root, found, topmost=topmost, empty=tuple(empty))


def _in_folder(
    root: Path, folder: str, seen: dict[tuple[int, int], str], above: tuple[tuple[int, int], ...], empty: list[str]
) -> Iterator[str]:
    """Give the paths of the images below a folder; a link to a folder that it lies in holds nothing new."""
    path = root / folder
    try:
        status = path.stat()
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError as error:
        raise RetrofitError(
            f"cannot read the folder {printable(path, 200)} ({error.strerror}); its images would be missing: make it "
            "readable or remove it"
        ) from error
    identity = status.st_dev, status.st_ino
    if identity in above:
        return
    if identity in seen:
        raise RetrofitError(
            f"{seen[identity] or '.'} and {folder} in {root} are the same folder, whose images would count twice; "
            "remove one"
        )
    seen[identity] = folder
    nothing = True
    for entry in entries:
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_dir():
            nothing = False
            yield from _in_folder(root, name, seen, (*above, identity), empty)
        elif _is_image(name):
            nothing = False
            yield name
    if nothing and folder:
        empty.append(folder)


def _in_tar(path: Path) -> Iterator[tuple[str, Place]]:
    """Give the paths and places of the images in a tar; a tar in it counts as a folder."""
    if path.suffix.lower() == ".tar" or path.name.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        try:
            with open(path, "rb") as file:
                if file.read(6).startswith(_COMPRESSED):
                    raise RetrofitError(
                        f"{path} is compressed, so its images cannot be read in any order; decompress it "
                        "to a .tar, or unpack it into a folder"
                    )
                file.seek(0)
                yield from _members(file, "", 0)
        except (OSError, tarfile.TarError) as error:
            raise RetrofitError(f"no images found in {path} ({error}); {_ADVICE}") from error
        return
    raise RetrofitError(f"no images found in {path}, which is neither a folder nor a .tar; {_ADVICE}")


def _members(file: IO[bytes] | None, folder: str, start: int) -> Iterator[tuple[str, Place]]:
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            name = os.path.normpath(os.path.join(folder, member.name))
            if _is_image(name):
                target = member
                while target.islnk():  # a file that was packed twice is a link to its first copy
                    target = tar.getmember(target.linkname)
                yield name, (start + target.offset_data, target.size if target.isreg() else 0)
            elif member.isreg() and name.lower().endswith(".tar"):
                yield from _members(tar.extractfile(member), name[:-4], start + member.offset_data)
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(512).strip(b"\0"):  # tarfile takes a damaged header for the end
            raise tarfile.ReadError(f"damaged at byte {start + tar.offset:,}")


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def _topmost(name: str) -> str:
    return name.partition("/")[0]


def _natural(name: str) -> tuple[list[object], str]:
    """Order numbers in names by value, as timm does; names that differ in case alone have an order too."""
    parts: list[object] = re.split(r"(\d+)", name.lower())
    return [int(str(part)) if index % 2 else part for index, part in enumerate(parts)], name
