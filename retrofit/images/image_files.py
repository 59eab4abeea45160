"""Image files in a folder or a tar, a folder per class."""

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO

from retrofit.errors import RetrofitError
from retrofit.utils.files import open_file
from retrofit.utils.text import one_line, printable

# What people call images. Those that Pillow cannot read are listed as unreadable: none is dropped.
# fmt: off
_SUFFIXES = (
    ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
    ".jpg", ".jxl", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".svg", ".tga", ".tif", ".tiff",
    ".webp",
)
# fmt: on
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
# First bytes of gzip, bzip2, xz and zstd files.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
ADVICE = "give a folder or tar with a folder per class"

# A hidden folder in a path: of notebooks, editors and systems, and no class.
_HIDDEN = re.compile(r"(^|/)\.[^/]*/")

# Offset and size in a file.
Extent = tuple[int, int]
_WHOLE: Extent = (0, -1)
# The extent of an image in a tar that is no plain file: it is listed as unreadable.
_EMPTY: Extent = (0, 0)


class ImageFiles:
    """Images below a folder, or inside a tar and the tars in it, in natural order.

    Their folders are the classes. Hidden folders, such as .ipynb_checkpoints, are left out.

    Args:
        root: The folder or tar.
        folder: The folder in it whose images are meant, "." for all.

    Raises:
        RetrofitError: If a folder or the tar cannot be read, two paths lead to one folder, so that
            its images would count twice, or there is no image.
    """

    def __init__(self, root: Path, folder: str = ".") -> None:
        self._packed = not root.is_dir()
        if not self._packed:
            root = root / folder
        self.root = str(root)
        # Folders without an image, which are no classes.
        self.empty: list[str] = []
        # What precedes a path inside the folder that is meant.
        self._above = ""
        if self._packed:
            extents = _below(_in_tar(root), folder)
            self._above = _prefix(folder)
        else:
            names, self.empty = _in_folder(root)
            extents = dict.fromkeys(names, _WHOLE)
        # Images in hidden folders, which are left out.
        self.hidden = [name for name in extents if _HIDDEN.search(name)]
        for name in self.hidden:
            del extents[name]
        if not extents:
            raise RetrofitError(
                f"no images found in {root} (.png, .jpg, .webp, .tif, ...); {ADVICE}"
            )
        self._names = sorted(extents, key=_natural)
        self._extents = [extents[name] for name in self._names]
        labels = [Path(name).parent.name for name in self._names]
        self.classes = sorted(set(labels), key=_natural)
        number = {name: index for index, name in enumerate(self.classes)}
        self._targets = [number[label] for label in labels]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        """Return an image's bytes and its target.

        Nothing is kept open: processes that share an open file would move each other's position.

        Raises:
            RetrofitError: If the image is not a regular file, or cannot be opened.
            OSError: If it cannot be read.
        """
        path = self.root if self._packed else os.path.join(self.root, self._names[index])
        offset, size = self._extents[index]
        with open_file(path, "image") as file:
            file.seek(offset)
            return io.BytesIO(file.read(size)), self._targets[index]

    def filename(self, index: int) -> str:
        """Return an image's path inside the folder or tar."""
        return self._names[index]

    def classless(self) -> tuple[str, ...]:
        """Return the paths of images that lie in no class's folder, where others do."""
        if len(self.classes) == 1:
            return ()
        return tuple(name for name in self._names if os.sep not in self._inner(name))

    def fingerprint(self) -> str:
        """Return a hash of the images' paths, the same for a folder and its tar."""
        lines = [self._inner(name) + "\n" for name in self._names]
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    def _inner(self, name: str) -> str:
        """Return an image's path inside the folder that is meant."""
        return name.removeprefix(self._above)


def is_split(root: Path, name: str, usual: Collection[str]) -> bool:
    """Whether a folder in a folder or tar is a split of the data, and not a class.

    A split holds folders. One without classes holds images: then another split beside it holds
    folders, or all folders beside it that hold images have names of splits.

    Args:
        root: The folder or tar.
        name: The folder in it.
        usual: Names of splits, in lower case.

    Raises:
        RetrofitError: If the tar cannot be read.
    """
    above, own = os.path.split(os.path.normpath(name))
    beside = {folder: os.path.join(above, folder) for folder in _folders_in(root, above)}
    if own not in beside:
        return False
    splits = {folder for folder in beside if folder.lower() in usual} | {own}
    if any(_folders_in(root, beside[folder]) for folder in splits):
        return True
    return not any(_holds_images(root, beside[folder]) for folder in beside.keys() - splits)


def _folders_in(root: Path, above: str) -> set[str]:
    """Return the names of the folders in a folder of a folder or tar, without hidden ones."""
    if root.is_dir():
        names = {path.name for path in (root / above).glob("*/")}
    else:
        prefix = os.path.join(above, "")
        inside = _below(_in_tar(root), above or ".")
        parts = [image.removeprefix(prefix).partition(os.sep) for image in inside]
        names = {first for first, _, rest in parts if rest}
    return {name for name in names if not name.startswith(".")}


def _holds_images(root: Path, folder: str) -> bool:
    """Whether there is an image below a folder of a folder or tar."""
    if root.is_dir():
        return any(any(map(_is_image, files)) for _, _, files in os.walk(root / folder))
    return bool(_below(_in_tar(root), folder))


def folders_of_folders(root: Path, names: Collection[str]) -> list[str]:
    """Return the folders in a folder or tar that hold folders and have one of some names, in any
    case; they may lie in a folder of another name.

    Raises:
        RetrofitError: If the tar cannot be read.
    """
    if root.is_dir():
        tops = list(root.glob("*/"))
        folders = [*tops, *(top / name for top in tops for name in names)]
        holding = [folder.relative_to(root) for folder in folders if any(folder.glob("*/"))]
    else:
        # The last of a path's parents is the tar, the first the folder of its class.
        holding = [folder for name in _in_tar(root) for folder in list(Path(name).parents)[1:-1]]
    return sorted({str(folder) for folder in holding if folder.name.lower() in names})


def _below(extents: dict[str, Extent], folder: str) -> dict[str, Extent]:
    """Return the images that lie in a folder of a tar, "." for all."""
    # Paths are slow: there may be millions of them.
    prefix = _prefix(folder)
    return {name: extent for name, extent in extents.items() if name.startswith(prefix)}


def _prefix(folder: str) -> str:
    """Return what the paths of a tar's images in a folder begin with, "." for all."""
    if folder == ".":
        return ""
    return os.path.join(os.path.normpath(folder), "")


def _in_folder(root: Path) -> tuple[list[str], list[str]]:
    """Return the images below a folder, and the folders without any.

    A link to a folder above holds nothing new.
    """
    images: list[str] = []
    empty: list[str] = []
    first_paths: dict[tuple[int, int], Path] = {}
    for folder, folders, files in os.walk(root, onerror=_refuse_unreadable, followlinks=True):
        folders.sort()
        current = Path(folder)
        path = current.relative_to(root)
        status = os.stat(folder)
        identity = status.st_dev, status.st_ino
        first = first_paths.setdefault(identity, path)
        if first in path.parents:
            folders.clear()
            continue
        if first != path:
            raise RetrofitError(
                f"{first} and {path} in {root} are the same folder and would count twice; remove "
                f"one"
            )
        names = [str(path / name) for name in files if _is_image(name)]
        images += names
        is_bare = not names and not folders
        if is_bare and path != Path():
            empty.append(str(path))
    return images, empty


def _refuse_unreadable(error: OSError) -> None:
    problem = f"cannot read the folder {printable(error.filename, 200)} ({error.strerror})"
    raise RetrofitError(
        f"{problem}; its images would be missing: make it readable or remove it"
    ) from error


def _in_tar(path: Path) -> dict[str, Extent]:
    """Return the paths and extents of the images in a tar; a tar inside it counts as a folder."""
    size = -1
    changed = -1
    if path.is_file():
        status = path.stat()
        size = status.st_size
        changed = status.st_mtime_ns
    return _read_tar(path, size, changed)


@lru_cache(maxsize=2)
def _read_tar(path: Path, size: int, changed: int) -> dict[str, Extent]:
    """Read a tar's headers, once for a size and a time of change: a large one takes minutes."""
    if not path.name.lower().endswith(_TARS):
        raise RetrofitError(
            f"no images found in {path}, which is neither a folder nor a .tar; {ADVICE}"
        )
    with open_file(path, "tar", advice=ADVICE) as file:
        if file.read(6).startswith(_COMPRESSED):
            raise RetrofitError(
                f"{path} is compressed; decompress it to a .tar, or unpack it into a folder"
            )
        file.seek(0)
        try:
            return dict(_members(file, "", 0))
        # On damaged headers, tarfile raises ValueError, OverflowError and more beside its own; on
        # endless nesting, RecursionError.
        except Exception as error:
            raise RetrofitError(
                f"no images found in {path} ({one_line(error)}); {ADVICE}"
            ) from error


def _members(file: IO[bytes] | None, folder: str, start: int) -> Iterator[tuple[str, Extent]]:
    """Yield the paths and extents of the images in a tar, and in the tars inside it.

    Args:
        file: The tar, open.
        folder: The path that its images' paths begin with.
        start: The byte of the outermost file at which the tar begins.
    """
    # A file that was packed twice is a link to its first copy, which stands before it.
    extents: dict[str, Extent] = {}
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            name = _inside(member.name)
            extents[name] = _extent_of(member, start, extents)
            path = os.path.join(folder, name)
            if _is_image(name):
                yield path, extents[name]
            elif member.isreg() and name.lower().endswith(".tar"):
                if member.issparse():
                    raise tarfile.ReadError(f"{path} is packed as a sparse file")
                inner_start = start + member.offset_data
                yield from _members(tar.extractfile(member), path[:-4], inner_start)
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        # tarfile takes a damaged header for the end.
        if tar.fileobj.read(512).strip(b"\0"):
            raise tarfile.ReadError(f"damaged at byte {start + tar.offset:,}")


def _inside(name: str) -> str:
    """Return a path inside a tar; what begins with "/" or ".." stands in it too."""
    return os.path.normpath(f"/{name}").lstrip("/")


def _extent_of(member: tarfile.TarInfo, start: int, extents: dict[str, Extent]) -> Extent:
    """Return the extent of a member of a tar that begins at byte `start`; `extents` are those of
    the members before it, by name.
    """
    if member.islnk():
        return extents.get(_inside(member.linkname), _EMPTY)
    if member.isreg() and not member.issparse():
        return start + member.offset_data, member.size
    return _EMPTY


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def _natural(name: str) -> tuple[list[int | str], str]:
    """Return a key that sorts numbers in names by value, as timm does, and case last."""
    # timm's own takes a raised 2 for a number, which it cannot read.
    parts: list[int | str] = [*re.split(r"(\d+)", name.lower())]
    parts[1::2] = map(int, parts[1::2])
    return parts, name
