"""The account that `regard shard` keeps of a split's shards, and what of it is no longer so.

A tar tells nothing of the others written with it: without this list a lost shard would be a smaller set, unnoticed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.datasets.images import shown
from regard.vit.errors import InputError


@dataclass(frozen=True)
class Shard:
    """One tar file: its name, how many pictures it holds, and its size in bytes."""

    name: str
    pictures: int
    bytes: int


def manifest(split: str) -> str:
    """The name of the file in which `regard shard` keeps account of a split."""
    return f"{split}.shards.json"


def require_listed(
    folder: Path, split: str, archives: Sequence[Path], asked: Callable[[str], bool] = lambda name: True
) -> dict[str, Shard]:
    """The shards of a split that stand in a folder, as they were written, by name; {} where no account is kept.

    `archives` are those there, `asked` tells whether a name is one that was asked for.
    Raises InputError for shards still being written, for one that was asked for and is missing, for one of another
    size, and, where all of the folder was asked for, for one that is not listed.
    """
    file = folder / manifest(split)
    if not file.is_file():
        return {}
    listed = _read(file, split)
    there = {archive.name for archive in archives}
    missing = [name for name in listed if name not in there and asked(name)]
    if missing:
        raise InputError(
            f"{shown(folder / missing[0])}: no such shard ({len(missing)} of the {len(listed)} in {file.name} are "
            "missing); fetch it, or run the same `regard shard` again"
        )
    for archive in archives:
        own = listed.get(archive.name)
        if own is None and all(map(asked, listed)):
            raise InputError(f"{shown(archive)}: none of the shards in {file.name}; move it away")
        size = archive.stat().st_size
        if own is not None and size != own.bytes:
            raise InputError(f"{shown(archive)}: has {size} bytes where {own.bytes} were written; fetch it again")
    return listed


def _read(file: Path, split: str) -> dict[str, Shard]:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        finished = told["complete"]
        listed = [Shard(str(own["name"]), int(own["pictures"]), int(own["bytes"])) for own in told["shards"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{shown(file)}: damaged; write the shards again") from error
    if not finished:
        raise InputError(
            f"{shown(file.parent)}: the shards of {split} are not all there yet; run the same `regard shard` again"
        )
    if not listed:
        raise InputError(f"{shown(file)}: lists no shard; write the shards again")
    return {own.name: own for own in listed}
