"""The idx files of MNIST and its followers (Fashion-MNIST, KMNIST), plain or gzipped.

Format: http://yann.lecun.com/exdb/mnist/ ; Fashion-MNIST: Xiao, Rasul and Vollgraf, 2017, arXiv:1708.07747.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard.datasets.images import shown
from regard.vit.errors import InputError

FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_PREFIXES = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTES = 8


def idx_splits(folder: Path) -> list[str]:
    """The splits of which this folder holds the pictures."""
    return [split for split in _PREFIXES if _find(folder, split, "images", 3) is not None]


def load_idx(folder: Path, split: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Pixels uint8 `(N, 1, height, width)`, labels int64 `(N,)` and class names of one split.

    Raises InputError naming the file for a missing, damaged or truncated one, and for counts that differ.
    """
    images, labels = _find(folder, split, "images", 3), _find(folder, split, "labels", 1)
    if images is None or labels is None:
        kind = "images-idx3" if images is None else "labels-idx1"
        raise InputError(f"{shown(folder)}: {_PREFIXES[split]}-{kind}-ubyte (or .gz) is missing beside the others")
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1).long()
    if len(pixels) != len(numbers):
        raise InputError(f"{shown(labels)}: {len(numbers)} labels for the {len(pixels)} pictures of {images.name}")
    fashion = "fashion" in str(folder.resolve()).lower()
    highest = int(numbers.max()) if len(numbers) else 0
    names = FASHION if fashion and highest < len(FASHION) else tuple(map(str, range(max(10, highest + 1))))
    return pixels[:, None], numbers, names


def read_idx(file: Path, dimensions: int) -> Tensor:
    """One idx file of unsigned bytes with so many dimensions, as uint8."""
    try:
        data = file.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{shown(file)}: truncated or damaged ({reason}); fetch it again") from error
    start = 4 + 4 * dimensions
    if len(data) < start or data[:4] != bytes([0, 0, _UNSIGNED_BYTES, dimensions]):
        raise InputError(
            f"{shown(file)}: no idx file of bytes in {dimensions} dimension(s) (it starts with {data[:4]!r}); "
            "fetch it again"
        )
    shape = np.frombuffer(data, ">u4", dimensions, 4).tolist()
    if len(data) - start != math.prod(shape):
        raise InputError(
            f"{shown(file)}: {len(data) - start} bytes for {' x '.join(map(str, shape))} values; fetch it again"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())


def _find(folder: Path, split: str, what: str, dimensions: int) -> Path | None:
    for join in ("-", "."):
        for end in ("", ".gz"):
            file = folder / f"{_PREFIXES[split]}-{what}{join}idx{dimensions}-ubyte{end}"
            if file.is_file():
                return file
    return None
