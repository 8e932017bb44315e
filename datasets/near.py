"""Pictures that look the same though their pixels differ: a 64-bit perceptual hash finds them, thumbnails confirm.

The hash is the DCT "pHash" (Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010):
the signs of the 63 lowest frequencies of a 32 x 32 grey thumbnail against their median. Small or similar-looking
pictures collide on 64 bits, so a pair counts only when its colour thumbnails agree too.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import cos, pi

import numpy as np
from numpy.typing import NDArray

SIDE = 32
"""Height and width of the sketch that `fingerprints` takes of each picture."""

_THUMB = 16
RADIUS = 6
"""Bits by which the hashes of two near duplicates differ at most."""

_BANDS, _SHARED = 9, 3  # of 9 bands at least 3 hold none of 6 differing bits: all pairs within the radius are found
_WINDOW = 32
_FLAT = 2.0  # grey levels: the frequencies of a flatter picture are noise, so all such pictures hash to 0
_AT_ONCE = 1 << 18
_INDEX_BITS = 32  # beside 22 bits of key and 8 of brightness
_LEVELS, _OF_CONTRAST = 6.0, 0.12  # the greatest difference of two thumbnails: grey levels, and share of their contrast


def fingerprints(sketches: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Pictures shrunk to `(N, 32, 32, 3)` with antialiasing -> hashes `(N,)` and thumbnails `(N, 16, 16, 3)`."""
    grey = sketches.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    low = _cosines() @ grey @ _cosines().T  # (N, 8, 8)
    rest = low.reshape(len(low), 64)[:, 1:]
    bits = rest > np.median(rest, axis=1, keepdims=True)
    bits &= grey.std(axis=(1, 2))[:, None] > _FLAT
    weights = np.left_shift(np.uint64(1), np.arange(63, dtype=np.uint64))
    hashes = np.where(bits, weights, np.uint64(0)).sum(axis=1, dtype=np.uint64)
    blocks = sketches.reshape(len(sketches), _THUMB, SIDE // _THUMB, _THUMB, SIDE // _THUMB, 3)
    return hashes, np.rint(blocks.mean(axis=(2, 4), dtype=np.float32)).astype(np.uint8)


def _cosines() -> NDArray[np.float32]:
    rows = [[cos(pi / SIDE * (column + 0.5) * row) for column in range(SIDE)] for row in range(8)]
    return np.array(rows, np.float32)


def near_groups(hashes: NDArray[np.uint64], thumbs: NDArray[np.uint8]) -> list[list[int]]:
    """Hashes `(N,)`, thumbnails `(N, 16, 16, 3)` -> groups of near duplicates, by index, each of two or more.

    Two hashes within 6 bits agree in at least three of nine bands, so pictures are compared only with those that
    share three bands, never each with all. Where more than 32 pictures share them, each is compared with the 32
    that follow it in brightness. A group is what such pairs join.
    """
    groups = _Groups(len(hashes))
    if len(hashes) > 1:
        looks = _Looks(thumbs)
        for first, second in _candidates(hashes, looks.brightness):
            new = groups.of[first] != groups.of[second]
            first, second = first[new], second[new]
            alike = looks.alike(first, second)
            groups.join(first[alike], second[alike])
    return groups.several()


class _Groups:
    """Which group each of N members is in: `of` is the number of its first member."""

    def __init__(self, size: int) -> None:
        self.of = np.arange(size)

    def join(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
        if not len(first):
            return
        parent = dict[int, int]()

        def root(member: int) -> int:
            while (above := parent.get(member, member)) != member:
                parent[member] = member = parent.get(above, above)
            return member

        for pair in zip(self.of[first].tolist(), self.of[second].tolist(), strict=True):
            low, high = sorted(map(root, pair))
            parent[high] = low
        moved = np.array(sorted(parent), np.int64)
        target = np.arange(len(self.of))
        target[moved] = [root(member) for member in moved.tolist()]
        self.of = target[self.of]

    def several(self) -> list[list[int]]:
        counts = np.bincount(self.of, minlength=1)
        members = np.flatnonzero(counts[self.of] > 1)
        found: dict[int, list[int]] = {}
        for member, group in zip(members.tolist(), self.of[members].tolist(), strict=True):
            found.setdefault(group, []).append(member)
        return list(found.values())


class _Looks:
    """Thumbnails to compare by pairs of indices: a coarse look first, which can only be too kind."""

    def __init__(self, thumbs: NDArray[np.uint8]) -> None:
        self.thumbs = thumbs
        self.coarse = np.empty((len(thumbs), 4 * 4 * 3), np.float32)
        contrast = np.empty(len(thumbs), np.float32)
        for start in range(0, len(thumbs), _AT_ONCE):  # in floats all thumbnails of a large set would not fit
            piece = thumbs[start : start + _AT_ONCE]
            blocks = piece.reshape(len(piece), 4, _THUMB // 4, 4, _THUMB // 4, 3)
            self.coarse[start : start + _AT_ONCE] = blocks.mean(axis=(2, 4), dtype=np.float32).reshape(len(piece), -1)
            contrast[start : start + _AT_ONCE] = piece.reshape(len(piece), -1).std(axis=1, dtype=np.float32)
        self.brightness = self.coarse.mean(axis=1).astype(np.uint64)
        self.tolerance = np.clip(_OF_CONTRAST * contrast, 1.0, _LEVELS)

    def alike(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.bool_]:
        tolerance = np.minimum(self.tolerance[first], self.tolerance[second])
        alike = _difference(self.coarse[first], self.coarse[second]) <= tolerance
        there = np.flatnonzero(alike)
        one, other = (self.thumbs[places[there]].reshape(len(there), _THUMB * _THUMB * 3) for places in (first, second))
        alike[there] = _difference(one.astype(np.float32), other.astype(np.float32)) <= tolerance[there]
        return alike


def _difference(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """The root of the mean square difference of each row."""
    return np.sqrt(np.square(one - other).mean(axis=1))


def _candidates(
    hashes: NDArray[np.uint64], brightness: NDArray[np.uint64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs of indices whose hashes are within the radius, in pieces; a pair may come more than once."""
    numbers = np.arange(len(hashes), dtype=np.uint64)
    edges = [64 * band // _BANDS for band in range(_BANDS + 1)]
    widths = [end - start for start, end in pairwise(edges)]
    bands = [
        hashes >> np.uint64(start) & np.uint64((1 << width) - 1) for start, width in zip(edges, widths, strict=False)
    ]
    for chosen in combinations(range(_BANDS), _SHARED):
        keys = np.zeros_like(hashes)
        for band in chosen:
            keys = keys << np.uint64(widths[band]) | bands[band]
        # Key, brightness and index in one number: one plain sort does all, and is several times faster than lexsort.
        packed = np.sort(keys << np.uint64(8 + _INDEX_BITS) | brightness << np.uint64(_INDEX_BITS) | numbers)
        order = (packed & np.uint64((1 << _INDEX_BITS) - 1)).astype(np.int64)
        sorted_hashes = hashes[order]
        for step in range(1, min(_WINDOW, len(order) - 1) + 1):
            # Thumbnails that differ by 6 levels at most do so in their mean: equal keys and near brightness at once.
            places = np.flatnonzero(
                (packed[step:] - packed[:-step]) >> np.uint64(_INDEX_BITS) <= np.uint64(_LEVELS + 1)
            )
            if not len(places):
                break  # the pictures are sorted: where none is as near at this step, none is at a longer one
            for start in range(0, len(places), _AT_ONCE):
                piece = places[start : start + _AT_ONCE]
                close = _bits(sorted_hashes[piece] ^ sorted_hashes[piece + step]) <= RADIUS
                yield order[piece[close]], order[piece[close] + step]


def _bits(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many bits are set in each number (numpy has a function for it from 2.0 on)."""
    ones = numbers - (numbers >> np.uint64(1) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    ones = (ones & twos) + (ones >> np.uint64(2) & twos)
    ones = ones + (ones >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (ones * np.uint64(0x0101010101010101) >> np.uint64(56)).astype(np.int64)
