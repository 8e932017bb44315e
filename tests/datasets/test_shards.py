"""Tar shards: read where the pictures lie, written whole or not at all, and dealt like any other set."""

import hashlib
import io
import json
import multiprocessing
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.datasets.pictures import PictureSet, load_pictures, splits_of
from regard.datasets.shards import write_shards
from regard.datasets.sources.members import members
from regard.datasets.sources.tar import load_tar
from regard.train.sampling import TrainBatches
from regard.vit.errors import InputError

CLASSES = ("cat", "dog", "eel")


def picture(number: int, kind: str = "JPEG", height: int = 40, width: int = 60) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


def tar(path: Path, files: dict[str, bytes] | list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def sample(number: int, label: int | str) -> dict[str, bytes]:
    return {f"{number:06d}.jpg": picture(number), f"{number:06d}.cls": str(label).encode()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 pictures of three classes in folders, JPEG and PNG."""
    for number in range(23):
        kind = ("JPEG", "PNG")[number % 2]
        file = tmp_path / "pictures" / CLASSES[number % 3] / f"{number}.{'jpg' if kind == 'JPEG' else 'png'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number, kind))
    return tmp_path / "pictures"


def contents(pictures: PictureSet) -> list[tuple[bytes, str]]:
    return [(pictures.read(index), pictures.classes[int(pictures.labels[index])]) for index in range(len(pictures))]


def hashes(out: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.iterdir())}


def refused(source: Path | str, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        load_tar(str(source), **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_written_shards_give_back_every_file_untouched_with_its_class(folder: Path, tmp_path: Path) -> None:
    source = load_pictures(folder)
    shards, kept = write_shards(source, tmp_path / "out", per_shard=10, seed=3)
    assert ([shard.pictures for shard in shards], kept) == ([10, 10, 3], 0)
    back = load_pictures(tmp_path / "out")
    assert back.classes == CLASSES
    assert sorted(contents(back)) == sorted(contents(source))
    assert contents(back) != contents(source)  # shuffled
    assert back.id(22) == "train-000002.tar/00000022." + back.id(22).rsplit(".")[-1]
    told = json.loads((tmp_path / "out" / "train.shards.json").read_text())
    assert told["complete"]
    assert [shard["pictures"] for shard in told["shards"]] == [10, 10, 3]
    assert [shard["bytes"] for shard in told["shards"]] == [
        (tmp_path / "out" / f"train-00000{number}.tar").stat().st_size for number in range(3)
    ]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_order(folder: Path, tmp_path: Path) -> None:
    source = load_pictures(folder)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_shards(source, tmp_path / name, per_shard=10, seed=seed)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert hashes(tmp_path / "a")["train-000000.tar"] != hashes(tmp_path / "c")["train-000000.tar"]


def test_a_run_that_stopped_goes_on_to_the_same_bytes_and_keeps_whole_shards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load_pictures(folder)
    write_shards(source, tmp_path / "whole", per_shard=5)
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done == 13:  # in the middle of the third shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(source, out, per_shard=5, progress=stop)
    assert sorted(file.name for file in out.glob("*.tar")) == ["train-000000.tar", "train-000001.tar"]
    assert "run the same `regard shard` again" in refused(out)
    (out / ".train-000002.tar.abc.part").write_bytes(b"left by a kill")
    first = (out / "train-000000.tar").stat()
    _, kept = write_shards(source, out, per_shard=5)
    assert kept == 2
    assert (out / "train-000000.tar").stat().st_mtime_ns == first.st_mtime_ns
    assert hashes(out) == hashes(tmp_path / "whole")


def _write_and_die(folder: Path, out: Path) -> None:
    def die(done: int, total: int) -> None:
        if done == 13:
            os._exit(9)

    write_shards(load_pictures(folder), out, per_shard=5, progress=die)


def test_a_killed_process_leaves_whole_shards_alone_and_the_next_run_ends_its_work(
    folder: Path, tmp_path: Path
) -> None:
    write_shards(load_pictures(folder), tmp_path / "whole", per_shard=5)
    child = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(folder, tmp_path / "out"))
    child.start()
    child.join()
    assert child.exitcode == 9
    for archive in (tmp_path / "out").glob("*.tar"):
        assert len(list(members(archive))) == 10
    write_shards(load_pictures(folder), tmp_path / "out", per_shard=5)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_shards_of_two_runs_are_never_mixed(folder: Path, tmp_path: Path) -> None:
    source, out = load_pictures(folder), tmp_path / "out"
    write_shards(source, out, per_shard=10)
    with pytest.raises(InputError, match=r"another seed \(0, now 1\)"):
        write_shards(source, out, per_shard=10, seed=1)
    with pytest.raises(InputError, match=r"another pictures \(23, now 20\)"):
        write_shards(source.subset(range(20)), out, per_shard=10)
    write_shards(source.subset(range(9)), out, split="val", per_shard=10)  # another split may stand beside
    assert splits_of(out) == ("train", "val")
    assert (len(load_pictures(out)), len(load_pictures(out, "val"))) == (23, 9)
    strange = tmp_path / "strange"
    tar(strange / "train-000000.tar", sample(0, 1))
    with pytest.raises(InputError, match="stands there already"):
        write_shards(source, strange)


def test_size_shrinks_the_short_side_and_leaves_smaller_pictures_untouched(tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "large.png").write_bytes(picture(1, "PNG", 90, 61))
    (tmp_path / "in" / "a" / "small.png").write_bytes(picture(2, "PNG", 30, 70))
    write_shards(load_pictures(tmp_path / "in"), tmp_path / "out", size=30)
    back = load_pictures(tmp_path / "out")
    found = {Path(back.id(index)).suffix: back.read(index) for index in range(2)}
    assert found[".png"] == picture(2, "PNG", 30, 70)
    shrunk = Image.open(io.BytesIO(found[".jpg"]))
    assert (shrunk.format, shrunk.size) == ("JPEG", (30, 44))


def test_arrays_are_written_without_loss(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (7, 1, 9, 11), generator=torch.Generator().manual_seed(0)).byte()
    source = PictureSet("grey/train", ("a", "b"), torch.arange(7) % 2, pixels)
    write_shards(source, tmp_path / "out", per_shard=3)
    back = load_pictures(tmp_path / "out")
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0)).tolist()
    for place, index in enumerate(order):
        assert np.array_equal(np.asarray(back.image(place))[..., 0], pixels[index, 0].numpy())
        assert back.labels[place] == source.labels[index]


def test_pictures_without_labels_make_shards_without_labels(folder: Path, tmp_path: Path) -> None:
    write_shards(load_pictures(folder, labelled=False), tmp_path / "out")
    back = load_pictures(tmp_path / "out", labelled=False)
    assert (len(back), back.classes) == (23, ())
    assert "has no label" in refused(tmp_path / "out")


def test_two_ranks_with_two_workers_see_each_picture_once_and_a_resumed_epoch_the_rest(
    folder: Path, tmp_path: Path
) -> None:
    write_shards(load_pictures(folder).subset(range(20)), tmp_path / "out", per_shard=6)
    pictures = load_pictures(tmp_path / "out")

    def seen(start: int) -> list[list[str]]:
        found = []
        for rank in range(2):
            batches = TrainBatches(len(pictures), 2, seed=5, rank=rank, world=2)
            batches.set_position(3, start)
            loader = torch.utils.data.DataLoader(
                _Ids(pictures), batch_sampler=batches, num_workers=2, collate_fn=list, multiprocessing_context="fork"
            )
            found.append([name for batch in loader for name in batch])
        return found

    whole, rest = seen(0), seen(2)
    assert not set(whole[0]) & set(whole[1])
    assert sorted(whole[0] + whole[1]) == sorted(f"{p}:{len(pictures.read(i))}" for i, p in enumerate(ids(pictures)))
    assert rest == [own[4:] for own in whole]


def ids(pictures: PictureSet) -> list[str]:
    return [pictures.id(index) for index in range(len(pictures))]


class _Ids(torch.utils.data.Dataset[list[str]]):
    """The id of each drawn picture, and how many bytes a worker process has read of it."""

    def __init__(self, pictures: PictureSet) -> None:
        self.pictures = pictures

    def __getitems__(self, draws: list) -> list[str]:  # type: ignore[type-arg]
        return [f"{self.pictures.id(draw.index)}:{len(self.pictures.read(draw.index))}" for draw in draws]


def test_a_set_of_shards_travels_to_another_process(folder: Path, tmp_path: Path) -> None:
    write_shards(load_pictures(folder), tmp_path / "out")
    pictures = load_pictures(tmp_path / "out")
    pictures.read(0)
    assert contents(pickle.loads(pickle.dumps(pictures))) == contents(pictures)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_every_length_are_read_in_every_format_of_tar(format: int, tmp_path: Path) -> None:
    names = ["1.jpg", f"{'d' * 60}/{'e' * 60}/2.jpg"]
    if format != tarfile.USTAR_FORMAT:
        names += [f"{'f' * 300}.jpg", "schön 猫.jpg"]
    archive = tar(tmp_path / "a.tar", {name: picture(number) for number, name in enumerate(names)}, format)
    found = load_tar(str(archive), labelled=False)
    assert ids(found) == [f"a.tar/{name}" for name in names]
    assert [found.read(index) for index in range(len(names))] == [picture(number) for number in range(len(names))]


def test_links_folders_absolute_and_hidden_names_are_passed_over_and_nothing_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "shards" / "a.tar"
    tar(archive, {"/etc/1.jpg": b"x", "../2.jpg": b"x", "._3.jpg": b"x", "a/../../4.jpg": b"x"} | sample(5, 0))
    with tarfile.open(archive, "a") as more:
        for name, kind in (("6.jpg", tarfile.SYMTYPE), ("7.jpg", tarfile.LNKTYPE), ("8.jpg", tarfile.DIRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, "/etc/passwd", 5000  # as some programs write it
            more.addfile(member)
        member = tarfile.TarInfo("NOTES")
        more.addfile(member)
    before = sorted(tmp_path.rglob("*"))
    found = load_tar(str(archive))
    assert ids(found) == ["a.tar/000005.jpg"]
    assert [member.name for member in members(archive)][-2:] == ["000005.cls", "NOTES"]
    assert found.read(0) == picture(5)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("names", ["classes.json", "classes.txt", None])
def test_classes_stand_beside_the_shards_or_are_those_of_train(names: str | None, tmp_path: Path) -> None:
    tar(tmp_path / "train-0.tar", sample(0, "dog") | sample(1, "cat") | {"2.jpg": b"2", "2.json": b'{"label": "eel"}'})
    tar(tmp_path / "val-0.tar", sample(3, "eel"))
    wanted = ("eel", "dog", "cat", "fox") if names else ("cat", "dog", "eel")
    if names:
        text = json.dumps(wanted) if names.endswith("json") else "\n".join(wanted)
        (tmp_path / names).write_text(text)
    for split, labels in (("train", ["dog", "cat", "eel"]), ("val", ["eel"])):
        found = load_tar(str(tmp_path), split)
        assert found.classes == wanted
        assert [found.classes[label] for label in found.labels] == labels
    tar(tmp_path / "val-0.tar", sample(3, "gnu"))
    assert "val-0.tar/000003.jpg: its label 'gnu' is none of the" in refused(tmp_path, split="val")


def test_patterns_expand_as_a_shell_expands_them(tmp_path: Path) -> None:
    for number in range(12):
        tar(tmp_path / f"train-{number:03d}.tar", sample(number, 0))
    for pattern, wanted in (
        ("train-{003..010}.tar", range(3, 11)),
        ("train-00{2,7}.tar", (2, 7)),
        ("train-01*.tar", (10, 11)),
        ("train-005.tar", (5,)),
    ):
        found = load_tar(str(tmp_path / pattern))
        assert ids(found) == [f"train-{number:03d}.tar/{number:06d}.jpg" for number in wanted], pattern
    assert "train-012.tar: no such shard (2 of the 4" in refused(tmp_path / "train-{010..013}.tar")
    assert "no shards here" in refused(tmp_path / "val-*.tar")
    assert "download them first" in refused("https://host/train-{0..3}.tar")
    assert "no shard of split 'val'" not in refused(tmp_path, split="val")  # test may stand for it
    assert "there are those of train" in refused(tmp_path, split="val")


def test_shards_may_lie_in_one_folder_per_split(tmp_path: Path) -> None:
    for split, numbers in (("train", (0, 1)), ("validation", (2,))):
        for number in numbers:
            tar(tmp_path / split / f"{number}.tar", sample(number, 0))
    assert splits_of(tmp_path) == ("train", "val")
    assert ids(load_pictures(tmp_path)) == ["0.tar/000000.jpg", "1.tar/000001.jpg"]
    assert ids(load_pictures(tmp_path, "val")) == ["2.tar/000002.jpg"]
    assert ids(load_pictures(tmp_path / "validation")) == ["2.tar/000002.jpg"]


def test_image_folders_beside_the_archives_they_came_in_are_still_image_folders(folder: Path) -> None:
    (folder.parent / "root").mkdir()
    folder.rename(folder.parent / "root" / "train")
    tar(folder.parent / "root" / "ILSVRC2012_img_train.tar", {"n01440764.tar": b"a tar of its own"})
    assert len(load_pictures(folder.parent / "root")) == 23


FAULTS = {
    "has no label": {"1.jpg": b"1"},
    "sample '1': holds no picture, only cls": {"1.cls": b"0"},
    "holds 2 pictures (jpg, png)": {"1.jpg": b"1", "1.png": b"1", "1.cls": b"0"},
    "its label is -1": {"1.jpg": b"1", "1.cls": b"-1"},
    "its label is ''": {"1.jpg": b"1", "1.cls": b" "},
    "its label is None": {"1.jpg": b"1", "1.json": b'{"caption": "a cat"}'},
    "its .json is not valid JSON": {"1.jpg": b"1", "1.json": b"{"},
    "those of other pictures are names": {"1.jpg": b"1", "1.cls": b"0", "2.jpg": b"2", "2.cls": b"cat"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_sample_is_named_with_its_shard(fault: str, tmp_path: Path) -> None:
    message = refused(tar(tmp_path / "a.tar", FAULTS[fault]))
    assert fault in message
    assert "a.tar" in message


def test_a_name_that_comes_twice_is_an_error(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar", [("1.jpg", b"1"), ("1.cls", b"0"), ("2.jpg", b"2"), ("1.JPG", b"3")])
    assert "'1.JPG' stands in it twice" in refused(archive)


def test_a_truncated_a_compressed_and_a_damaged_tar_are_told_apart(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar", sample(0, 0) | sample(1, 0))
    data = archive.read_bytes()
    for length in (300, 512, 1000, 512 + len(picture(0)) - 1, 5000):
        archive.write_bytes(data[:length])
        assert "truncated" in refused(archive), length
        assert ("'000000.jpg' needs" in refused(archive)) == (512 <= length < 512 + len(picture(0))), length
    archive.write_bytes(b"\x1f\x8b" + data[2:])
    assert "no tar file, or a compressed one" in refused(archive)
    second = next(place for place in range(512, len(data), 512) if data[place : place + 10] == b"000000.cls")
    archive.write_bytes(data[: second + 5] + b"X" + data[second + 6 :])
    assert f"damaged at byte {second}" in refused(archive)
    archive.write_bytes(b"")
    assert "truncated" in refused(archive)


def test_a_shard_cut_after_it_was_indexed_is_an_error_that_names_the_picture(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar", sample(0, 0) | sample(1, 0))
    found = load_tar(str(archive))
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(InputError, match=r"a\.tar/000001\.jpg"):
        found.read(1)


@pytest.fixture
def webdataset():
    """The library whose format it is; none of ours imports it."""
    return pytest.importorskip("webdataset")


def test_webdataset_reads_our_shards_as_we_do(folder: Path, tmp_path: Path, webdataset) -> None:
    write_shards(load_pictures(folder), tmp_path / "out", per_shard=10)
    pattern = str(tmp_path / "out" / "train-{000000..000002}.tar")
    theirs = list(webdataset.WebDataset(pattern, shardshuffle=False))
    ours = load_pictures(pattern)
    assert [s["__key__"] for s in theirs] == [Path(name).stem for name in ids(ours)]
    assert [s.get("jpg") or s["png"] for s in theirs] == [ours.read(index) for index in range(len(ours))]
    assert [int(s["cls"]) for s in theirs] == ours.labels.tolist()
    decoded = next(iter(webdataset.WebDataset(pattern, shardshuffle=False).decode("pil").to_tuple("jpg;png", "cls")))
    assert (decoded[0].size, decoded[1]) == ((60, 40), int(ours.labels[0]))


def test_we_read_shards_that_webdataset_wrote(tmp_path: Path, webdataset) -> None:
    with webdataset.ShardWriter(str(tmp_path / "train-%06d.tar"), maxcount=4, verbose=0) as writer:
        for number in range(10):
            label = {"cls": number % 3} if number % 2 else {"json": {"label": number % 3}}
            writer.write({"__key__": f"n{number % 3}/x_{number:04d}", "jpg": picture(number), **label})
    found = load_tar(str(tmp_path))
    assert found.labels.tolist() == [number % 3 for number in range(10)]
    assert [found.read(index) for index in range(10)] == [picture(number) for number in range(10)]
    assert found.id(9) == "train-000002.tar/n0/x_0009.jpg"
