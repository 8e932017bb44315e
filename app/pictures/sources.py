"""Folders, animations and videos as rows of numbered pictures, opened one at a time."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from regard.datasets import open_image
from regard.vit.errors import InputError, reason
from regard.vit.images import to_rgb

ANIMATIONS = ("GIF", "PNG", "TIFF", "WEBP")  # other files of several pictures hold previews, not frames
VIDEOS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")


@dataclass(frozen=True, eq=False)
class Item:
    """One picture of a row.

    Attributes:
        number: from 0, by which its output is named.
        name: of the file in the folder, or of the frame.
        open: gives upright RGB, and raises InputError; of a frame only until the next item is taken.
        changed: when the file was last written, in ns; 0 for a frame.
    """

    number: int
    name: str
    open: Callable[[], Image.Image]
    changed: int = 0


@dataclass(frozen=True, eq=False)
class Source:
    """A row of pictures: `items()` runs through it from the start; `total` is 0 where nobody knows before the end.

    `files` are the names of a folder's files by number, and empty for frames. `path` is where it comes from.
    """

    path: Path
    unit: str
    total: int
    items: Callable[[], Iterator[Item]]
    files: Sequence[str] = ()

    def output(self, item: Item, kind: str) -> str:
        """The name of an item's output: the number first and wide enough that names sort as the pictures do."""
        digits = max(6, len(str(self.total)))
        stem = f"-{Path(item.name).stem}" if self.files else ""
        return f"{item.number:0{digits}d}{stem}{kind}"


def source_of(path: Path, known: Sequence[str] = (), leave_out: Path | None = None) -> Source | None:
    """The row that a path stands for; None for an ordinary picture, and for what cannot be opened at all.

    Args:
        path: a folder, with the folders in it; an animated GIF, PNG, WebP or TIFF of several pages; a video.
        known: files of the folder that have numbers already; they keep them, and new ones are counted on.
        leave_out: a folder inside that is not looked at: the output.

    Raises InputError for a folder without pictures, and for a video where no package reads it.
    """
    if path.is_dir():
        return _folder(path, known, leave_out)
    if path.suffix.lower() in VIDEOS and path.is_file():
        return _video(path)
    try:
        if not path.is_file():
            return None
        with Image.open(path) as image:
            frames = getattr(image, "n_frames", 1) if image.format in ANIMATIONS else 1
    except Exception:  # `open_image` says what is wrong with it
        return None
    if frames < 2:
        return None
    open_image(path)  # what is wrong with the first frame is wrong with all
    return Source(path, "frames", frames, lambda: _frames(path, frames))


def natural(name: str) -> list[Any]:
    """Sorts 2 before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part.lower()) for part in re.split(r"(\d+)", name)] + [
        (2, 0, name)
    ]


def _folder(path: Path, known: Sequence[str], leave_out: Path | None) -> Source:
    kinds = set(Image.registered_extensions())
    hidden = None if leave_out is None else os.path.realpath(leave_out)
    found = []
    for place, folders, files in os.walk(path):
        folders[:] = [f for f in folders if not f.startswith(".") and os.path.realpath(Path(place, f)) != hidden]
        shown = (Path(place, file) for file in files if not file.startswith("."))
        found += [str(file.relative_to(path)) for file in shown if file.suffix.lower() in kinds]
    if not found:
        raise InputError(f"{path}: no pictures in this folder; give one that holds PNG, JPEG or other image files")
    there, before = set(found), set(known)
    names = [*known, *sorted((name for name in found if name not in before), key=natural)]

    def items() -> Iterator[Item]:
        for number, name in enumerate(names):
            if name in there:
                file = path / name
                changed = file.stat().st_mtime_ns if file.exists() else 0
                yield Item(number, name, lambda file=file: open_image(file), changed)  # type: ignore[misc]

    return Source(path, "pictures", len(found), items, names)


def _frames(path: Path, count: int) -> Iterator[Item]:
    with Image.open(path) as image:
        for number in range(count):

            def open_frame(number: int = number) -> Image.Image:
                try:
                    image.seek(number)
                    return to_rgb(image.copy())
                except InputError as error:
                    raise InputError(f"{path}, frame {number}: {error}") from error
                except Exception as error:
                    raise InputError(f"{path}, frame {number}: truncated or damaged ({reason(error)})") from error

            yield Item(number, f"frame {number}", open_frame)


def _video(path: Path) -> Source:
    try:
        import imageio.v3 as iio

        total = iio.improps(path).n_images or 0
        next(iter(iio.imiter(path)))
    except Exception as error:
        raise InputError(
            f"{path}: this video cannot be read ({reason(error, 80)}); pip install 'imageio[pyav]', or make pictures of"
            f" it (ffmpeg -i {path.name} frames/%06d.png) and give their folder"
        ) from error

    def items() -> Iterator[Item]:
        for number, frame in enumerate(iio.imiter(path)):
            yield Item(number, f"frame {number}", lambda frame=frame: Image.fromarray(frame).convert("RGB"))  # type: ignore[misc]

    return Source(path, "frames", int(total) if 0 < total < 1e9 else 0, items)
