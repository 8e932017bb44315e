"""Pictures with or without labels, as one set, and from what a person types after `--data` to such a set.

A set is either arrays (Fashion-MNIST, CIFAR: all pixels in memory) or files, which are read when they are asked for.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from regard.datasets.images import open_bytes, shown
from regard.datasets.rows import SUFFIXES as TABLES
from regard.datasets.sources import cifar, idx, imagenet, lists
from regard.datasets.sources import folder as folders
from regard.datasets.sources.files import Files, FolderFiles, Names, Span
from regard.vit.errors import InputError
from regard.vit.files import typed_path

NAMED = ("fashion-mnist", "mnist", "cifar10", "cifar100")
"""Sets that may be given by name: a folder of that name in $REGARD_DATA, in the working folder or in Debian's place."""

SPLITS = ("train", "val", "test")
_DEBIAN = Path("/usr/share/datasets")


@dataclass(frozen=True, eq=False)
class PictureSet:
    """N pictures.

    Attributes:
        name: the set and its split, for messages.
        classes: names of the classes, by label; empty for a set without labels.
        labels: int64 `(N,)`; -1 where a picture has none.
        pixels: uint8 `(N, C, height, width)` of a set of arrays, else None.
        files: where the pictures of a set of files are, else None.
        numbers: for arrays, the place of each picture in the original set, which its `id` tells.
    """

    name: str
    classes: tuple[str, ...]
    labels: Tensor
    pixels: Tensor | None = None
    files: Files | None = None
    numbers: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.pixels is None) == (self.files is None):
            raise ValueError("a set is either arrays or files")
        count = len(self.pixels if self.pixels is not None else self.files or ())
        if count != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels for {count} pictures")

    def __len__(self) -> int:
        return len(self.labels)

    def id(self, index: int) -> str:
        """A name for messages: the path below the set's root, `archive.tar/member`, or `name/17`."""
        if self.files is not None:
            return self.files.id(index)
        return f"{self.name}/{index if self.numbers is None else int(self.numbers[index])}"

    def source(self, index: int) -> str | Span | None:
        """A path, a span of an archive, or None for an array."""
        return None if self.files is None else self.files.source(index)

    def read(self, index: int) -> bytes:
        """The file's bytes. Raises InputError where they cannot be read, ValueError for an array."""
        if self.files is None:
            raise ValueError(f"{self.id(index)} is an array, not a file")
        return self.files.read(index)

    def image(self, index: int, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
        """One picture, upright RGB. Raises InputError, naming it, where it cannot be decoded."""
        if self.pixels is None:
            return open_bytes(self.read(index), self.id(index), background)
        pixels = self.pixels[index]
        if len(pixels) == 1:
            return Image.fromarray(pixels[0].numpy()).convert("RGB")
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())

    def subset(self, indices: Tensor | Sequence[int]) -> "PictureSet":
        """The pictures at these places, in this order; the classes stay."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        numbers = torch.arange(len(self)) if self.numbers is None else self.numbers
        return PictureSet(
            self.name,
            self.classes,
            self.labels[chosen],
            None if self.pixels is None else self.pixels[chosen],
            None if self.files is None else self.files.take(chosen),
            None if self.pixels is None else numbers[chosen],
        )

    def split(self, share: float, seed: int) -> tuple["PictureSet", "PictureSet"]:
        """(training, held out): of each class `share` is held out, at least one picture where it has two.

        Raises InputError for a share outside (0, 1), and where nothing would be held out.
        """
        if not 0 < share < 1:
            raise InputError(f"the share to hold out is {share}; it must lie between 0 and 1")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        held = torch.zeros(len(self), dtype=torch.bool)
        for label in self.labels.unique().tolist():
            own = order[self.labels[order] == label]
            count = min(max(round(share * len(own)), 1), len(own) - 1)
            held[own[:count]] = True
        if not held.any():
            raise InputError(f"{self.name}: no class has two pictures, so that one could be held out; add pictures")
        return self.subset((~held).nonzero()[:, 0]), self.subset(held.nonzero()[:, 0])

    def unlabelled(self) -> "PictureSet":
        """The same pictures without labels and classes."""
        return PictureSet(self.name, (), torch.full_like(self.labels, -1), self.pixels, self.files, self.numbers)


def load_pictures(data: str | Path, split: str = "train", *, labelled: bool = True) -> PictureSet:
    """Load one split of a set of pictures.

    `data` is a folder `root/<split>/<class>/…` or `root/<class>/…`; a table with the columns `image`, `label` and
    perhaps `split`, or a folder with one such table per split; a folder of idx files (MNIST, Fashion-MNIST), of
    CIFAR-10 or CIFAR-100, or of ImageNet as it is published; tar shards (a folder of them, a file, or a pattern such
    as `shards/train-{000..099}.tar`); or one of the names in `NAMED`. Of each the order is the same on every machine.

    `split` is train, val or test. Where there is no val, test stands for it. The labels of val and test are those of
    train: a class missing or unknown there is an error. With `labelled=False` no label is read, and a folder may hold
    pictures in any arrangement.
    Raises InputError that says what was looked for.
    """
    if split not in SPLITS:
        raise InputError(f"split {split!r} is unknown; choose one of {', '.join(SPLITS)}")
    pictures = _load(data, split, labelled)
    if not len(pictures):
        raise InputError(f"{pictures.name}: holds no pictures")
    return pictures if labelled else pictures.unlabelled()


def splits_of(data: str | Path) -> tuple[str, ...]:
    """The splits that `load_pictures` finds in `data`: () where all pictures stand together."""
    if _is_shards(data):
        from regard.datasets.sources import tar  # which needs what is defined here

        return tuple(tar.splits_of_tar(str(data)))
    path = _located(data)
    kind = _kind(path)
    if kind == "idx":
        return tuple(idx.idx_splits(path))
    if kind == "cifar":
        return ("train", "test")
    if kind == "imagenet":
        return ("train", "val")
    if kind in ("list", "lists"):
        return tuple(lists.list_splits(path))
    return tuple(folders.split_folders(path))


def require_classes(pictures: PictureSet) -> None:
    """Raise InputError where a classifier could learn nothing: fewer than two classes, or pictures without a label."""
    if len(pictures.classes) < 2:
        found = f"one class ({pictures.classes[0]!r})" if pictures.classes else "no classes"
        raise InputError(
            f"{pictures.name}: {found}; to classify takes two at least: one folder of pictures per class, "
            "or a column `label` in a table"
        )
    missing = (pictures.labels < 0).nonzero()[:, 0]
    if len(missing):
        raise InputError(
            f"{pictures.name}: {len(missing)} pictures have no label, first {pictures.id(int(missing[0]))}"
        )
    empty = set(range(len(pictures.classes))) - set(pictures.labels.unique().tolist())
    if empty:
        raise InputError(f"{pictures.name}: no picture of class {pictures.classes[min(empty)]!r}")


def _load(data: str | Path, split: str, labelled: bool) -> PictureSet:
    if _is_shards(data):
        from regard.datasets.sources import tar  # which needs what is defined here

        return tar.load_tar(str(data), split, labelled)
    path = _located(data)
    kind = _kind(path)
    if kind == "idx":
        found = _fallback(path, split, idx.idx_splits(path))
        pixels, labels, classes = idx.load_idx(path, found)
        return PictureSet(f"{path.name}/{found}", classes, labels, pixels)
    if kind == "cifar":
        found = _fallback(path, split, ["train", "test"])
        pixels, labels, classes = cifar.load_cifar(path, found)
        return PictureSet(f"{path.name}/{found}", classes, labels, pixels)
    if kind == "imagenet":
        found = _fallback(path, split, ["train", "val"])
        root, names, labels, classes = imagenet.load_imagenet(path, found)
        return PictureSet(f"{path.name}/{found}", classes, labels, files=FolderFiles(str(root), names))
    if kind in ("list", "lists"):
        there = lists.list_splits(path)
        found = _fallback(path, split, there) if there or split != "train" else split
        root, names, labels, classes = lists.load_list(path, found, labelled)
        return PictureSet(f"{path.name}/{found}", classes, labels, files=FolderFiles(str(root), names))
    return _load_folder(path, split, labelled)


def _load_folder(root: Path, split: str, labelled: bool) -> PictureSet:
    there = folders.split_folders(root)
    if there or split != "train":
        found = _fallback(root, split, list(there))
        folder, name = there[found], f"{root.name}/{there[found].name}"
    else:
        folder, name = root, root.resolve().name
    if not labelled:
        names = list(folders.picture_files(folder))
        if not names:
            raise InputError(f"{shown(folder)}: no pictures here; looked for {', '.join(folders.SUFFIXES)}")
        return PictureSet(name, (), torch.full((len(names),), -1), files=_folder_files(root, folder, names))
    classes = folders.class_names(folder)
    if not classes:
        flat = next(folders.picture_files(folder), None)
        what = "pictures that lie in no class folder" if flat else "no pictures"
        raise InputError(
            f"{shown(folder)}: holds {what}; put those of each class into a folder of its own, or give a table "
            "with the columns image and label"
        )
    if split != "train" and "train" in there:
        wanted = folders.class_names(there["train"])
        _same_classes(folder, wanted, classes)
    names, labels = folders.class_files(folder, classes)
    return PictureSet(name, tuple(classes), torch.tensor(labels), files=_folder_files(root, folder, names))


def _folder_files(root: Path, folder: Path, names: list[str]) -> FolderFiles:
    prefix = "" if folder == root else f"{folder.name}/"
    return FolderFiles(str(root), Names(prefix + name for name in names))


def _same_classes(folder: Path, wanted: list[str], found: list[str]) -> None:
    for name in found:
        if name not in wanted:
            raise InputError(f"{shown(folder)}: the class {name!r} is not in train; remove it here or add it there")
    for name in wanted:
        if name not in found:
            raise InputError(f"{shown(folder)}: the class {name!r} of train is missing here; add pictures of it")


def _fallback(path: Path, split: str, there: Sequence[str]) -> str:
    if split in there:
        return split
    if split == "val" and "test" in there:
        return "test"
    if not there:
        raise InputError(
            f"{shown(path)}: has no split {split!r}: all pictures stand together; hold out a share of them"
        )
    raise InputError(f"{shown(path)}: has no split {split!r}; there are {', '.join(there)}")


def _is_shards(data: str | Path) -> bool:
    from regard.datasets.sources.tar import is_shards

    return is_shards(data)


def _holds_class_folders(root: Path) -> bool:
    """Whether classes stand in split folders: the tables and archives beside them are then what they came with."""
    return any(folders.class_names(folder) for folder in folders.split_folders(root).values())


def _located(data: str | Path) -> Path:
    path = typed_path(data)
    if path.exists():
        return path
    if str(data) in NAMED:
        homes = [Path(os.environ["REGARD_DATA"])] if os.environ.get("REGARD_DATA") else []
        places = [home / str(data) for home in [*homes, Path("."), _DEBIAN]]
        for place in places:
            if place.is_dir():
                return place
        raise InputError(
            f"{data}: not found; looked for {', '.join(map(str, places))} (set REGARD_DATA to the folder that holds it)"
        )
    raise InputError(
        f"{shown(path)}: no such file or folder; give a folder of pictures, a table, tar shards, or one of "
        f"{', '.join(NAMED)}"
    )


def _kind(path: Path) -> str:
    if path.is_file():
        if path.suffix.lower() in TABLES:
            return "list"
        raise InputError(
            f"{shown(path)}: not a set of pictures; give a folder, tar shards or a table ({', '.join(TABLES)})"
        )
    for kind, recognised in (
        ("idx", idx.idx_splits(path)),
        ("cifar", cifar.is_cifar(path)),
        ("imagenet", imagenet.is_imagenet(path)),
        ("lists", not _holds_class_folders(path) and lists.list_splits(path)),
    ):
        if recognised:
            return kind
    return "folder"
