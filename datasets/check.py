"""What is in a set of pictures, and what is wrong with it: every picture is opened once, then all are compared.

Facts are columns, one value per picture: about a kilobyte each, most of it the thumbnail for near copies.
"""

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256  # processors have instructions for it: about twice as fast as blake2b
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from torch.nn import functional as F

from regard.datasets.images import open_bytes, shown
from regard.datasets.near import SIDE, fingerprints, near_groups
from regard.datasets.pictures import PictureSet
from regard.vit.errors import InputError

SMALL = 32
"""A picture whose short side has fewer pixels is called small."""

_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "MPO": (".jpg", ".jpeg", ".jpe", ".mpo"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}
_MODES = {
    "1": "grey", "L": "grey", "LA": "grey", "La": "grey", "I": "grey", "I;16": "grey", "I;16B": "grey", "F": "grey",
    "P": "palette", "PA": "palette", "CMYK": "CMYK",
}  # fmt: skip
_AT_ONCE = 512
_DIGEST = 16  # bytes: no two different pictures of this world share them


@dataclass(frozen=True)
class Seen:
    """One picture of the report."""

    split: str
    id: str
    label: str | None


@dataclass(frozen=True)
class Copies:
    """Pictures that are copies of one another.

    Attributes:
        pictures: all of them; those of a `near` group may hold exact copies among them.
        across: whether they stand in more than one split.
        conflicting: whether their labels differ.
    """

    pictures: tuple[Seen, ...]
    across: bool
    conflicting: bool


@dataclass(frozen=True)
class Split:
    """What one split holds. Pixels are counted in the upright picture.

    Attributes:
        pictures, looked_at: how many there are, and how many of them were opened.
        counts: pictures of each class.
        few: classes with less than a tenth of the pictures of the median class, or fewer than 5.
        missing: classes that other splits have and this one has not.
        height, width: smallest, median and largest.
        widest, tallest: the picture with the greatest and the least width / height, and that ratio.
        small: pictures whose short side has fewer than 32 pixels; `single` those of 1 x 1.
        formats, modes: how many pictures are JPEG, PNG, …; and grey, colour, CMYK, palette.
        broken: each with the reason.
    """

    pictures: int
    looked_at: int
    unlabelled: int
    counts: dict[str, int]
    few: list[str]
    missing: list[str]
    height: tuple[int, int, int]
    width: tuple[int, int, int]
    widest: tuple[str, float] | None
    tallest: tuple[str, float] | None
    small: list[str]
    single: list[str]
    formats: dict[str, int]
    modes: dict[str, int]
    transparent: int
    rotated: int
    wrong_suffix: list[tuple[str, str]]
    broken: list[tuple[str, str]]

    @property
    def imbalance(self) -> float | None:
        """Pictures of the largest class for each of the smallest."""
        there = [count for count in self.counts.values() if count]
        return max(there) / min(there) if there else None


@dataclass(frozen=True)
class Findings:
    """Every split, and the copies within and between them; `near` is None where it was not looked for."""

    splits: dict[str, Split]
    exact: list[Copies]
    near: list[Copies] | None


@dataclass
class _Facts:
    """Columns over the pictures of a split that could be opened."""

    index: list[int] = field(default_factory=list)
    shape: list[tuple[int, int]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    thumbs: list[NDArray[np.uint8]] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    transparent: int = 0
    rotated: int = 0
    wrong_suffix: list[tuple[str, str]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)

    def add_sketches(self, sketches: NDArray[np.uint8]) -> None:
        hashes, thumbs = fingerprints(sketches)
        self.hashes.append(hashes)
        self.thumbs.append(thumbs)


def examine(
    sets: Mapping[str, PictureSet],
    *,
    near: bool = True,
    limit: int | None = None,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Findings:
    """Look at every picture of every split, and compare them all.

    Exact copies have the same pixels as upright RGB, in whatever format; near ones look the same (`near_groups`).
    `limit` opens so many pictures of each split, spread evenly over it; `workers` are threads that open pictures.
    `progress` is called with how many pictures are done, and with their number.
    Raises InputError for a limit below 1 and for fewer than 0 workers.
    """
    require_settings(limit, workers)
    chosen = {name: _chosen(len(pictures), limit) for name, pictures in sets.items()}
    total, done = sum(map(len, chosen.values())), 0
    facts: dict[str, _Facts] = {}
    for name, pictures in sets.items():
        facts[name] = _Facts()
        look = _look_at_arrays if pictures.pixels is not None else _look_at_files
        for count in look(pictures, chosen[name], facts[name], near, workers):
            done += count
            progress(done, total)
    known = {
        pictures.classes[label]
        for pictures in sets.values()
        for label in pictures.labels.unique().tolist()
        if label >= 0
    }
    splits = {name: _split(pictures, facts[name], len(chosen[name]), known) for name, pictures in sets.items()}
    exact, alike = _copies(sets, facts, near)
    return Findings(splits, exact, alike)


def require_settings(limit: int | None, workers: int) -> None:
    """Raise InputError for a limit below 1 and for fewer than 0 workers."""
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; look at 1 picture at least")
    if workers < 0:
        raise InputError(f"workers is {workers}; give 0 for none, or a number of threads")


def _chosen(size: int, limit: int | None) -> list[int]:
    return list(range(size)) if limit is None or limit >= size else [size * place // limit for place in range(limit)]


def _look_at_arrays(pictures: PictureSet, chosen: list[int], facts: _Facts, near: bool, workers: int) -> Iterator[int]:
    assert pictures.pixels is not None
    channels, *shape = pictures.pixels.shape[1:]
    for start in range(0, len(chosen), _AT_ONCE):
        own = chosen[start : start + _AT_ONCE]
        pixels = pictures.pixels[own].contiguous()
        facts.index += own
        facts.shape += [(shape[0], shape[1])] * len(own)
        facts.digests += [sha256(array).digest()[:_DIGEST] for array in pixels.numpy()]
        if near:
            small = F.interpolate(pixels.float(), (SIDE, SIDE), mode="bilinear", antialias=True)
            sketches = small.round().clamp(0, 255).byte().expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
            facts.add_sketches(sketches.contiguous().numpy())
        yield len(own)
    facts.formats["array"] += len(chosen)
    facts.modes["grey" if channels == 1 else "colour"] += len(chosen)


class _Look(NamedTuple):
    """What opening one file has told."""

    kind: str
    mode: str
    transparent: bool
    rotated: bool
    shape: tuple[int, int]
    digest: bytes
    sketch: NDArray[np.uint8] | None


def _look_at_files(pictures: PictureSet, chosen: list[int], facts: _Facts, near: bool, workers: int) -> Iterator[int]:
    def look(index: int) -> _Look | str:
        return _look(pictures, index, near)

    with ThreadPoolExecutor(max(workers, 1)) as threads:
        places = iter(chosen)
        while own := list(islice(places, _AT_ONCE)):
            sketches = []
            for index, found in zip(own, map(look, own) if workers < 1 else threads.map(look, own), strict=True):
                name = pictures.id(index)
                if isinstance(found, str):
                    facts.broken.append((name, found))
                    continue
                facts.index.append(index)
                facts.shape.append(found.shape)
                facts.digests.append(found.digest)
                facts.formats[found.kind] += 1
                facts.modes[found.mode] += 1
                facts.transparent += found.transparent
                facts.rotated += found.rotated
                if os.path.splitext(name)[1].lower() not in _SUFFIXES.get(
                    found.kind, (os.path.splitext(name)[1].lower(),)
                ):
                    facts.wrong_suffix.append((name, found.kind))
                if found.sketch is not None:
                    sketches.append(found.sketch)
            if sketches:
                facts.add_sketches(np.stack(sketches))
            yield len(own)


def _look(pictures: PictureSet, index: int, near: bool) -> _Look | str:
    """What one file is, or why it cannot be opened."""
    name = pictures.id(index)
    try:
        data = pictures.read(index)
        image = open_bytes(data, name)
    except InputError as error:
        source = pictures.source(index)
        reason = str(error).removeprefix(f"{shown(name)}: ")
        return reason.removeprefix(f"{shown(source)}: ") if isinstance(source, str) else reason
    with Image.open(io.BytesIO(data)) as header:
        try:
            orientation = header.getexif().get(ExifTags.Base.Orientation, 1)
        except Exception:  # a broken EXIF block tells no orientation; the pixels are still good
            orientation = 1
        kind, mode, transparent = header.format or "?", header.mode, header.has_transparency_data
    sketch = None
    if near:
        sketch = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0))
    digest = sha256(f"{image.height} {image.width} ".encode())
    digest.update(image.tobytes())
    upright = orientation not in range(2, 9)
    shape = (image.height, image.width)
    return _Look(kind, _MODES.get(mode, "colour"), transparent, not upright, shape, digest.digest()[:_DIGEST], sketch)


def _split(pictures: PictureSet, facts: _Facts, looked_at: int, known: set[str]) -> Split:
    labels = pictures.labels[pictures.labels >= 0]
    numbers = torch.bincount(labels, minlength=len(pictures.classes)).tolist()
    counts = {name: count for name, count in zip(pictures.classes, numbers, strict=True) if count or name in known}
    there = [count for count in counts.values() if count]
    least = max(5.0, float(np.median(there)) / 10) if there else 0.0
    height, width = np.array(facts.shape, np.int64).reshape(-1, 2).T
    ratios = width / np.maximum(height, 1)
    short = np.minimum(height, width)

    def named(places: Iterable[int]) -> list[str]:
        return [pictures.id(facts.index[place]) for place in places]

    def extreme(place: Any) -> tuple[str, float] | None:
        return (pictures.id(facts.index[int(place)]), float(ratios[int(place)]))

    return Split(
        pictures=len(pictures),
        looked_at=looked_at,
        unlabelled=int((pictures.labels < 0).sum()),
        counts=counts,
        few=[name for name, count in counts.items() if 0 < count < least],
        missing=sorted(known - {name for name, count in counts.items() if count}) if len(labels) else [],
        height=_spread(height),
        width=_spread(width),
        widest=extreme(ratios.argmax()) if len(ratios) else None,
        tallest=extreme(ratios.argmin()) if len(ratios) else None,
        small=named(np.flatnonzero(short < SMALL).tolist()),
        single=named(np.flatnonzero((height == 1) & (width == 1)).tolist()),
        formats=dict(facts.formats.most_common()),
        modes=dict(facts.modes.most_common()),
        transparent=facts.transparent,
        rotated=facts.rotated,
        wrong_suffix=facts.wrong_suffix,
        broken=facts.broken,
    )


def _spread(values: NDArray[np.int64]) -> tuple[int, int, int]:
    return (int(values.min()), int(np.median(values)), int(values.max())) if len(values) else (0, 0, 0)


def _copies(
    sets: Mapping[str, PictureSet], facts: Mapping[str, _Facts], near: bool
) -> tuple[list[Copies], list[Copies] | None]:
    places = [(name, index) for name, own in facts.items() for index in own.index]
    digests = [digest for own in facts.values() for digest in own.digests]
    of: dict[bytes, list[int]] = {}
    for place, digest in enumerate(digests):
        of.setdefault(digest, []).append(place)

    def copies(members: Iterable[int]) -> Copies:
        seen = []
        for name, index in (places[place] for place in sorted(members)):
            label = int(sets[name].labels[index])
            seen.append(Seen(name, sets[name].id(index), sets[name].classes[label] if label >= 0 else None))
        labels = {picture.label for picture in seen if picture.label is not None}
        return Copies(tuple(seen), len({picture.split for picture in seen}) > 1, len(labels) > 1)

    exact = [copies(members) for members in of.values() if len(members) > 1]
    if not near:
        return exact, None
    first = [members[0] for members in of.values()]  # one of each: exact copies have been found
    hashes = [column for own in facts.values() for column in own.hashes]
    thumbs = [column for own in facts.values() for column in own.thumbs]
    if not hashes:
        return exact, []
    groups = near_groups(np.concatenate(hashes)[first], np.concatenate(thumbs)[first])
    return exact, [copies(place for member in group for place in of[digests[first[member]]]) for group in groups]
