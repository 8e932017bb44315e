"""The one way to open an image file: fully decoded, upright RGB, or one InputError that names the file."""

import io
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from PIL import Image, ImageFile, UnidentifiedImageError

from regard.vit.errors import InputError
from regard.vit.images import to_rgb

MAX_PIXELS = 178_956_970
"""Largest image opened by default (height * width): where Pillow itself refuses."""

_LOOKS_LIKE = (
    (b"version https://git-lfs", "a Git LFS pointer; fetch the real file with `git lfs pull`"),
    (b"<!doctype html", "a web page saved under an image's name; download the image again"),
    (b"<html", "a web page saved under an image's name; download the image again"),
    (b"<svg", "an SVG drawing; export it as PNG"),
    (b"<?xml", "an XML or SVG file; export it as PNG"),
    (b"%pdf", "a PDF; export the page as PNG"),
)
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"hevc", b"mif1", b"msf1")


def open_image(
    source: str | os.PathLike[str] | BinaryIO,
    *,
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Open a path or a binary file -> upright PIL RGB image, fully decoded; a path's file is closed again.

    Transparency is composited on `background`. Images of more than `max_pixels` (height * width) are refused
    from their header, before any pixel is decoded. A truncated file is an error even where
    `ImageFile.LOAD_TRUNCATED_IMAGES` is set.
    Raises InputError, one line that names the file, for whatever keeps it from being read.
    """
    if not isinstance(source, str | os.PathLike):
        name = getattr(source, "name", None)
        return _decode(source, name if isinstance(name, str) else "the image", background, max_pixels)
    with _opened(source) as file:
        return _decode(file, os.fspath(source), background, max_pixels)


def open_bytes(data: bytes, name: str, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """`open_image` of a file's bytes; `name` is what messages call it."""
    return _decode(io.BytesIO(data), name, background, MAX_PIXELS)


def file_bytes(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a file. Raises InputError, as `open_image` does, for whatever keeps it from being read."""
    with _opened(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise InputError(f"{shown(path)}: cannot be read ({_reason(error)})") from error


def _opened(source: str | os.PathLike[str]) -> BinaryIO:
    name = os.fspath(source)
    try:
        file = open(source, "rb", opener=_at_once)  # noqa: SIM115
    except FileNotFoundError as error:
        if os.path.islink(source):
            raise InputError(f"{shown(name)}: a link to a file that is not there; mend or remove it") from error
        hint = "; download the picture first" if re.match(r"\w+:/", name) else ""
        raise InputError(f"{shown(name)}: no such file{hint}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, OSError) and os.path.isdir(source):
            problem = "a folder, not an image file"
        elif isinstance(error, PermissionError):
            problem = "no permission to read it"
        else:
            problem = f"cannot be opened ({_reason(error)})"
        raise InputError(f"{shown(name)}: {problem}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError(f"{shown(name)}: a pipe or a device, not an image file; save the picture to a file first")
    return file


def _at_once(path: str, flags: int) -> int:
    """Open without waiting: a named pipe would keep a plain `open` until somebody writes to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def shown(path: str | os.PathLike[str]) -> str:
    """Return `path` as text that stays on one line of a message."""
    text = os.fspath(path)
    return text if text.isprintable() and text else repr(text)


def _decode(file: BinaryIO, name: str, background: tuple[int, int, int], max_pixels: int) -> Image.Image:
    try:
        with truncation_is_an_error():
            return to_rgb(_header(file, max_pixels), background)
    except InputError as error:
        problem, cause = str(error), error.__cause__ or error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        pixels, limit = [*re.findall(r"\d+", str(error)), "too many", str(max_pixels)][:2]
        problem, cause = f"{pixels} pixels are above Pillow's own limit of {limit}; shrink the image", error
    except UnidentifiedImageError as error:
        problem, cause = _what_it_is_instead(file), error
    except MemoryError as error:
        problem, cause = "not enough memory to decode it; shrink the image", error
    except Exception as error:  # decoders meet broken files with every exception there is
        problem, cause = f"truncated or damaged ({_reason(error)}); replace or remove it", error
    raise InputError(f"{shown(name)}: {problem}") from cause


def _header(file: BinaryIO, max_pixels: int) -> Image.Image:
    image = Image.open(file)
    pixels = image.height * image.width
    if pixels > max_pixels:
        raise InputError(
            f"height {image.height} x width {image.width} = {pixels} pixels are above the limit of "
            f"{max_pixels}; shrink the image or raise max_pixels"
        )
    if image.format == "EPS":  # Pillow would hand it to Ghostscript, which runs it
        raise InputError("a PostScript program, not an image; export it as PNG")
    return image


def _what_it_is_instead(file: BinaryIO) -> str:
    file.seek(0)
    head = file.read(512)
    if not head:
        return "empty (0 bytes); replace or remove it"
    if head[4:8] == b"ftyp" and head[8:12] in _HEIC_BRANDS:
        return "a HEIC photo, which cannot be read here; save it as JPEG or PNG"
    for start, meaning in _LOOKS_LIKE:
        if head.lstrip().lower().startswith(start):
            return f"not an image but {meaning}"
    return f"not an image, or its header is damaged (it starts with {head[:12]!r}); replace or remove it"


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).strip()
    return " ".join(text.split()) or type(error).__name__


_lock = threading.Lock()
_decoding = 0
_found_setting = False


@contextmanager
def truncation_is_an_error() -> Iterator[None]:
    """Hold Pillow's process-wide leniency off; counted, so that threads still decode side by side."""
    global _decoding, _found_setting
    with _lock:
        if _decoding == 0:
            _found_setting, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        _decoding += 1
    try:
        yield
    finally:
        with _lock:
            _decoding -= 1
            if _decoding == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = _found_setting
