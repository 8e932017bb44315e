"""Tables of pictures: one row a picture, with its label and perhaps its split, as CSV, JSON lines or a JSON list.

Columns, in any of their usual names: `image` (path, file, file_name, filename), `label` (class, category), `split`.
Paths are relative to the table's own folder. Other columns are left alone.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.datasets.images import shown
from regard.datasets.rows import SUFFIXES, Row, read_rows
from regard.datasets.sources.files import Names
from regard.datasets.sources.folder import SPLIT_NAMES
from regard.vit.errors import InputError

COLUMNS = {
    "image": ("image", "path", "file", "file_name", "filename"),
    "label": ("label", "class", "category"),
    "split": ("split",),
}
_LOOKED_AT = 100  # rows whose files are looked for at once: a wrong folder is told before the training


def list_splits(path: Path) -> list[str]:
    """The splits a table names in its column `split`, or of which a folder holds a table; [] if it tells none.

    Raises InputError naming the line of a row without a split where others have one.
    """
    if path.is_dir():
        return [split for split in SPLIT_NAMES if _table(path, split) is not None]
    there = set(_splits(read_rows(path)))
    return [split for split in SPLIT_NAMES if split in there]


def load_list(path: Path, split: str, labelled: bool) -> tuple[Path, Names, Tensor, tuple[str, ...]]:
    """Root, paths relative to it, labels int64 `(N,)` and classes of one split; classes are those of train.

    Raises InputError naming file and line for a missing column or cell, a class that train does not have, a class of
    train without a picture, and where none of the first files exists.
    """
    rows = _rows(path, split)
    root = path if path.is_dir() else path.parent
    names = [_text(row, "image") for row in rows]
    looked_at = [os.path.join(root, name) for name in names[:_LOOKED_AT]]
    if looked_at and not any(map(os.path.exists, looked_at)):
        raise InputError(
            f"{rows[0].where}: no image file {shown(looked_at[0])}, nor those of the next rows; "
            "image paths are relative to the table's folder"
        )
    if not labelled:
        return root, Names(names), torch.full((len(names),), -1), ()
    own = [_text(row, "label") for row in rows]
    training = own if split == "train" or not _has_train(path) else [_text(r, "label") for r in _rows(path, "train")]
    classes = _in_order(training)
    place = {name: label for label, name in enumerate(classes)}
    for row, label in zip(rows, own, strict=True):
        if label not in place:
            raise InputError(f"{row.where}: the class {label!r} is not in train; remove the row or add it there")
    missing = [name for name in classes if name not in set(own)]
    if missing:
        raise InputError(f"{shown(path)}: the class {missing[0]!r} of train is missing in {split}; add pictures of it")
    return root, Names(names), torch.tensor([place[label] for label in own], dtype=torch.long), tuple(classes)


def _has_train(path: Path) -> bool:
    return "train" in list_splits(path)


def _rows(path: Path, split: str) -> list[Row]:
    if path.is_dir():
        table = _table(path, split)
        if table is None:
            raise InputError(f"{shown(path)}: no table for the split {split!r}")
        rows = read_rows(table)
    else:
        rows = read_rows(path)
        splits = _splits(rows)
        if any(splits):
            rows = [row for row, own in zip(rows, splits, strict=True) if own == split]
    if not rows:
        raise InputError(f"{shown(path)}: holds no row of the split {split!r}")
    return rows


def _table(folder: Path, split: str) -> Path | None:
    found = [folder / f"{name}{suffix}" for name in SPLIT_NAMES[split] for suffix in SUFFIXES]
    found = [file for file in found if file.is_file()]
    if len(found) > 1:
        raise InputError(f"{shown(folder)}: holds both {found[0].name} and {found[1].name}; keep one of them")
    return found[0] if found else None


def _splits(rows: list[Row]) -> list[str | None]:
    """The split of each row: of all of them, or of none."""
    splits = [_split(row) for row in rows]
    if any(splits) and None in splits:
        where = rows[splits.index(None)].where
        raise InputError(
            f"{where}: the split is empty, other rows have one; write train, val or test, or remove the row"
        )
    return splits


def _split(row: Row) -> str | None:
    value = row.fields.get("split")
    if _is_empty(value):
        return None
    for split, names in SPLIT_NAMES.items():
        if str(value).strip().lower() in names:
            return split
    raise InputError(f"{row.where}: split {value!r} is unknown; write train, val or test")


def _text(row: Row, column: str) -> str:
    there = [name for name in COLUMNS[column] if name in row.fields]
    found = [name for name in there if not _is_empty(row.fields[name])]
    if there and not found:
        raise InputError(f"{row.where}: the {column} is empty; give one, or remove the row")
    if not found:
        has = ", ".join(map(str, row.fields)) or "nothing"
        raise InputError(f"{row.where}: no {column!r} here (it has {has}); name the column {column}")
    if len(found) > 1:
        raise InputError(f"{row.where}: both {found[0]!r} and {found[1]!r} could be the {column}; keep one of them")
    value: Any = row.fields[found[0]]
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise InputError(f"{row.where}: {found[0]!r} is {value}; write it as text")
    if column == "label" and isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str) or "\0" in value:
        raise InputError(f"{row.where}: {found[0]!r} is {value!r}; it must be text")
    return value if column == "image" else value.strip()


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _in_order(labels: Iterable[str]) -> list[str]:
    """Class names sorted; whole numbers by their value, so that 10 follows 9."""
    names = set(labels)
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
