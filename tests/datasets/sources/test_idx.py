import gzip
import struct

import numpy as np
import pytest

from regard.datasets import load_pictures
from regard.vit.errors import InputError


def message(data, split="train", **options) -> str:
    with pytest.raises(InputError) as caught:
        load_pictures(data, split, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def digits(tmp_path):
    rng = np.random.default_rng(0)
    root = tmp_path / "digits"
    root.mkdir()
    for name, count in (("train", 7), ("t10k", 5)):
        images = rng.integers(0, 256, (count, 6, 9), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        (root / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (root / f"{name}-labels.idx1-ubyte").write_bytes(idx(labels))
        np.savez(root / f"{name}.npz", images=images, labels=labels)
    return root


def test_idx_files_are_read_plain_or_gzipped(digits):
    for split, name in (("train", "train"), ("test", "t10k"), ("val", "t10k")):
        expected = np.load(digits / f"{name}.npz")
        pictures = load_pictures(digits, split)
        assert np.array_equal(pictures.pixels[:, 0].numpy(), expected["images"])
        assert pictures.labels.tolist() == expected["labels"].tolist()
    assert pictures.classes == tuple("0123456789")
    assert pictures.id(3) == "digits/test/3"
    assert pictures.subset([4, 2]).subset([1]).id(0) == "digits/test/2"
    assert np.array_equal(np.asarray(pictures.image(1))[..., 2], expected["images"][1])
    with pytest.raises(ValueError, match="array"):
        pictures.read(0)


@pytest.mark.parametrize("keep", [0, 3, 20, -1])
def test_a_truncated_idx_file_is_named(keep, digits):
    labels = digits / "train-labels.idx1-ubyte"
    images = digits / "train-images-idx3-ubyte.gz"
    whole = labels.read_bytes()
    labels.write_bytes(whole[: min(keep, 12)] if keep >= 0 else whole + b"x")
    assert "train-labels.idx1-ubyte" in message(digits)
    labels.write_bytes(whole)
    images.write_bytes(images.read_bytes()[: keep if keep >= 0 else -5])
    assert "train-images-idx3-ubyte.gz" in message(digits)


def test_a_missing_or_foreign_idx_file_and_other_counts_are_named(digits):
    labels = digits / "train-labels.idx1-ubyte"
    labels.write_bytes(idx(np.zeros(6, np.uint8)))
    assert "6 labels for the 7 pictures" in message(digits)
    labels.write_bytes(idx(np.zeros((7, 1), np.uint8)))
    assert "no idx file of bytes in 1 dimension" in message(digits)
    labels.unlink()
    assert "train-labels-idx1-ubyte (or .gz) is missing" in message(digits)


def test_a_set_is_found_by_name(digits, monkeypatch):
    digits.rename(digits.parent / "fashion-mnist")
    monkeypatch.setenv("REGARD_DATA", str(digits.parent))
    pictures = load_pictures("fashion-mnist")
    assert (len(pictures), pictures.classes[:2]) == (7, ("T-shirt/top", "Trouser"))
    assert "set REGARD_DATA" in message("cifar100")
