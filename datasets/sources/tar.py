"""Shards of pictures in tar files, as WebDataset names their members: `000017.jpg` beside `000017.cls`.

Only the places of the members are looked up, so any picture is read where it lies, and a sampler may deal them in any
order to ranks and workers. The label of a sample stands in `.cls` (a number or a name) or in the field "label" of its
`.json`; the names of the classes in `classes.json` or `classes.txt` beside the shards.

The naming: https://github.com/webdataset/webdataset
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import BinaryIO

import torch

from regard.datasets.images import shown
from regard.datasets.pictures import SPLITS, PictureSet
from regard.datasets.sources.files import ArchiveFiles, Names
from regard.datasets.sources.folder import SPLIT_NAMES, SUFFIXES, class_names, split_folders
from regard.datasets.sources.manifest import Shard, manifest, require_listed
from regard.datasets.sources.members import Member, members
from regard.vit.errors import InputError
from regard.vit.files import typed_path

CLASSES = "classes.json"
"""The file beside shards that lists the names of their classes, by label."""

_BASE = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)  # WebDataset's own rule
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_CLASSES = 1 << 20


def is_shards(data: str | Path) -> bool:
    """Whether `data` means shards: it ends in .tar, or is a folder of them, directly or in one folder per split."""
    if os.fspath(data).endswith(".tar"):
        return True
    path = Path(os.path.expanduser(data))
    if not path.is_dir():
        return False
    if any(class_names(folder) for folder in split_folders(path).values()):
        return False  # ImageNet is often unpacked beside the archives it came in
    folders = [path, *(path / name for names in SPLIT_NAMES.values() for name in names)]
    return any(next(folder.glob("*.tar"), None) for folder in folders) or any(_kept(path, split) for split in SPLITS)


def splits_of_tar(data: str) -> tuple[str, ...]:
    """The splits that the names of the shards tell, such as `val-000.tar`, or `regard shard` wrote; () for none.

    Raises InputError as `load_tar` does.
    """
    return tuple(_by_split(data))


def tells_labels(data: str) -> bool:
    """Whether any shard holds a file that could tell a label."""
    return any(
        member.name.lower().endswith((".cls", ".json")) for archive in _archives(data) for member in members(archive)
    )


def load_tar(data: str, split: str = "train", labelled: bool = True) -> PictureSet:
    """Load one split of shards: a .tar, a folder of them, or a pattern (`train-{000..099}.tar`, `train-*.tar`).

    Where the names of the shards tell no split, all of them are train. Where there is no val, test stands for it.
    With `labelled` the classes are those of `classes.json` or `classes.txt` in the shards' folder; without such a file
    those that the labels of train name, in alphabetical order, or the numbers up to the largest label.
    A folder means all shards that `regard shard` wrote into it; a file or a pattern may mean a part of them.
    Raises InputError naming shard and sample for a missing shard or one that is not as it was written, a damaged tar,
    a sample with no picture or with two, a name that comes twice, and, with `labelled`, for a picture without a label
    and a label that is none of the classes.
    """
    shards = _by_split(data)
    if shards:
        if split == "val" and "val" not in shards:
            split = "test"
        if split not in shards:
            raise InputError(f"{data}: no shard of split {split!r}; there are those of {', '.join(shards)}")
    elif split != "train":
        raise InputError(f"{data}: has no split {split!r}, all pictures stand together; hold a share of them out")
    archives = shards[split] if shards else _archives(data)
    found = _whole(data, split, archives, labelled)
    labels = torch.full((len(found.names),), -1)
    classes: tuple[str, ...] = ()
    if labelled:
        classes = _classes(archives[0].parent) or _told_classes(
            found if split == "train" or "train" not in shards else _whole(data, "train", shards["train"], labelled)
        )
        labels = torch.tensor(_numbered(found, classes), dtype=torch.long)
    files = ArchiveFiles(tuple(map(str, archives)), Names(found.names), torch.tensor(found.spans).reshape(-1, 3))
    return PictureSet(f"{archives[0].resolve().parent.name}/{split}", classes, labels, files=files)


def _archives(data: str) -> list[Path]:
    """The shards that `data` means, in the order of their names."""
    if re.match(r"\w{2,}:", data):
        raise InputError(f"{data}: shards are read from this machine's files; download them first")
    if _BRACES.search(data):
        listed = [typed_path(name) for name in _expanded(data)]
        absent = [path for path in listed if not path.is_file()]
        if absent:
            raise InputError(
                f"{shown(absent[0])}: no such shard ({len(absent)} of the {len(listed)} of {data} are missing)"
            )
        return listed
    path = typed_path(data)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(path.glob("*.tar")) or sorted(path.glob("*/*.tar"))
    else:
        found = sorted(path.parent.glob(path.name)) if set(path.name) & set("*?[") else []
    found = [file for file in found if not file.name.startswith(".") and not file.is_dir()]
    for file in found:
        if not file.is_file():
            what = "a link to a file that is not there" if file.is_symlink() else "a pipe or a device"
            raise InputError(f"{shown(file)}: no shard but {what}; fetch it again, or remove it")
    if not found:
        for split in SPLITS:
            for folder in _kept(path, split):
                require_listed(folder, split, [])
        raise InputError(
            f"{data}: no shards here; give a .tar file, a folder of them, or a pattern such as train-*.tar"
        )
    return found


def _expanded(pattern: str) -> list[str]:
    """`a-{00..02}.tar` and `a-{x,y}.tar`, as a shell expands them."""
    pieces = _BRACES.split(pattern)
    choices: list[list[str]] = []
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            choices.append([piece])
        elif span := _RANGE.fullmatch(piece):
            first, last = int(span[1]), int(span[2])
            if last < first:
                raise InputError(f"{pattern}: the range {{{piece}}} runs backwards")
            choices.append([str(number).zfill(len(span[1])) for number in range(first, last + 1)])
        else:
            choices.append(piece.split(","))
    return ["".join(parts) for parts in product(*choices)]


def _by_split(data: str) -> dict[str, list[Path]]:
    """The shards of each split in the order of `SPLITS`; empty where their names tell no split."""
    archives = _archives(data)
    told = {archive: _split_of(archive, Path(data)) for archive in archives}
    if not any(told.values()):
        return {}
    if None in told.values():
        untold = next(archive for archive, split in told.items() if split is None)
        raise InputError(f"{shown(untold)}: its name tells no split, those of others do; rename it or move it away")
    own = {split: [archive for archive in archives if told[archive] == split] for split in SPLITS}
    return {split: there for split, there in own.items() if there or _kept(typed_path(data), split)}


def _kept(path: Path, split: str) -> list[Path]:
    """The folders in or below `path` where `regard shard` keeps account of this split."""
    below = [] if next(path.glob("*.tar"), None) else [path / name for name in SPLIT_NAMES[split]]
    folders = [path, *below]
    return [folder for folder in folders if (folder / manifest(split)).is_file()]


def _whole(data: str, split: str, archives: list[Path], labelled: bool) -> "_Samples":
    """The samples of a split. Raises InputError where they are not those that `regard shard` wrote."""
    path = typed_path(data)
    listed: dict[Path, Shard] = {}
    for folder in dict.fromkeys([*(archive.parent for archive in archives), *_kept(path, split)]):
        here = [archive for archive in archives if archive.parent == folder]
        listed |= {folder / name: shard for name, shard in require_listed(folder, split, here, _asked(path)).items()}
    found = _samples(archives, labelled)
    counts = Counter(number for number, _, _ in found.spans)
    for number, archive in enumerate(archives):
        if archive in listed and counts[number] != listed[archive].pictures:
            raise InputError(
                f"{shown(archive)}: holds {counts[number]} pictures where {listed[archive].pictures} were written; "
                "fetch it again"
            )
    return found


def _asked(path: Path) -> Callable[[str], bool]:
    """Whether a shard is meant: all of a folder are, of a pattern those it fits, of a list none but its own."""
    if path.is_dir():
        return lambda name: True
    if path.is_file() or _BRACES.search(str(path)):
        return lambda name: False
    return lambda name: fnmatchcase(name, path.name)


def _split_of(archive: Path, data: Path) -> str | None:
    below = archive.parent != data and archive.parent.parent == data  # shards in folders named after the splits
    words = re.split(r"[^a-z]+", (archive.parent.name if below else archive.stem).lower())
    return next((split for split in SPLITS if set(words) & set(SPLIT_NAMES[split])), None)


@dataclass
class _Samples:
    """Every picture of some shards: its name, where it lies, and its label as it is told."""

    names: list[str]
    spans: list[tuple[int, int, int]]
    labels: list[int | str]


def _samples(archives: list[Path], labelled: bool) -> _Samples:
    found = _Samples([], [], [])
    for number, archive in enumerate(archives):
        file_name, where = archive.name, shown(archive)
        grouped: dict[str, dict[str, Member]] = {}
        for member in members(archive):
            base = _BASE.fullmatch(member.name)
            if base is None or not _plain(member.name):
                continue
            own = grouped.setdefault(base[1], {})
            if base[2].lower() in own:
                raise InputError(f"{where}: {member.name!r} stands in it twice; write the shard again")
            own[base[2].lower()] = member
        with archive.open("rb", buffering=0) as file:
            for key, own in grouped.items():
                picture = _picture(own, where, key)
                found.names.append(f"{file_name}/{picture.name}")
                found.spans.append((number, picture.offset, picture.size))
                if labelled:
                    found.labels.append(_label(own, file, f"{where}, sample {key!r}"))
    return found


def _plain(name: str) -> bool:
    parts = name.split("/")
    return parts[0] != "" and ".." not in parts and not parts[-1].startswith(".") and "__MACOSX" not in parts


def _picture(own: dict[str, Member], where: str, key: str) -> Member:
    pictures = [kind for kind in own if f".{kind}" in SUFFIXES]
    if len(pictures) != 1:
        what = f"{len(pictures)} pictures ({', '.join(pictures)})" if pictures else f"no picture, only {', '.join(own)}"
        raise InputError(f"{where}, sample {key!r}: holds {what}; one is expected, named {', '.join(SUFFIXES)}")
    return own[pictures[0]]


def _label(own: dict[str, Member], file: BinaryIO, where: str) -> int | str:
    member = own.get("cls") or own.get("json")
    if member is None:
        raise InputError(
            f"{where}: has no label (it holds {', '.join(own)}); .cls or .json with a field label is expected"
        )
    file.seek(member.offset)
    text = file.read(member.size).decode("utf-8", "surrogateescape").strip()
    if member is own.get("cls"):
        label: object = int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
    else:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: its .json is not valid JSON ({error})") from error
        label = (
            next((fields[name] for name in ("label", "cls", "class") if name in fields), None)
            if isinstance(fields, dict)
            else None
        )
    if isinstance(label, bool) or not isinstance(label, int | str) or label == "":
        raise InputError(f"{where}: its label is {label!r}; a number or the name of a class is expected")
    if isinstance(label, int) and not 0 <= label < _MOST_CLASSES:
        raise InputError(f"{where}: its label is {label}; classes are numbered from 0")
    return label


def _classes(folder: Path) -> tuple[str, ...]:
    """The names that stand beside the shards, () where no file lists them."""
    for name in (CLASSES, "classes.txt"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8-sig")
            names = (
                json.loads(text) if name == CLASSES else [line.strip() for line in text.splitlines() if line.strip()]
            )
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{shown(file)}: cannot be read as a list of names ({error})") from error
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise InputError(f"{shown(file)}: a list of the names of the classes is expected")
        if len(set(names)) < len(names):
            raise InputError(
                f"{shown(file)}: the class {next(n for n in names if names.count(n) > 1)!r} stands in it twice"
            )
        return tuple(names)
    return ()


def _told_classes(found: _Samples) -> tuple[str, ...]:
    numbers = [label for label in found.labels if isinstance(label, int)]
    if len(numbers) == len(found.labels):
        return tuple(map(str, range(max(numbers, default=-1) + 1)))
    if numbers:
        where = found.names[next(i for i, label in enumerate(found.labels) if isinstance(label, int))]
        raise InputError(f"{where}: its label is a number, those of other pictures are names; give all of them one way")
    return tuple(sorted({str(label) for label in found.labels}))


def _numbered(found: _Samples, classes: tuple[str, ...]) -> list[int]:
    known = {name: number for number, name in enumerate(classes)}
    labels: list[int] = []
    for name, label in zip(found.names, found.labels, strict=True):
        number = known.get(label, -1) if isinstance(label, str) else label
        if not 0 <= number < len(classes):
            raise InputError(f"{name}: its label {label!r} is none of the {len(classes)} classes")
        labels.append(number)
    return labels
