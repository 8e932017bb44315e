"""Any set of pictures as shards: tar files named and filled as WebDataset does, written whole or not at all.

A shard gets its name only when all of it is on the disk, so a run that was killed goes on where it stopped: what
stands there is whole. `{split}.shards.json` tells the settings, so that shards of two runs are never mixed, and
whether all are there; the reader refuses a split of which some are missing.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from PIL import Image

from regard.datasets.images import shown
from regard.datasets.pictures import SPLITS, PictureSet
from regard.datasets.sources.folder import SUFFIXES
from regard.datasets.sources.manifest import Shard, manifest
from regard.datasets.sources.members import members
from regard.datasets.sources.tar import CLASSES
from regard.vit.errors import InputError
from regard.vit.files import write_atomically


@dataclass(frozen=True)
class _Plan:
    """What decides every byte of the shards; told in the manifest."""

    source: str
    pictures: int
    fingerprint: str
    per_shard: int
    seed: int
    size: int | None
    quality: int


def write_shards(
    pictures: PictureSet,
    out: Path,
    *,
    split: str = "train",
    per_shard: int = 1000,
    size: int | None = None,
    quality: int = 95,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Shard], int]:
    """Write `{split}-000000.tar`, … into the folder `out` -> the shards, and how many of them stood there already.

    The pictures are shuffled by `seed`, so that each shard is a fair sample. A file's bytes are copied as they are;
    with `size`, pictures whose short side is longer become JPEG of `quality` with that short side. Arrays become PNG.
    Each picture `00000017.jpg` stands beside its label `00000017.cls`; `classes.json` names the classes.
    `progress` is called with how many pictures are done, and with their number.
    Raises InputError for a wrong setting, for a folder that holds other shards of this split, and, naming it, for a
    picture that cannot be read; OSError where the folder cannot be written.
    """
    _check(split, per_shard, size, quality, seed)
    if os.path.lexists(out) and not out.is_dir():
        what = "is a file" if out.is_file() else "is a file or a link that leads nowhere"
        raise InputError(f"{shown(out)}: {what}; --out is the folder to write shards into")
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed)).tolist()
    plan = _Plan(pictures.name, len(pictures), _fingerprint(pictures), per_shard, seed, size, quality)
    out.mkdir(parents=True, exist_ok=True)
    _begin(out, split, plan, pictures.classes)
    shards, kept = [], 0
    digits = max(8, len(str(len(order))))
    for number, start in enumerate(range(0, len(order), per_shard)):
        own = order[start : start + per_shard]
        file = out / f"{split}-{number:06d}.tar"
        if file.is_file():
            _require_whole(file, len(own), labelled=bool(pictures.classes))
            kept += 1
        else:

            def write(archive: BinaryIO, own: list[int] = own, start: int = start) -> None:
                with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                    for place, index in enumerate(own, start):
                        _add_sample(tar, f"{place:0{digits}d}", pictures, index, size, quality)
                        progress(place + 1, len(order))

            write_atomically(file, write)
        shards.append(Shard(file.name, len(own), file.stat().st_size))
        progress(start + len(own), len(order))
    _tell(out, split, plan, shards)
    return shards, kept


def _check(split: str, per_shard: int, size: int | None, quality: int, seed: int) -> None:
    if split not in SPLITS:
        raise InputError(f"split {split!r} is unknown; choose one of {', '.join(SPLITS)}")
    if per_shard < 1:
        raise InputError(f"per_shard is {per_shard}; a shard holds at least 1 picture")
    if size is not None and size < 1:
        raise InputError(f"size is {size}; the short side has at least 1 pixel")
    if not 1 <= quality <= 100:
        raise InputError(f"quality is {quality}; it must lie in 1..100")
    if not 0 <= seed < 1 << 63:
        raise InputError(f"seed is {seed}; it must lie in 0..2**63 - 1")


def _fingerprint(pictures: PictureSet) -> str:
    """Differs where the source has other pictures, another order or other labels."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(pictures.classes).encode())
    digest.update(pictures.labels.numpy().tobytes())
    if pictures.pixels is not None:
        digest.update(pictures.pixels.contiguous().numpy().tobytes())
    else:
        for index in range(len(pictures)):
            digest.update(pictures.id(index).encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _begin(out: Path, split: str, plan: _Plan, classes: tuple[str, ...]) -> None:
    """Refuse to mix with what stands in the folder, then leave word that a split is being written."""
    file = out / manifest(split)
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{shown(file)}: damaged; remove it with its shards, or give another --out") from error
        wanted = asdict(plan)
        other = next((name for name in wanted if found.get(name) != wanted[name]), None)
        if other is not None:
            raise InputError(
                f"{shown(out)}: holds shards of {split} made with another {other} ({found.get(other)!r}, now "
                f"{wanted[other]!r}); remove them or give another --out"
            )
    elif strange := sorted(out.glob(f"{split}-*.tar")):
        raise InputError(f"{shown(strange[0])}: stands there already; remove it or give another --out")
    names = out / CLASSES
    wanted_names = json.dumps(list(classes), ensure_ascii=False, indent=1) + "\n"
    if classes and names.is_file() and names.read_text(encoding="utf-8") != wanted_names:
        raise InputError(f"{shown(names)}: lists other classes than {plan.source}; give another --out")
    if classes and not names.is_file():
        write_atomically(names, lambda target: target.write(wanted_names.encode()))
    for left in out.glob(f".{split}-*.tar.*.part"):  # of a run that was killed
        left.unlink(missing_ok=True)
    if not file.is_file():
        _tell(out, split, plan, None)


def _tell(out: Path, split: str, plan: _Plan, shards: list[Shard] | None) -> None:
    told: dict[str, Any] = {"complete": shards is not None, "settings": asdict(plan)}
    told["shards"] = [asdict(shard) for shard in shards or []]
    text = json.dumps(told, ensure_ascii=False, indent=1) + "\n"
    write_atomically(out / manifest(split), lambda target: target.write(text.encode()))


def _require_whole(file: Path, pictures: int, *, labelled: bool) -> None:
    found = sum(1 for _ in members(file))
    wanted = pictures * (2 if labelled else 1)
    if found != wanted:
        raise InputError(f"{shown(file)}: holds {found} files where {wanted} were written; remove it and run again")


def _add_sample(
    tar: tarfile.TarFile, key: str, pictures: PictureSet, index: int, size: int | None, quality: int
) -> None:
    data, suffix = _encoded(pictures, index, size, quality)
    _add(tar, f"{key}{suffix}", data)
    if pictures.classes:
        label = int(pictures.labels[index])
        if label < 0:
            raise InputError(f"{pictures.id(index)}: has no label; give it one, or shard without labels")
        _add(tar, f"{key}.cls", str(label).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # no owner and no date: the same pictures give the same bytes
    member.size, member.mode = len(data), 0o444
    tar.addfile(member, io.BytesIO(data))


def _encoded(pictures: PictureSet, index: int, size: int | None, quality: int) -> tuple[bytes, str]:
    """The picture as it is to stand in a shard, and its suffix."""
    if pictures.pixels is not None:
        pixels = pictures.pixels[index]
        array = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
        return _saved(Image.fromarray(array.contiguous().numpy()), "PNG"), ".png"
    if size is not None:
        image = pictures.image(index)
        short = min(image.size)
        if short > size:
            shape = (max(size, round(image.width * size / short)), max(size, round(image.height * size / short)))
            shrunk = image.resize(shape, Image.Resampling.LANCZOS)
            return _saved(shrunk, "JPEG", quality=quality, subsampling=0 if quality >= 90 else -1), ".jpg"
    suffix = os.path.splitext(pictures.id(index))[1].lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"{pictures.id(index)}: its name does not end as a picture's ({', '.join(SUFFIXES)}); rename it"
        )
    return pictures.read(index), suffix


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
