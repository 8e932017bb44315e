"""What `regard shard` has written is there whole, or the first thing that is not is named."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from regard.datasets.pictures import PictureSet, load_pictures, splits_of
from regard.datasets.shards import write_shards
from regard.datasets.sources.tar import load_tar
from regard.vit.errors import InputError


@pytest.fixture
def pictures() -> PictureSet:
    pixels = torch.randint(0, 256, (23, 1, 9, 11), generator=torch.Generator().manual_seed(0)).byte()
    return PictureSet("grey/train", ("cat", "dog"), torch.arange(23) % 2, pixels)


def refused(source: Path | str, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        load_tar(str(source), **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("place", ["", "train", "training"])
def test_a_missing_shard_of_a_folder_is_named_wherever_the_folder_is_asked_for(
    pictures: PictureSet, tmp_path: Path, place: str
) -> None:
    out = tmp_path / "out"
    write_shards(pictures, out / place, per_shard=5)
    assert len(load_pictures(out)) == 23
    gone = out / place / "train-000003.tar"
    gone.unlink()
    for asked in (out, out / place):
        for labelled in (True, False):
            assert f"{gone}: no such shard (1 of the 5 in train.shards.json are missing)" in refused(
                asked, labelled=labelled
            )
    for file in (out / place).glob("*.tar"):
        file.unlink()
    with pytest.raises(InputError, match=r"train-000000\.tar: no such shard \(5 of the 5"):
        load_pictures(out)
    write_shards(pictures, out / place, per_shard=5)
    assert len(load_pictures(out)) == 23


def test_a_split_whose_shards_are_all_gone_is_still_a_split_and_test_does_not_stand_for_it(
    pictures: PictureSet, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for split in ("train", "val", "test"):
        write_shards(pictures, out, split=split, per_shard=20)
    for file in out.glob("val-*.tar"):
        file.unlink()
    assert splits_of(out) == ("train", "val", "test")
    assert "val-000000.tar: no such shard (2 of the 2" in refused(out, split="val")
    assert len(load_pictures(out)) == 23


def test_a_part_of_the_shards_may_be_asked_for_by_name(pictures: PictureSet, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_shards(pictures, out, per_shard=5)
    (out / "train-000003.tar").unlink()
    for part, count in (("train-000001.tar", 5), ("train-{000000..000002}.tar", 15), ("train-*[0124].tar", 18)):
        assert len(load_tar(str(out / part))) == count, part
    assert "train-000003.tar: no such shard" in refused(out / "train-*.tar")  # which asks for that one too


def test_a_shard_that_is_not_as_it_was_written_is_named_even_when_asked_for_alone(
    pictures: PictureSet, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_shards(pictures, out, per_shard=5)
    second, listed = out / "train-000001.tar", (out / "train.shards.json").read_text()
    whole = second.read_bytes()
    second.write_bytes(whole + bytes(512))
    for asked in (out, second, out / "train-{000000..000001}.tar"):
        assert f"{second}: has {len(whole) + 512} bytes where {len(whole)} were written" in refused(asked)
    second.write_bytes(whole)
    told = json.loads(listed)
    told["shards"][1]["pictures"] = 6
    (out / "train.shards.json").write_text(json.dumps(told))
    for asked in (out, second):
        assert f"{second}: holds 5 pictures where 6 were written" in refused(asked)
    (out / "train.shards.json").write_text(listed)
    (out / "train-000009.tar").write_bytes(whole)
    assert "train-000009.tar: none of the shards in train.shards.json" in refused(out)


@pytest.mark.parametrize("told", ["{", "[]", '{"complete": true}', '{"complete": true, "shards": [{"name": "a"}]}'])
def test_a_damaged_account_of_the_shards_is_an_error(pictures: PictureSet, tmp_path: Path, told: str) -> None:
    write_shards(pictures, tmp_path)
    (tmp_path / "train.shards.json").write_text(told)
    assert "train.shards.json: damaged" in refused(tmp_path)


def test_a_shard_that_is_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w"):
        pass
    (tmp_path / "1.tar").symlink_to(tmp_path / "gone.tar")
    assert "1.tar: no shard but a link to a file that is not there" in refused(tmp_path)
