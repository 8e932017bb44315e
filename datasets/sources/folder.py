"""Pictures in folders: `root/<split>/<class>/…`, `root/<class>/…`, or just pictures."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from regard.datasets.images import shown
from regard.vit.errors import InputError

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif")
"""What a picture's name ends in, in small letters."""

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
    "test": ("test", "testing"),
}
"""The folders, and the names in lists, that hold each split."""


def split_folders(root: Path) -> dict[str, Path]:
    """The splits that stand as folders under `root`.

    Raises InputError where one stands there twice, or is a link that leads nowhere.
    """
    found: dict[str, Path] = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            if (root / name).is_symlink() and not os.path.exists(root / name):
                raise InputError(_leads_nowhere(root / name))
        there = [root / name for name in names if (root / name).is_dir()]
        if len(there) > 1:
            raise InputError(f"{shown(root)}: holds both {there[0].name} and {there[1].name}; keep one of them")
        if there:
            found[split] = there[0]
    return found


def class_names(folder: Path) -> list[str]:
    """Subfolders in order of their names; hidden ones are left out.

    Raises InputError for a link that might have been one and leads nowhere.
    """
    return sorted(entry.name for entry in _entries(folder) if _is_folder(entry))


def class_files(folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """Paths of every picture in the class folders, relative to `folder` and sorted, and the class of each.

    Raises InputError naming a class without pictures.
    """
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = list(picture_files(folder / name, f"{name}/"))
        if not files:
            raise InputError(f"{shown(folder / name)}: no picture of the class {name!r}; add some or remove it")
        names += files
        labels += [label] * len(files)
    return names, labels


def picture_files(folder: Path, prefix: str = "") -> Iterator[str]:
    """Every picture below `folder`, sorted, as `prefix` and its relative path; what is hidden is left out.

    Links are followed, but none that leads back to a folder it lies in. Whatever is named as a picture and is no
    folder is one, and turns out broken when it is read: a link that leads nowhere, a pipe.
    Raises InputError for a link without a suffix that leads nowhere: a folder of pictures may be lost.
    """
    yield from _walk(os.fspath(folder), prefix, ())


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    here = os.stat(folder)
    identity = (here.st_dev, here.st_ino)
    if identity in above:
        return
    inner: list[str] = []
    files: list[str] = []
    for entry in _entries(folder):
        if _is_folder(entry):
            inner.append(entry.name)
        elif entry.name.lower().endswith(SUFFIXES):
            files.append(entry.name)
    for name in sorted(files):
        yield prefix + name
    for name in sorted(inner):
        yield from _walk(os.path.join(folder, name), f"{prefix}{name}/", (*above, identity))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    if not entry.is_symlink():  # told by the listing itself: no file is looked up for it
        return entry.is_dir()
    try:
        return stat.S_ISDIR(os.stat(entry.path).st_mode)
    except OSError as error:
        if not os.path.splitext(entry.name)[1]:
            raise InputError(_leads_nowhere(entry.path)) from error
        return False


def _leads_nowhere(path: str | Path) -> str:
    return f"{shown(path)}: a link that leads nowhere ({shown(os.readlink(path))}); mend or remove it"


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except OSError as error:
        raise InputError(f"{shown(folder)}: cannot be listed ({error.strerror})") from error
