"""CIFAR-10 and CIFAR-100 as they are published, in the binary layout or in the one for Python, whose pickles are read
without being run.

Krizhevsky, 2009, "Learning multiple layers of features from tiny images"; https://www.cs.toronto.edu/~kriz/cifar.html
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.datasets.images import file_bytes, shown
from regard.datasets.sources.inert_pickle import Call, read_pickle
from regard.vit.errors import InputError

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_HOMES = ("", "cifar-10-batches-bin", "cifar-10-batches-py", "cifar-100-binary", "cifar-100-python")
_TEN = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_HUNDRED = {"train": ["train"], "test": ["test"]}


def is_cifar(folder: Path) -> bool:
    """Whether CIFAR's files lie in this folder, or in the one that its archive unpacks to."""
    return _home(folder) is not None


def load_cifar(folder: Path, split: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Pixels uint8 `(N, 3, 32, 32)`, labels int64 `(N,)` (the fine ones) and class names of train or test.

    Raises InputError naming the file for a missing, truncated or otherwise unreadable one.
    """
    home = _home(folder)
    assert home is not None
    binary = any((home / f"{name}.bin").is_file() for name in ("data_batch_1", "test_batch", "train", "test"))
    hundred = _is_hundred(home, binary)
    classes = _classes(home, binary, hundred)
    read = _read_binary if binary else _read_python
    parts = [
        read(home / (f"{name}.bin" if binary else name), hundred) for name in (_HUNDRED if hundred else _TEN)[split]
    ]
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise InputError(f"{shown(home)}: labels {labels.min()}..{labels.max()} for {len(classes)} classes")
    return torch.from_numpy(pixels), torch.from_numpy(labels), classes


def _home(folder: Path) -> Path | None:
    for name in _HOMES:
        home = folder / name
        ten = any((home / f"data_batch_1{end}").is_file() for end in ("", ".bin"))
        hundred = (home / "train.bin").is_file() or ((home / "train").is_file() and (home / "meta").is_file())
        if ten or hundred:
            return home
    return None


def _is_hundred(home: Path, binary: bool) -> bool:
    return (home / ("train.bin" if binary else "train")).is_file()


def _classes(home: Path, binary: bool, hundred: bool) -> tuple[str, ...]:
    if binary:
        file = home / ("fine_label_names.txt" if hundred else "batches.meta.txt")
        return tuple(file_bytes(file).decode("utf-8", "replace").split())
    file = home / ("meta" if hundred else "batches.meta")
    names = _fields(file).get("fine_label_names" if hundred else "label_names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{shown(file)}: holds no class names; fetch it again")
    return tuple(names)


def _read_binary(file: Path, hundred: bool) -> tuple[np.ndarray, np.ndarray]:
    data = np.frombuffer(file_bytes(file), np.uint8)
    before = 2 if hundred else 1  # coarse and fine label, or the label
    if not len(data) or len(data) % (before + _PIXELS):
        raise InputError(f"{shown(file)}: {len(data)} bytes are no whole number of pictures; fetch it again")
    records = data.reshape(-1, before + _PIXELS)
    return _pictures(records[:, before:]), records[:, before - 1].astype(np.int64)


def _read_python(file: Path, hundred: bool) -> tuple[np.ndarray, np.ndarray]:
    fields = _fields(file)
    labels, data = fields.get("fine_labels" if hundred else "labels"), fields.get("data")
    try:
        shape, dtype, raw = data.state[1], data.state[2], data.state[4]  # type: ignore[union-attr]
        raw = raw.encode("latin-1") if isinstance(raw, str) else raw
        plain = dtype.arguments[0] in ("u1", "|u1") and not data.state[3]  # type: ignore[union-attr]
        pixels = np.frombuffer(raw, np.uint8).reshape(shape)
        numbers = np.asarray(labels, np.int64)
        plain = plain and pixels.shape == (len(numbers), _PIXELS)
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError):
        plain = False
    if not plain:
        raise InputError(f"{shown(file)}: holds no {_PIXELS} bytes for each of its labels; fetch it again")
    return _pictures(pixels), numbers


def _fields(file: Path) -> dict[str, Any]:
    value = read_pickle(file_bytes(file), shown(file))
    if not isinstance(value, dict) or isinstance(value, Call):
        raise InputError(f"{shown(file)}: holds no table of fields; fetch it again")
    return {key.decode("latin-1") if isinstance(key, bytes) else str(key): field for key, field in value.items()}


def _pictures(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).reshape(-1, 3, _SIDE, _SIDE).copy()
