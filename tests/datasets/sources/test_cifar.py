import os
import pickle
import struct

import numpy as np
import pytest

from regard.datasets import load_pictures
from regard.datasets.sources.inert_pickle import Call, read_pickle
from regard.vit.errors import InputError


def message(data, split="train", **options) -> str:
    with pytest.raises(InputError) as caught:
        load_pictures(data, split, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def old_pickle(fields: dict) -> bytes:
    """Protocol 2 of Python 2, written by hand: its bytes are SHORT_BINSTRING and BINSTRING."""

    def text(value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + struct.pack("<I", len(data)) + data

    def value(item) -> bytes:
        if isinstance(item, str | bytes):
            return text(item)
        if isinstance(item, int):
            return b"J" + struct.pack("<i", item)
        if isinstance(item, list):
            return b"](" + b"".join(map(value, item)) + b"e"
        rows, columns = item.shape
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01bt" + b"R"
        made = made.replace(b"(cnumpy", b"cnumpy").replace(b"U\x01bt", b"U\x01b\x87")
        dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        shape = b"K\x01" + b"J" + struct.pack("<i", rows) + b"J" + struct.pack("<i", columns) + b"\x86"
        return made + b"(" + shape + dtype + b"\x89" + text(item.tobytes()) + b"tb"

    return b"\x80\x02}(" + b"".join(text(key) + value(item) for key, item in fields.items()) + b"u."


def cifar(root, layout: str, seed=0):
    """A small CIFAR: 3 pictures a file; returns pixels and labels of train and of test."""
    rng = np.random.default_rng(seed)
    home = root / f"cifar-{'100' if '100' in layout else '10-batches'}-{layout.split('-')[-1]}"
    home.mkdir(parents=True)
    hundred, binary = "100" in layout, layout.endswith(("bin", "binary"))
    names = [f"{'fine' if hundred else 'name'}{number}" for number in range(100 if hundred else 10)]
    files = ["train", "test"] if hundred else [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    parts = {"train": [], "test": []}
    for file in files:
        pixels = rng.integers(0, 256, (3, 3072), dtype=np.uint8)
        labels = rng.integers(0, len(names), 3)
        parts["test" if "test" in file else "train"].append((pixels, labels))
        coarse = rng.integers(0, 20, (3, 1))
        if binary:
            columns = [coarse, labels[:, None], pixels] if hundred else [labels[:, None], pixels]
            (home / f"{file}.bin").write_bytes(np.hstack(columns).astype(np.uint8).tobytes())
        else:
            fields = {"fine_labels" if hundred else "labels": labels.tolist(), "data": pixels, "batch_label": "a batch"}
            (home / file).write_bytes(old_pickle(fields))
    if binary:
        (home / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text("\n".join(names) + "\n\n")
    else:
        meta = {"fine_label_names" if hundred else "label_names": names}
        (home / ("meta" if hundred else "batches.meta")).write_bytes(old_pickle(meta))
    return home, {
        split: (np.concatenate([p for p, _ in made]), np.concatenate([n for _, n in made]))
        for split, made in parts.items()
    }


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("layout", ["10-bin", "10-py", "100-binary", "100-python"])
def test_cifar_is_read_in_each_of_its_layouts(layout, inside, tmp_path):
    home, expected = cifar(tmp_path / "data", layout)
    for split, (pixels, labels) in expected.items():
        pictures = load_pictures(home if inside else home.parent, split)
        assert np.array_equal(pictures.pixels.numpy(), pixels.reshape(-1, 3, 32, 32))
        assert pictures.labels.tolist() == labels.tolist()
        assert len(pictures.classes) == (100 if "100" in layout else 10)
        assert pictures.classes[3] == ("fine3" if "100" in layout else "name3")
        red = np.asarray(pictures.image(1))[..., 0]
        assert np.array_equal(red, pixels[1, :1024].reshape(32, 32))
    assert len(load_pictures(home, "val")) == len(expected["test"][1])


def test_the_pickles_of_cifar_are_what_pickle_itself_would_read(tmp_path):
    home, expected = cifar(tmp_path, "10-py")
    data = (home / "data_batch_1").read_bytes()
    honest = pickle.loads(data, encoding="latin1")
    assert np.array_equal(honest["data"], expected["train"][0][:3])
    assert honest["labels"] == expected["train"][1][:3].tolist()


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_newer_pickle_of_cifar_is_read_too(protocol, tmp_path):
    home, expected = cifar(tmp_path, "10-py")
    pixels = expected["train"][0][:3]
    (home / "data_batch_1").write_bytes(pickle.dumps({"labels": [1, 2, 3], "data": pixels}, protocol=protocol))
    assert np.array_equal(load_pictures(home).pixels[:3].numpy().reshape(3, -1), pixels)


class _Attack:
    def __reduce__(self):
        return os.mkdir, (_Attack.path,)


def test_nothing_in_a_pickle_is_run(tmp_path):
    home, _ = cifar(tmp_path, "10-py")
    _Attack.path = str(tmp_path / "made by the pickle")
    for fields in (_Attack(), {"labels": [1], "data": _Attack()}, {"labels": _Attack(), "data": b"x"}):
        (home / "data_batch_1").write_bytes(pickle.dumps(fields))
        assert "data_batch_1" in message(home)
    made = read_pickle(pickle.dumps({"a": _Attack(), "b": (1, 2.5, None, True, [b"x", "y"])}), "a file")
    assert isinstance(made["a"], Call)
    assert made["b"] == (1, 2.5, None, True, [b"x", "y"])
    assert not (tmp_path / "made by the pickle").exists()
    with pytest.raises(InputError, match="instruction PERSID"):
        read_pickle(b"Pabc\n.", "a file")


@pytest.mark.parametrize("layout", ["10-bin", "10-py", "100-binary", "100-python"])
def test_a_truncated_or_missing_file_of_cifar_is_named(layout, tmp_path):
    home, _ = cifar(tmp_path, layout)
    name = ("train" if "100" in layout else "data_batch_2") + (".bin" if "bin" in layout else "")
    whole = (home / name).read_bytes()
    for keep in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (home / name).write_bytes(whole[:keep])
        assert name in message(home)
    if "10-" in layout:
        (home / name).unlink()
        assert name in message(home)
