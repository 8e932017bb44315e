"""The files in a tar, found by walking its headers: where each starts and how many bytes it has. Nothing is unpacked.

A tar is a chain of headers, each telling how far off the next one is, so its pictures are passed over without reading
them. Formats: POSIX.1-2001 pax and ustar, and GNU's long names and sizes.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from regard.datasets.images import shown
from regard.vit.errors import InputError

_BLOCK = 512  # everything in a tar starts at a multiple of so many bytes
_FILES = (b"0", b"\0", b"7")
_WITHOUT_BYTES = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes: whatever size they tell
_NAME_OF_NEXT, _PAX_OF_NEXT = b"L", b"x"


class Member(NamedTuple):
    """A file in a tar: its name, where its bytes start, and how many there are."""

    name: str
    offset: int
    size: int


def members(archive: Path) -> Iterator[Member]:
    """Walk the headers of a tar: every plain file in it, in its order.

    Raises InputError naming the archive and the byte where it is damaged, and for a tar that ends too early.
    """
    try:
        with archive.open("rb", buffering=0) as file:
            yield from _walk(file, shown(archive), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise InputError(f"{shown(archive)}: cannot be read ({error.strerror})") from error


def _walk(file: BinaryIO, name: str, length: int) -> Iterator[Member]:
    place, empty = 0, 0
    of_next: dict[str, str] = {}
    while empty < 2:  # two blocks of zeros end a tar
        file.seek(place)
        header = file.read(_BLOCK)
        if len(header) < _BLOCK:
            raise InputError(f"{name}: truncated, it ends at byte {place + len(header)} without a mark; fetch it again")
        if not header.strip(b"\0"):
            place, empty = place + _BLOCK, empty + 1
            continue
        empty, offset = 0, place + _BLOCK
        _check_sum(header, name, place)
        size = int(of_next["size"]) if of_next.get("size", "").isdigit() else _number(header[124:136], name, place)
        kind = header[156:157]
        size = 0 if kind in _WITHOUT_BYTES else size
        place = offset + -(-size // _BLOCK) * _BLOCK
        if offset + size > length:
            raise InputError(
                f"{name}: truncated, {_name(header, of_next)!r} needs {size} bytes and {max(0, length - offset)} are "
                "there; fetch it again"
            )
        if kind in (_NAME_OF_NEXT, _PAX_OF_NEXT):
            data = file.read(size)
            of_next |= {"path": _text(data.rstrip(b"\0"))} if kind == _NAME_OF_NEXT else _pax(data)
            continue
        if kind in _FILES:
            yield Member(_name(header, of_next), offset, size)
        of_next = {}


def _check_sum(header: bytes, name: str, place: int) -> None:
    told = header[148:156].strip(b" \0")
    # The sum is taken with its own eight bytes read as spaces.
    if not told or sum(header) - sum(header[148:156]) + 8 * ord(" ") != _number(told, name, place):
        what = "no tar file, or a compressed one; unpack it with gunzip" if place == 0 else f"damaged at byte {place}"
        raise InputError(f"{name}: {what}; fetch or write it again")


def _number(field: bytes, name: str, place: int) -> int:
    if field[:1] == b"\x80":  # GNU's way beyond 8 GiB
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError as error:
        raise InputError(f"{name}: damaged at byte {place}; fetch or write it again") from error


def _name(header: bytes, of_next: dict[str, str]) -> str:
    if "path" in of_next:
        return of_next["path"]
    name = _text(header[:100].split(b"\0")[0])
    prefix = _text(header[345:500].split(b"\0")[0]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    """Records of `length key=value` and a line end."""
    found: dict[str, str] = {}
    while data:
        length = data.split(b" ", 1)[0]
        if not length.isdigit() or not 0 < int(length) <= len(data):
            break
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        found[_text(key)] = _text(value)
        data = data[int(length) :]
    return found
