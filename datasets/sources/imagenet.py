"""ImageNet's 1000 classes as Kaggle publishes them: class folders for train, one folder and a table for val.

`train/<wnid>`, `val/<wnid>` alone is a plain image folder. Russakovsky et al., 2015, arXiv:1409.0575.
"""

import csv
import io
from pathlib import Path

import torch
from torch import Tensor

from regard.datasets.images import file_bytes, shown
from regard.datasets.sources import folder as folders
from regard.datasets.sources.files import Names
from regard.vit.errors import InputError

_TABLE = "LOC_val_solution.csv"
_WORDS = "LOC_synset_mapping.txt"


def is_imagenet(folder: Path) -> bool:
    """Whether this folder holds Kaggle's tables, or is the `ILSVRC` beside them."""
    return _tables(folder) is not None and (_pictures(folder) / "train").is_dir()


def load_imagenet(folder: Path, split: str) -> tuple[Path, Names, Tensor, tuple[str, ...]]:
    """Root, paths relative to it, labels int64 `(N,)` and classes of train or val.

    A class is called by its WordNet id and its first word, as in `n01440764 tench`; they are in the order of their ids.
    Raises InputError for a class folder that the table of words does not name, and for a picture of val without a row.
    """
    tables, root = _tables(folder), _pictures(folder)
    assert tables is not None
    words = _words(tables / _WORDS)
    ids = folders.class_names(root / "train")
    for wnid in ids:
        if wnid not in words:
            raise InputError(
                f"{shown(root / 'train')}: the class {wnid!r} is not in {_WORDS}; remove it or add it there"
            )
    classes = tuple(f"{wnid} {words[wnid]}".strip() for wnid in ids)
    if split == "train":
        names, labels = folders.class_files(root / "train", ids)
        return root, Names(f"train/{name}" for name in names), torch.tensor(labels), classes
    if folders.class_names(root / "val"):
        names, labels = folders.class_files(root / "val", ids)
        return root, Names(f"val/{name}" for name in names), torch.tensor(labels), classes
    answers = _answers(tables / _TABLE)
    place: dict[str | None, int] = {wnid: label for label, wnid in enumerate(ids)}
    names, labels = list(folders.picture_files(root / "val")), []
    for name in names:
        answer = answers.get(Path(name).stem)
        if answer not in place:
            what = "no row" if answer is None else f"the class {answer!r}, which is not in train,"
            raise InputError(f"{shown(root / 'val' / name)}: {what} in {_TABLE}; fetch the table again")
        labels.append(place[answer])
    if not names:
        raise InputError(f"{shown(root / 'val')}: no pictures here")
    missing = set(range(len(ids))) - set(labels)
    if missing:
        raise InputError(f"{shown(root / 'val')}: the class {classes[min(missing)]!r} of train is missing here")
    return root, Names(f"val/{name}" for name in names), torch.tensor(labels), classes


def _tables(folder: Path) -> Path | None:
    for place in (folder, folder.parent) if folder.name == "ILSVRC" else (folder,):
        if (place / _TABLE).is_file() and (place / _WORDS).is_file():
            return place
    return None


def _pictures(folder: Path) -> Path:
    for place in (folder / "ILSVRC" / "Data" / "CLS-LOC", folder / "Data" / "CLS-LOC"):
        if place.is_dir():
            return place
    return folder


def _words(file: Path) -> dict[str, str]:
    words = {}
    for line in file_bytes(file).decode("utf-8", "replace").splitlines():
        wnid, _, rest = line.strip().partition(" ")
        if wnid:
            words[wnid] = rest.split(",")[0].strip()
    return words


def _answers(file: Path) -> dict[str, str]:
    """The WordNet id of each picture: the table's second cell begins with it, and a box follows."""
    answers = {}
    for number, cells in enumerate(csv.reader(io.StringIO(file_bytes(file).decode("utf-8", "replace")))):
        if number and cells:
            if len(cells) < 2 or not cells[1].split():
                raise InputError(f"{shown(file)}, line {number + 1}: expected a picture and its class; fetch it again")
            answers[cells[0]] = cells[1].split()[0]
    return answers
