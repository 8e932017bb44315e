"""`regard shard`: from any data set to tar shards, and what it says of them."""

import errno
import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from regard.datasets.pictures import load_pictures
from regard.verbs.check import check
from regard.verbs.shard import shard
from regard.vit.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(7):
        path = tmp_path / "set" / ("a", "b")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((60, 40), 10 + number).save(path)
    return tmp_path / "set"


def test_a_folder_becomes_shards_and_is_told_with_the_next_command(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "shards"
    made = shard(folder, out=out, per_shard=3)
    assert [(s["name"], s["pictures"]) for s in made.as_dict()["shards"]] == [
        ("train-000000.tar", 3), ("train-000001.tar", 3), ("train-000002.tar", 1),
    ]  # fmt: skip
    assert "7 pictures (2 classes) in 3 shards of train" in str(made)
    assert str(made).endswith(f"next: regard train classify --data {out}")
    again = shard(folder, out=out, per_shard=3)
    assert "3 of them kept" in str(again)
    assert again.shards == made.shards


def test_shards_of_shards_and_of_shrunk_pictures_keep_the_labels(folder: Path, tmp_path: Path) -> None:
    shard(folder, out=tmp_path / "one", per_shard=3)
    shard(tmp_path / "one", out=tmp_path / "two", size=16, seed=4)
    pictures = load_pictures(tmp_path / "two")
    assert pictures.classes == ("a", "b")
    assert pictures.labels.bincount().tolist() == [4, 3]
    assert {Image.open(io.BytesIO(pictures.read(index))).size for index in range(7)} == {(24, 16)}


def test_a_picture_that_cannot_be_shrunk_is_named_and_leaves_no_half_shard(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "bad.jpg").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"a/bad\.jpg: not an image"):
        shard(folder, out=tmp_path / "out", size=16)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["classes.json", "train.shards.json"]


def test_a_full_disk_keeps_whole_shards_and_the_next_run_ends_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    add = tarfile.TarFile.addfile

    def full(self: tarfile.TarFile, *given: object) -> None:
        nonlocal written
        written += 1
        if written > 8:  # in the second shard of three pictures with their labels
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, *given)  # type: ignore[arg-type]

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "addfile", full)
        with pytest.raises(InputError, match=r"No space left on device.*whole is kept"):
            shard(folder, out=out, per_shard=3)
    assert sorted(file.name for file in out.iterdir()) == ["classes.json", "train-000000.tar", "train.shards.json"]
    assert shard(folder, out=out, per_shard=3).kept == 1
    assert len(load_pictures(out)) == 7


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"per_shard": 0}, "per_shard is 0"),
        ({"size": 0}, "size is 0"),
        ({"quality": 101}, "quality is 101"),
        ({"split": "trian"}, "split 'trian' is unknown"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 70}, "seed is 1180591620717411303424"),
    ],
)
def test_a_wrong_setting_is_one_line_of_error(
    wrong: dict[str, object], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        shard(folder, out=tmp_path / "out", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_line_of_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        shard(folder, out=tmp_path / "file" / "out")


def test_a_file_in_the_place_of_the_folder_is_told_as_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="file: is a file; --out is the folder"):
        shard(folder, out=tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="link: is a file or a link"):
        shard(folder, out=tmp_path / "link")


def test_shards_are_not_written_among_the_pictures_they_are_made_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "same").symlink_to(folder)
    monkeypatch.chdir(folder)
    before = sorted(tmp_path.rglob("*"))
    for out in (folder, Path("."), tmp_path / "same", folder / "a", folder / "new"):  # a class called `new`
        with pytest.raises(InputError, match="would lie among the pictures of"):
            shard(folder, out=out)
    assert sorted(tmp_path.rglob("*")) == before
    shard(folder, out=tmp_path / "shards")
    for source in (tmp_path / "shards", tmp_path / "shards" / "train-000000.tar", tmp_path / "shards" / "train-*.tar"):
        with pytest.raises(InputError, match="would lie among the pictures of"):
            shard(source, out=tmp_path / "shards")
    assert len(load_pictures(folder)) == len(load_pictures(tmp_path / "shards")) == 7


def test_shards_may_stand_beside_the_split_folders_they_are_made_of(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    folder.rename(tmp_path / "root" / "train")
    with pytest.raises(InputError, match="would lie among the pictures of"):
        shard(tmp_path / "root", out=tmp_path / "root" / "train" / "new")
    shard(tmp_path / "root", out=tmp_path / "root" / "shards")
    assert len(load_pictures(tmp_path / "root")) == len(load_pictures(tmp_path / "root" / "shards")) == 7


def test_files_that_were_copied_unread_are_told_and_check_finds_what_is_broken(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "bad.jpg").write_bytes(b"no picture")
    made = shard(folder, out=tmp_path / "out")
    assert made.unread
    assert f"files copied unread; what is broken: regard check {tmp_path / 'out'}" in str(made)
    assert [why for _, why in check(tmp_path / "out").findings.splits["train"].broken]
    (folder / "a" / "bad.jpg").unlink()
    shrunk = shard(folder, out=tmp_path / "small", size=16)
    assert not shrunk.unread
    assert "unread" not in str(shrunk)
