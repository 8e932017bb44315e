"""`regard shard`: any set of pictures as tar shards that Regard and WebDataset read."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.datasets.images import shown
from regard.datasets.pictures import PictureSet
from regard.datasets.shards import Shard, write_shards
from regard.vit.errors import InputError
from regard.vit.files import typed_path


@dataclass(frozen=True)
class Sharded:
    """The shards of one split, how many of them an earlier run had left, and whether files went in unread."""

    folder: str
    split: str
    pictures: int
    classes: int
    kept: int
    unread: bool
    shards: list[Shard]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        size = sum(shard.bytes for shard in self.shards) / 2**20
        kept = f", {self.kept} of them kept from an earlier run" if self.kept else ""
        labels = f"{self.classes} classes" if self.classes else "no labels"
        unread = f"files copied unread; what is broken: regard check {self.folder}\n" if self.unread else ""
        return (
            f"{self.folder}: {self.pictures} pictures ({labels}) in {len(self.shards)} shards of {self.split}, "
            f"{size:.1f} MiB{kept}\n"
            f"{unread}next: regard train {'classify' if self.classes else 'distill'} --data {self.folder}"
        )


def shard(
    source: str | Path,
    *,
    out: str | Path,
    split: str = "train",
    per_shard: int = 1000,
    size: int | None = None,
    quality: int = 95,
    seed: int = 0,
    labelled: bool = True,
) -> Sharded:
    """Write one split of a set of pictures as tar shards in WebDataset's format; run again, it goes on.

    Args:
        source: whatever `regard train` takes as data: a folder, a table, a known set by its name, other shards.
        out: the folder to write into; shards of several splits may share it.
        split: train, val or test.
        per_shard: pictures in each shard.
        size: shrink pictures so that the short side has at most so many pixels; default: copy the files untouched.
        quality: of the JPEG that a shrunk picture becomes, 1..100.
        seed: of the order in which the pictures stand in the shards.
        labelled: false for pictures without labels.

    Raises:
        InputError: a set that cannot be loaded, a picture that cannot be read, a folder that holds other shards
            or the pictures themselves.
    """
    from regard.datasets.pictures import load_pictures
    from regard.progress import bar

    folder = typed_path(out)
    pictures = load_pictures(source, split, labelled=labelled)
    _require_elsewhere(folder, source, pictures)
    try:
        with bar("shards", len(pictures), "pictures") as progress:
            shards, kept = write_shards(
                pictures, folder, split=split, per_shard=per_shard, size=size, quality=quality, seed=seed,
                progress=progress,
            )  # fmt: skip
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error}); what is whole is kept") from error
    unread = size is None and pictures.files is not None
    return Sharded(str(folder), split, len(pictures), len(pictures.classes), kept, unread, shards)


def _require_elsewhere(folder: Path, source: str | Path, pictures: PictureSet) -> None:
    """Shards among the pictures they are made of would change what that folder is taken for."""
    from regard.datasets.sources.files import FolderFiles
    from regard.datasets.sources.folder import split_folders

    path = typed_path(source)
    if not path.is_dir():  # a table may stand anywhere; a shard, or a pattern of shards, in a folder of them
        own = [path.parent] if str(source).endswith(".tar") else []
        below: list[Path] = []
    else:
        splits = list(split_folders(path).values())
        own = [path, *splits]
        below = (splits or [path]) if isinstance(pictures.files, FolderFiles) else []
    target = folder.resolve()
    if target in [place.resolve() for place in own] or any(target.is_relative_to(place.resolve()) for place in below):
        raise InputError(f"{shown(folder)}: the shards would lie among the pictures of {source}; give another --out")
