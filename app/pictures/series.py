"""Working through a row of pictures: stable colours, broken ones skipped by name, and going on where it stopped.

All that a second run needs stands in the outputs themselves: `look.json` tells the settings and which number a file
has, and each PNG the peaks of its own maps and the peaks it was coloured by. So a kill at any moment costs no more than
the picture in hand.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from regard.pictures.arrays import Precision, load_arrays, save_arrays
from regard.pictures.maps import Maps
from regard.pictures.sheet import Sheet, Unwritable, save
from regard.pictures.sources import Item, Source
from regard.progress import bar
from regard.vit.errors import InputError
from regard.vit.files import write_atomically

Scale = Literal["shared", "each", "global", "running"]
JOURNAL, _NOTE, _CACHE = "look.json", "regard", ".maps"
Peaks = dict[str, float]


@dataclass
class Through:
    """What became of a row: how many pictures were drawn now and before, and which were skipped and why."""

    folder: Path
    made: int = 0
    kept: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """How one picture is worked on.

    Attributes:
        look: upright RGB -> its maps, one for each model.
        peaks: the greatest values of these maps, by line.
        draw: picture, maps and the peaks to colour by, or None for each map its own -> a sheet.
        scale: `each` map by itself, `shared` by the maps of a picture, `global` by all pictures, which are looked at
            once before anything is drawn, or `running`: by the greatest so far.
        models: how many maps `look` gives.
        arrays: also write `.npz`, in this precision.
    """

    look: Callable[[Image.Image], list[Maps]]
    peaks: Callable[[list[Maps]], Peaks]
    draw: Callable[[Image.Image, str, list[Maps], Peaks | None], Sheet]
    scale: Scale = "global"
    models: int = 1
    arrays: Precision | None = None


def known_files(folder: Path) -> list[str]:
    """The files of an earlier run by number; none where there was none."""
    return list(_journal(folder).get("files", []))


def work_through(source: Source, folder: Path, settings: Mapping[str, Any], work: Work) -> Through:
    """Draw every picture of a row into `folder`, holding one at a time; what an earlier run drew is kept.

    Raises InputError where the folder holds pictures of other settings, and where no picture could be drawn.
    """
    _settle(folder, settings, source)
    done = Through(folder)
    common: Peaks = {}
    try:
        if work.scale == "global":
            for item in _told(source, "looking"):
                with _skipping(done, item):
                    common = _higher(common, _peaks(source, folder, item, work))
        for item in _told(source, "drawing"):
            if item.name in done.skipped:
                continue
            with _skipping(done, item):
                common = _one(source, folder, item, work, common, done)
    except KeyboardInterrupt:
        total = f" of {source.total}" if source.total else ""
        print(f"{done.made + done.kept}{total} {source.unit} are drawn; run it again to go on", file=sys.stderr)
        raise
    with contextlib.suppress(OSError):
        (folder / _CACHE).rmdir()
    if not done.made + done.kept:
        name, why = next(iter(done.skipped.items()), (str(source.path), "no pictures"))
        raise InputError(f"none of the {len(done.skipped)} {source.unit} could be drawn; the first, {name}: {why}")
    return done


def _one(source: Source, folder: Path, item: Item, work: Work, common: Peaks, done: Through) -> Peaks:
    path = folder / source.output(item, ".png")
    note = _note(path, item, work)
    maps: list[Maps] | None = None
    picture: Image.Image | None = None
    if note is None:
        picture = item.open()
        maps = _cached(source, folder, item, work, picture)
        own = work.peaks(maps)
    else:
        own = note["peaks"]
    common = _higher(common, own) if work.scale == "running" else common
    scale = {"each": None, "shared": own}.get(work.scale, common)
    if note is not None and note["scale"] == scale:
        done.kept += 1
        return common
    picture = picture or item.open()
    maps = maps or _cached(source, folder, item, work, picture)
    drawn = work.draw(picture, item.name, maps, scale)
    if work.arrays:
        for side, part in enumerate(maps):
            save_arrays(part, _arrays(path, side), work.arrays)
    # Last, for its being there means that all is done.
    save(drawn, path, {_NOTE: json.dumps({"peaks": own, "scale": scale})})
    for side in range(len(maps)):
        _cache(source, folder, item, side).unlink(missing_ok=True)
    done.made += 1
    return common


def _peaks(source: Source, folder: Path, item: Item, work: Work) -> Peaks:
    note = _note(folder / source.output(item, ".png"), item, work)
    if note is not None:
        return note["peaks"]
    picture = item.open()
    maps = _cached(source, folder, item, work, picture)
    for side, part in enumerate(maps):
        cache = _cache(source, folder, item, side)
        if not cache.exists():
            save_arrays(part, cache)
    return work.peaks(maps)


def _cached(source: Source, folder: Path, item: Item, work: Work, picture: Image.Image) -> list[Maps]:
    """The maps that the first pass left, if they are of this very file; else they are made."""
    left = [_cache(source, folder, item, side) for side in range(work.models)]
    with contextlib.suppress(InputError, OSError):
        if all(path.stat().st_mtime_ns >= item.changed for path in left):
            return [load_arrays(path) for path in left]
    return work.look(picture)


def _note(path: Path, item: Item, work: Work) -> dict[str, Any] | None:
    """What an output of an earlier run tells of itself; None if there is none, or its picture has changed since."""
    try:
        if path.stat().st_mtime_ns < item.changed or (work.arrays and not _arrays(path, 0).exists()):
            return None
        with Image.open(path) as image:
            note = json.loads(image.info[_NOTE])
        return note if {"peaks", "scale"} <= note.keys() else None
    except (OSError, KeyError, ValueError, SyntaxError):
        return None


def _settle(folder: Path, settings: Mapping[str, Any], source: Source) -> None:
    before = _journal(folder)
    for name, value in json.loads(json.dumps(settings)).items():
        if before and before["settings"].get(name) != value:
            old = before["settings"].get(name)
            raise InputError(
                f"{folder} holds pictures of other settings: {name} was {old}, and is {value};"
                " choose another --out, or remove that folder"
            )
    content = {"settings": dict(settings), "files": list(source.files)}
    if before == json.loads(json.dumps(content)):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, ensure_ascii=False)
        write_atomically(folder / JOURNAL, lambda file: file.write(text.encode("utf-8", "surrogateescape")))
    except OSError as error:
        raise InputError(f"cannot write into {folder} ({error.strerror or error}); choose another --out") from error


def _journal(folder: Path) -> dict[str, Any]:
    path = folder / JOURNAL
    try:
        found = json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it, or choose another --out") from error
    if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
        raise InputError(f"{path}: not the settings of regard look; choose another --out")
    return found


def _told(source: Source, what: str) -> Iterator[Item]:
    """The items, with progress; an item counts when the next one is asked for."""
    with bar(what, source.total, source.unit) as update:
        for done, item in enumerate(source.items(), start=1):
            yield item
            update(done, source.total)


@contextlib.contextmanager
def _skipping(done: Through, item: Item) -> Iterator[None]:
    try:
        yield
    except Unwritable:
        raise
    except InputError as error:
        done.skipped[item.name] = str(error)


def _higher(one: Peaks, other: Peaks) -> Peaks:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}


def _arrays(path: Path, side: int) -> Path:
    return path.with_name(f"{path.stem}{'-against' if side else ''}.npz")


def _cache(source: Source, folder: Path, item: Item, side: int) -> Path:
    return _arrays(folder / _CACHE / source.output(item, ".png"), side)
